"""Queries and labels as text: a sample beside what each run makes of them, and what a run does worst."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from extremis.inspecting.decode_text import TextDecoder
from extremis.inspecting.examples import LONGEST_LABEL, Example, read_examples, splits_of
from extremis.reporting.run_records import Run, evaluated_splits
from schemas.errors import ExtremisError
from schemas.layout import DataLayout
from schemas.table import Table

LONGEST = 160  # characters of a query


def weakest_rows(runs: Sequence[Run], split: str) -> np.ndarray:
    """Return the rows of the weakest queries of all runs on a split, int64 ascending."""
    bodies = (run.evaluations.get(split, {}).get("weakest", {}) for run in runs)
    return np.unique(np.asarray([row for body in bodies for row, _, _ in body.get("queries", [])], np.int64))


def weakest(data: DataLayout, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return {"run", "split", "k", "queries": rows, "labels": rows} for each evaluation that has them, test first.

    A query is {"row", "key", "text", "found", "positives"}, a label {"text", "found", "queries"}. Raises TableError.
    """
    decoder, tables = TextDecoder(data), []
    for split in (split for split in evaluated_splits(runs) if split in splits_of(data)):
        for run in (run for run in runs if run.evaluations.get(split, {}).get("weakest")):
            body = run.evaluations[split]["weakest"]
            rows = np.asarray(sorted(row for row, _, _ in body["queries"]), np.int64)
            examples = {example.row: example for example in read_examples(data, split, rows, decoder, None)}
            names = decoder.labels((label for label, _, _ in body["labels"]), LONGEST_LABEL)
            queries = [
                {
                    "row": row,
                    "key": examples[row].key,
                    "text": examples[row].text[:LONGEST],
                    "found": hits,
                    "positives": n,
                }
                for row, hits, n in body["queries"]
            ]
            labels = [{"text": names[label], "found": hits, "queries": n} for label, hits, n in body["labels"]]
            tables.append({"run": run.name, "split": split, "k": body["k"], "queries": queries, "labels": labels})
    return tables


PREDICTIONS = 10
NEGATIVES = 20  # of a table's K, the best ones
SAMPLED_GROUPS = 16

Scores: TypeAlias = dict[tuple[str, int], dict[int, float]]  # by (split, row) and label


@dataclass(frozen=True)
class Sample:
    """Queries, label texts by id, and notes on what is missing."""

    queries: list[dict[str, Any]]
    labels: dict[int, str]
    notes: list[str]


def sample_rows(rows: int, count: int, row_group_first: np.ndarray) -> np.ndarray:
    """Choose `count` rows in [0, rows): neighbours out of up to SAMPLED_GROUPS row groups that are spread evenly.

    Rows are in the order of a hash of their keys, so neighbours are a random sample. int64, ascending.
    """
    count = min(rows, count)
    groups = max(1, min(SAMPLED_GROUPS, len(row_group_first) - 1, count))
    numbers = np.unique(np.linspace(0, len(row_group_first) - 2, groups).astype(int)) if rows else np.empty(0, int)
    each = max(1, -(-count // max(1, len(numbers))))
    ranges = [np.arange(row_group_first[g], min(row_group_first[g] + each, row_group_first[g + 1])) for g in numbers]
    sampled = np.concatenate([np.empty(0, np.int64), *ranges]).astype(np.int64)[:count]
    if len(sampled) < count:  # short row groups: fill up from the start
        rest = np.setdiff1d(np.arange(min(rows, count * 2)), sampled)
        sampled = np.union1d(sampled, rest[: count - len(sampled)])
    return sampled


def with_rows(sampled: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return as many rows as were `sampled`, the rows `first` among them: int64, ascending."""
    first = first[: len(sampled)]
    return np.union1d(first, np.setdiff1d(sampled, first)[: len(sampled) - len(first)])


def sample(data: DataLayout, runs: list[Run], splits: list[str], count: int, predict: bool) -> Sample:
    """Read about `count` queries of `splits` in equal parts, with the runs' negatives and predictions.

    The weakest ones of the runs' evaluations are among them. A run that cannot predict (no checkpoint yet) is left out,
    with a note. Raises TableError.
    """
    decoder = TextDecoder(data)
    notes: list[str] = []
    by_run: dict[str, list[Example]] = {run.name: [] for run in runs}
    weak: dict[str, np.ndarray] = {}
    for split in splits:
        table = Table.open(data.queries(split), "queries")
        weak[split] = weakest_rows(runs, split)
        rows = with_rows(sample_rows(table.rows, -(-count // len(splits)), table.groups.first), weak[split])
        for run in runs:
            by_run[run.name] += read_examples(data, split, rows, decoder, run.layout)
    for example in (example for examples in by_run.values() for example in examples):
        example.negatives = example.negatives[:NEGATIVES]
    scores: dict[str, Scores] = {run.name: {} for run in runs}
    for run in runs if predict else []:
        try:
            scores[run.name] = _score(data, run, by_run[run.name])
        except ExtremisError as error:
            notes.append(f"{run.name}: no predictions. {error}")
    named = (label for examples in by_run.values() for example in examples for label in example.label_ids)
    labels = decoder.labels(named, LONGEST_LABEL)
    queries = [_describe(examples, list(scores.values())) for examples in zip(*by_run.values(), strict=True)]
    for query in queries:
        query["weak"] = query["row"] in weak[query["split"]]
    return Sample(queries, labels, notes)


def _score(data: DataLayout, run: Run, examples: list[Example]) -> Scores:
    """Fill in predictions; return the scores of each positive and negative by the newest checkpoint."""
    from trainer.evaluation.ranking import score_rows
    from trainer.model import load_model, trained_labels

    _, model, checkpoint = load_model(data, run.layout, earlier=True)
    trained = trained_labels(model, checkpoint)
    scores: Scores = {}
    for split in dict.fromkeys(example.split for example in examples):
        part = [example for example in examples if example.split == split]
        queries = Table.open(data.queries(split), "queries")
        rows = queries.rows_at(np.asarray([example.row for example in part]), model.columns)
        named = [[*example.positives, *(label for label, _ in example.negatives)] for example in part]
        if trained is not None:
            named = [[label for label in labels if label < trained] for labels in named]
        best, top, named_scores = score_rows(model, rows, named, PREDICTIONS, trained)
        for example, row_best, row_top in zip(part, best.tolist(), top.tolist(), strict=True):
            example.predictions = [pair for pair in zip(row_top, row_best, strict=True) if pair[0] >= 0]
        for example, row_labels, row_scores in zip(part, named, named_scores, strict=True):
            scores[split, example.row] = dict(zip(row_labels, row_scores, strict=True))
    return scores


def _describe(examples: tuple[Example, ...], scores: list[Scores]) -> dict[str, Any]:
    """Describe one query for the page, with a view per run: scores of the newest checkpoint, else of the table."""
    query = examples[0]
    views = [
        _describe_view(example, by_row.get((query.split, query.row), {}))
        for example, by_row in zip(examples, scores, strict=True)
    ]
    return {**{name: getattr(query, name) for name in ("split", "row", "key", "text", "positives")}, "runs": views}


def _describe_view(example: Example, scores: dict[int, float]) -> dict[str, Any]:
    weakest = min((scores[label] for label in example.positives if label in scores), default=None)
    negatives = []
    for label, mined_score in example.negatives:
        suspect = weakest is not None and scores[label] > weakest
        negatives.append([label, _short(scores[label] if scores else mined_score), suspect])
    return {
        "positives": [_short(scores[label]) if label in scores else None for label in example.positives],
        "predictions": [[label, _short(score)] for label, score in example.predictions],
        "negatives": negatives,
        "suspects": sum(suspect for _, _, suspect in negatives),
        "hit": example.predictions[0][0] in example.positives if example.predictions else None,
    }


def _short(score: float) -> float:
    return float(f"{score:.4g}")
