"""Queries and labels as text: a sample with each run's output, and the weakest queries of each run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from extremis.inspecting.examples import LONGEST_LABEL, Example, TextDecoder, clean_text, read_examples, splits_of
from extremis.reporting.run_records import Run, evaluated_splits, say_split
from schemas.errors import ExtremisError
from schemas.layout import DataLayout
from schemas.table import Table

QUERY_CHARACTERS = 160  # characters of a query
GROUPS = 20  # groups of weakest queries, one per text


def list_weakest(data: DataLayout, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return {"run", "split", "title", "k", "queries", "labels"} for each evaluation with weakest queries, test first.

    Queries are groups from `group_queries`, a label is {"id", "found", "queries"}. Raises TableError.
    """
    decoder, tables = TextDecoder(data), []
    for split in (split for split in evaluated_splits(runs) if split in splits_of(data)):
        for run in (run for run in runs if run.evaluations.get(split, {}).get("weakest")):
            body = run.evaluations[split]["weakest"]
            rows = np.asarray(sorted(row for row, _, _ in body["queries"]), np.int64)
            examples = {example.row: example for example in read_examples(data, split, rows, decoder, None)}
            queries = group_queries([(examples[row], found, positives) for row, found, positives in body["queries"]])
            labels = [dict(zip(("id", "found", "queries"), label, strict=True)) for label in body["labels"]]
            facts = {"run": run.name, "split": split, "title": say_split(split), "k": body["k"]}
            tables.append({**facts, "queries": queries[:GROUPS], "labels": labels})
    return tables


def group_queries(counted: Sequence[tuple[Example, int, int]]) -> list[dict[str, Any]]:
    """Group (query, number of found positives, number of positives) by text, in order of first occurrence.

    A group is {"text", "keys", "rows", "found", "positives"}; a truncated text forms a group of its own.
    """
    groups: dict[tuple[str, int | None], dict[str, Any]] = {}
    for query, found, positives in counted:
        same = query.text, query.row if query.text.endswith("…") else None
        empty: dict[str, Any] = {
            "text": clean_text(query.text, QUERY_CHARACTERS),
            "keys": [],
            "rows": [],
            "found": 0,
            "positives": 0,
        }
        group = groups.setdefault(same, empty)
        group["keys"].append(query.key)
        group["rows"].append(query.row)
        group["found"] += found
        group["positives"] += positives
    return list(groups.values())


PREDICTIONS = 10
NEGATIVES = 20  # best negatives shown of a table's K
LABELS_WITH_NEIGHBOURS = 500  # maximum of labels with a list of nearest labels
SAMPLED_RANGES = 16

Scores: TypeAlias = dict[tuple[str, int], dict[int, float]]  # score by (split, row) and label
Near: TypeAlias = dict[int, list[tuple[int, float]]]  # nearest labels and their cosines, by label


class Label(NamedTuple):
    """A label's text (or key), key, and number of training points; `shared`: other labels have the same text."""

    text: str
    key: str
    points: int
    shared: bool


def name_labels(decoder: TextDecoder, ids: Iterable[int]) -> dict[int, Label]:
    """Return labels by id. If labels share a text, the page also shows their keys. Raises TableError."""
    named = {row["label_id"]: (clean_text(str(row["key"])), row) for row in decoder.label_rows(ids)}
    texts = {label: clean_text(row["text"], LONGEST_LABEL) or key for label, (key, row) in named.items()}
    labels = Counter(texts.values())
    return {i: Label(texts[i], key, row["frequency"], labels[texts[i]] > 1) for i, (key, row) in named.items()}


@dataclass(frozen=True)
class Sample:
    """Queries, labels by id, the nearest labels of each label for each run, and notes on missing parts."""

    queries: list[dict[str, Any]]
    labels: dict[int, Label]
    near: list[Near]
    notes: list[str]


def sample_rows(rows: int, count: int) -> np.ndarray:
    """Choose `count` rows in [0, rows), or all rows, in a few evenly spread ranges, so that few row groups are read.

    Rows are ordered by a hash of the key, so that a range is a random sample. Returns int64, ascending.
    """
    count = min(rows, count)
    edges = np.linspace(0, count, min(SAMPLED_RANGES, count) + 1).astype(np.int64)
    starts = edges[:-1] * rows // max(1, count)
    return np.arange(count) + np.repeat(starts - edges[:-1], np.diff(edges))


def sample_queries(
    data: DataLayout,
    runs: list[Run],
    splits: list[str],
    count: int,
    predict: bool,
    tables: Sequence[Mapping[str, Any]] = (),
) -> Sample:
    """Read about `count` queries, equally many from each of `splits`, with the runs' negatives and predictions.

    The sample contains the first query of each group in `tables` (from `list_weakest`), and the names of the labels in
    `tables`. A run that cannot predict (no checkpoint yet) has no predictions, but a note. Raises TableError.
    """
    decoder = TextDecoder(data)
    notes: list[str] = []
    by_run: dict[str, list[Example]] = {run.name: [] for run in runs}
    groups = [(shown["split"], group) for shown in tables for group in shown["queries"]]
    weak = {split: {group["rows"][0] for of, group in groups if of == split} for split in splits}
    for split in splits:
        table = Table.open(data.queries(split), "queries")
        sampled = sample_rows(table.rows, -(-count // len(splits)))
        first = np.asarray(sorted(weak[split]), np.int64)[: len(sampled)]
        others = np.setdiff1d(sampled, first)[: len(sampled) - len(first)]  # keeps the total at the sample size
        rows = np.union1d(first, others)
        for run in runs:
            by_run[run.name] += read_examples(data, split, rows, decoder, run.layout)
    examples = [example for examples in by_run.values() for example in examples]
    for example in examples:
        example.negatives = example.negatives[:NEGATIVES]
    frequent = Counter(label for example in examples for label in example.positives).most_common()
    weakest_labels = [label["id"] for shown in tables for label in shown["labels"]]
    label_ids = list(dict.fromkeys([*weakest_labels, *(label for label, _ in frequent)]))[:LABELS_WITH_NEIGHBOURS]
    scores: dict[str, Scores] = {run.name: {} for run in runs}
    near: dict[str, Near] = {run.name: {} for run in runs}
    for run in runs if predict else []:
        try:
            scores[run.name], near[run.name] = _score(data, run, by_run[run.name], label_ids)
        except ExtremisError as error:
            notes.append(f"{run.name}: no predictions. {error}")
    named = [label for example in examples for label in example.label_ids]
    found = [label for nearest in near.values() for row in nearest.values() for label, _ in row]
    labels = name_labels(decoder, [*weakest_labels, *named, *found])
    queries = [_describe(examples, list(scores.values())) for examples in zip(*by_run.values(), strict=True)]
    for query in queries:
        query["weak"] = query["row"] in weak[query["split"]]
    return Sample(queries, labels, list(near.values()), notes)


def _score(data: DataLayout, run: Run, examples: list[Example], label_ids: list[int]) -> tuple[Scores, Near]:
    """Add predictions to `examples`; return scores of all positives and negatives, and neighbours of `label_ids`.

    All results are computed with the checkpoint and the kind of scores that represent the run.
    """
    from trainer.evaluation.fusion_files import open_fused, scored_step
    from trainer.evaluation.ranking import nearest_labels, score_rows
    from trainer.evaluation.split import label_statistics
    from trainer.inputs import scored_columns
    from trainer.model import load_model, trained_labels

    _, model, checkpoint = load_model(data, run.layout, scored_step(run.layout), earlier=True)
    trained, root = trained_labels(model, checkpoint), run.layout.root
    candidates = replace(label_statistics(data), trained_labels=trained).candidates()
    assert run.representative is not None, "it has a checkpoint"
    scores: Scores = {}
    for split in dict.fromkeys(example.split for example in examples):
        part = [example for example in examples if example.split == split]
        queries = Table.open(data.queries(split), "queries")
        rows = queries.rows_at(np.asarray([example.row for example in part]), scored_columns(queries, model.columns))
        fused = open_fused(data.root, root, checkpoint, model, split) if run.representative.scores == "fused" else None
        named = [[*example.positives, *(label for label, _ in example.negatives)] for example in part]
        if trained is not None:
            named = [[label for label in labels if label < trained] for labels in named]
        best, top, named_scores = score_rows(model, rows, named, PREDICTIONS, candidates, fused)
        for example, row_best, row_top in zip(part, best.tolist(), top.tolist(), strict=True):
            example.predictions = [pair for pair in zip(row_top, row_best, strict=True) if pair[0] >= 0]
        for example, row_labels, row_scores in zip(part, named, named_scores, strict=True):
            scores[split, example.row] = dict(zip(row_labels, row_scores, strict=True))
    return scores, nearest_labels(model.head.vectors[:trained, : model.encoder.dimension], label_ids)


def _describe(examples: tuple[Example, ...], scores: list[Scores]) -> dict[str, Any]:
    """Describe one query for the page, with a view per run. Scores come from the run's checkpoint, else its table."""
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
        negatives.append([label, _round_score(scores[label] if scores else mined_score), suspect])
    return {
        "positives": [_round_score(scores[label]) if label in scores else None for label in example.positives],
        "predictions": [[label, _round_score(score)] for label, score in example.predictions],
        "negatives": negatives,
        "suspects": sum(suspect for _, _, suspect in negatives),
        "hit": example.predictions[0][0] in example.positives if example.predictions else None,
    }


def _round_score(score: float) -> float:
    return float(f"{score:.4g}")
