"""A checkpoint of a run against a split of its data."""

import json
from typing import Any

from extremis.console import Bar
from schemas import storage
from schemas.layout import DataLayout, RunLayout
from trainer.evaluation.evaluate import Scorer
from trainer.model import load_model


def evaluate(
    data: str, run: str, split: str, step: int | None = None, limit: int | None = None, filter: bool = True
) -> dict[str, Any]:
    """Metrics, intervals and deciles of a run's checkpoint on a split. Raises ExtremisError.

    Kept in the run where they are of all its queries with the filter applied, for `extremis report`.
    """
    _, model, checkpoint = load_model(DataLayout(data), RunLayout(run), step)
    scorer = Scorer.open(DataLayout(data), model, split)
    with Bar(f"evaluate {split}", scorer.rows) as bar:
        scores = scorer.score(limit, bar.update, filter=filter)
    report = {"step": int(checkpoint.state["progress"]["global_step"]), **scores.report()}
    if limit is None and filter:
        body = json.dumps({"split": split, **report}, sort_keys=True)
        storage.write_bytes(RunLayout(run).evaluation(split, report["step"]), body.encode())
    return report
