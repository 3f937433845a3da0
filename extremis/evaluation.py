"""A checkpoint of a run against a split of its data."""

from typing import Any

from extremis.console import Bar
from schemas.layout import DataLayout, RunLayout
from trainer.evaluation.evaluate import Scorer
from trainer.model import load_model


def evaluate(
    data: str, run: str, split: str, step: int | None = None, limit: int | None = None, filter: bool = True
) -> dict[str, Any]:
    """Metrics, intervals and deciles of a run's checkpoint on a split. Raises ExtremisError."""
    _, model, checkpoint = load_model(DataLayout(data), RunLayout(run), step)
    scorer = Scorer.open(DataLayout(data), model, split)
    with Bar(f"evaluate {split}", scorer.rows) as bar:
        scores = scorer.score(limit, bar.update, filter=filter)
    return {"step": checkpoint.state["progress"]["global_step"], **scores.report()}
