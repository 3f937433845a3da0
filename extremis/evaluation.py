"""A checkpoint of a run against a split of its data."""

import json
from typing import Any

from extremis.console import Bar
from schemas import storage
from schemas.layout import DataLayout, RunLayout
from trainer.evaluation.evaluate import Scorer
from trainer.group import ALONE, Group
from trainer.model import load_model


def evaluate(
    data: str,
    run: str,
    split: str,
    step: int | None = None,
    limit: int | None = None,
    filter: bool = True,
    group: Group = ALONE,
) -> dict[str, Any]:
    """Metrics, intervals and deciles of a run's checkpoint on a split, the same on every rank. Raises ExtremisError.

    Rank 0 keeps them in the run where they are of all its queries with the filter applied, for `extremis report`.
    """
    _, model, checkpoint = load_model(DataLayout(data), RunLayout(run), step, group)
    scorer = Scorer.open(DataLayout(data), model, split, group)
    with Bar(f"evaluate {split}", scorer.rows, quiet=not group.first) as bar:
        scores = scorer.score(limit, bar.update, filter=filter)
    report = {"step": int(checkpoint.state["progress"]["global_step"]), **scores.report()}
    if group.first and limit is None and filter:
        body = json.dumps({"split": split, **report}, sort_keys=True)
        storage.write_bytes(RunLayout(run).evaluation(split, report["step"]), body.encode())
    return report
