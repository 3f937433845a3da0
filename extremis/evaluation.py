"""A checkpoint of a run against a split of its data."""

import json
from collections.abc import Sequence
from typing import Any

from extremis.console import Bar
from schemas import storage
from schemas.layout import DataLayout, RunLayout
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.evaluation.evaluate import LabelStatistics, Scorer, label_statistics
from trainer.evaluation.fusion.fit import open_fusion
from trainer.evaluation.fusion.fused import Fused
from trainer.evaluation.fusion.ranking import By, Ranking, embed_label_texts
from trainer.group import ALONE, Group
from trainer.model import Model, load_model


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
    by: By = "classifier",
) -> dict[str, Any]:
    """Metrics, intervals and deciles of a run's checkpoint on a split, the same on every rank. Raises ExtremisError.

    `ks`, `seen_only` and `zero_shot` are of `Scorer.score`. Rank 0 keeps the report in the run, for `extremis report`,
    where it is of all queries and candidates, by the scores that it was trained with and with the filter applied.
    """
    _, model, checkpoint = load_model(DataLayout(data), RunLayout(run), step, group)
    statistics = label_statistics(DataLayout(data))
    ranking = _ranking(data, run, checkpoint, model, statistics, group, by)
    scorer = Scorer.open(DataLayout(data), model, split, group, ranking, statistics)
    with Bar(f"evaluate {split}", scorer.rows, quiet=not group.first) as bar:
        scores = scorer.score(limit, bar.update, filter, ks, seen_only, zero_shot)
    report = {"step": checkpoint.step, "scores": by, **scores.report()}
    if group.first and limit is None and filter and not seen_only and by == "classifier":
        body = json.dumps({"split": split, **report}, sort_keys=True)
        storage.write_bytes(RunLayout(run).evaluation(split, report["step"]), body.encode())
    return report


def _ranking(
    data: str, run: str, checkpoint: Checkpoint, model: Model, statistics: LabelStatistics, group: Group, by: By
) -> Ranking:
    if by == "classifier":
        return Ranking.of(model, group)
    layout = DataLayout(data)
    if by != "fused":
        return Ranking.by_texts(model, layout, group, add=by == "sum")
    tree, manifest = group.decide(lambda: open_fusion(data, run, checkpoint))
    shortlist = int(manifest.parameters["shortlist"])
    texts = embed_label_texts(model, layout)
    fused = Fused(tree, texts, statistics.frequency, shortlist, model.head.start, group)
    return Ranking.of(model, group, fused)
