"""A checkpoint of a run against a split of its data."""

import json
from collections.abc import Sequence
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
    ks: Sequence[int] = (),
    seen_only: bool = False,
    zero_shot: bool = False,
) -> dict[str, Any]:
    """Metrics, intervals and deciles of a run's checkpoint on a split, the same on every rank. Raises ExtremisError.

    `ks`, `seen_only` and `zero_shot` are of `Scorer.score`. Rank 0 keeps the report in the run, for `extremis report`,
    where it is of all queries and candidates with the filter applied.
    """
    _, model, checkpoint = load_model(DataLayout(data), RunLayout(run), step, group)
    scorer = Scorer.open(DataLayout(data), model, split, group)
    with Bar(f"evaluate {split}", scorer.rows, quiet=not group.first) as bar:
        scores = scorer.score(limit, bar.update, filter, ks, seen_only, zero_shot)
    report = {"step": int(checkpoint.state["progress"]["global_step"]), **scores.report()}
    if group.first and limit is None and filter and not seen_only:
        body = json.dumps({"split": split, **report}, sort_keys=True)
        storage.write_bytes(RunLayout(run).evaluation(split, report["step"]), body.encode())
    return report
