"""A sample of queries beside what each run makes of them: where one sees false negatives."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from extremis.inspecting.decode_text import Words
from extremis.inspecting.examples import LONGEST_LABEL, Example, newest_joined, read_examples
from extremis.inspecting.rows import Rows
from extremis.report.runs import Run
from schemas.errors import ExtremisError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import row_groups_of

PREDICTIONS = 10
NEGATIVES = 20  # of a table's K, the best ones
SAMPLED_GROUPS = 16


@dataclass(frozen=True)
class Sample:
    """Queries, label texts by id, and what of it could not be had."""

    queries: list[dict[str, Any]]
    labels: dict[int, str]
    notes: list[str]


def sample_rows(rows: int, wanted: int, row_group_first: np.ndarray) -> np.ndarray:
    """`wanted` rows in [0, rows): neighbours out of up to SAMPLED_GROUPS row groups that are spread evenly.

    Rows are in the order of a hash of their keys, so neighbours are as good as any. int64, ascending.
    """
    wanted = min(rows, wanted)
    groups = max(1, min(SAMPLED_GROUPS, len(row_group_first) - 1, wanted))
    at = np.unique(np.linspace(0, len(row_group_first) - 2, groups).astype(int)) if rows else np.empty(0, int)
    each = -(-wanted // max(1, len(at)))
    each = max(each, 1)
    chosen = [np.arange(row_group_first[g], min(row_group_first[g] + each, row_group_first[g + 1])) for g in at]
    found = np.concatenate([np.empty(0, np.int64), *chosen]).astype(np.int64)[:wanted]
    if len(found) < wanted:  # short row groups: fill up from the start
        found = np.union1d(found, np.setdiff1d(np.arange(min(rows, wanted * 2)), found)[: wanted - len(found)])
    return found


def sample(data: DataLayout, runs: list[Run], splits: list[str], wanted: int, predict: bool) -> Sample:
    """About `wanted` queries of `splits` in equal parts, with the runs' negatives and predictions.

    Raises TableError. A run that cannot predict (no checkpoint yet) is left out, with a note.
    """
    words = Words(data)
    notes: list[str] = []
    gathered: dict[str, dict[str, list[Example]]] = {}
    for split in splits:
        manifest = open_manifest(data.queries(split), "queries")
        _, _, first = row_groups_of(manifest)
        rows = sample_rows(manifest.rows, -(-wanted // len(splits)), first)
        gathered[split] = {
            run.name: read_examples(data, split, rows, words, newest_joined(run.layout, manifest)) for run in runs
        }
    scored = {}
    for run in runs if predict else []:
        mine = {split: by_run[run.name] for split, by_run in gathered.items()}
        try:
            scored[run.name] = _score(data, run, mine)
        except ExtremisError as error:
            notes.append(f"{run.name}: no predictions. {error}")
    examples = [one for by_run in gathered.values() for found in by_run.values() for one in found]
    for one in examples:
        one.negatives = one.negatives[:NEGATIVES]
    labels = words.labels((label for one in examples for label in one.label_ids), LONGEST_LABEL)
    queries = [
        _describe([gathered[split][run.name][number] for run in runs], [scored.get(run.name, {}) for run in runs])
        for split in splits
        for number in range(len(next(iter(gathered[split].values()))))
    ]
    return Sample(queries, labels, notes)


def _score(data: DataLayout, run: Run, by_split: dict[str, list[Example]]) -> dict[tuple[str, int], dict[int, float]]:
    """Fills in predictions; gives the present score of each positive and negative by (split, row) and label."""
    from trainer.evaluation.score_rows import score_rows
    from trainer.model import load_model

    _, model, _ = load_model(data, run.layout)
    found: dict[tuple[str, int], dict[int, float]] = {}
    for split, examples in by_split.items():
        if not examples:
            continue
        manifest = open_manifest(data.queries(split), "queries")
        table = Rows(data.queries(split), manifest).read(np.asarray([one.row for one in examples]), model.columns)
        named = [[*one.positives, *(label for label, _ in one.negatives[:NEGATIVES])] for one in examples]
        scores, top, of_named = score_rows(model, table, named, PREDICTIONS)
        for one, best, of, labels, now in zip(examples, scores.tolist(), top.tolist(), named, of_named, strict=True):
            one.predictions = [(label, score) for label, score in zip(of, best, strict=True) if label >= 0]
            found[split, one.row] = dict(zip(labels, now, strict=True))
    return found


def _describe(by_run: list[Example], scores: list[dict[tuple[str, int], dict[int, float]]]) -> dict[str, Any]:
    """One query for the page. `now` scores are those of the run's newest checkpoint."""
    one = by_run[0]
    views = []
    for example, scored in zip(by_run, scores, strict=True):
        now = scored.get((example.split, example.row))
        weakest = min((now[label] for label in example.positives), default=None) if now else None
        negatives = [
            [label, _short(now[label] if now else score), bool(weakest is not None and now and now[label] > weakest)]
            for label, score in example.negatives
        ]
        views.append(
            {
                "positives": [_short(now[label]) if now else None for label in example.positives],
                "predictions": [[label, _short(score)] for label, score in example.predictions],
                "negatives": negatives,
                "suspects": sum(negative[2] for negative in negatives),
                "hit": example.predictions[0][0] in example.positives if example.predictions else None,
            }
        )
    return {
        "split": one.split,
        "row": one.row,
        "key": one.key,
        "text": one.text,
        "positives": one.positives,
        "runs": views,
    }


def _short(score: float) -> float:
    return float(f"{score:.4g}")
