"""Formats of examples: columns for sentence-transformers, and JSON lines for Tevatron and FlagEmbedding.

A place is the index of a label in a batch of rows: the positives of all rows come first, then the negatives [R, n], row
by row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas import PAD
from schemas.ragged import Ragged, offsets_of
from schemas.randomness import Purpose, generator
from trainer.negatives.draws import splitmix64
from trainer.tuples.tables import TupleTables

Columns = dict[str, pa.Array]
Count = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # number of examples, from positives, negatives and n


@dataclass(frozen=True)
class Examples:
    """E examples: example e is number `number[e]` among the examples of row `row[e]`.

    `labels`, and their scores if requested, are indexed by place; `positive` [E]: places of the positives; `negative`
    [E, n]: places of the negatives, best first; only the first `found` [E] of the negatives are valid.
    """

    tables: TupleTables
    rows: np.ndarray
    positives: Ragged
    labels: np.ndarray
    scores: np.ndarray | None
    row: np.ndarray
    number: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    found: np.ndarray

    def anchors(self, name: str = "anchor") -> Columns:
        return {name: self.tables.texts(self.tables.queries, self.rows[self.row])}

    def texts(self, places: np.ndarray) -> pa.Array:
        return self.tables.texts(self.tables.labels, self.labels[places])

    def both(self) -> dict[str, Ragged]:
        """For each example, return the places of all positives and of the negatives of the example's row."""
        positives = Ragged(np.arange(len(self.positives.values)), self.positives.offsets).take(self.row)
        kept = np.arange(self.negative.shape[1]) < self.found[:, None]
        return {"pos": positives, "neg": Ragged.from_counts(self.negative[kept], self.found)}


def count_examples(tables: TupleTables, positives: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """Return the number of examples per row, [R], from the numbers of positives and negatives per row."""
    each = positives if tables.options.each_positive else np.minimum(positives, 1)
    return _FORMS[tables.options.form][0](each, np.minimum(negatives, tables.width), tables.width)


def make_examples(
    tables: TupleTables, rows: np.ndarray, positives: Ragged, hard: np.ndarray, epoch: int, spread: bool
) -> pa.Table:
    """Make the examples of `rows` [R], with their positives and negatives [R, K]. Raises TableError, StorageError.

    `spread`: examples of one row are not adjacent.
    """
    options, width, counts = tables.options, tables.width, positives.counts
    several = len(tables.negatives.parameters.get("ranges", ())) > 1  # ranges of labels, each range best first
    best = np.argsort(-tables.scores("scores", rows) if several else hard == PAD, axis=1, kind="stable")[:, :width]
    negatives, scores = np.take_along_axis(hard, best, axis=1), None
    found = (negatives != PAD).sum(axis=1)
    if options.scores:
        column = "teacher" if options.scores == "teacher" else "scores"
        of_negatives = np.take_along_axis(tables.scores(column, rows), best, axis=1)
        scores = np.concatenate([tables.positive_scores(rows, positives), of_negatives.reshape(-1)])
    given = count_examples(tables, counts, found)
    row = np.repeat(np.arange(len(rows)), given)
    number = np.arange(len(row)) - offsets_of(given)[row]
    if spread:
        order = np.argsort(number, kind="stable")
        row, number = row[order], number[order]
    key = generator(options.seed, Purpose.POSITIVES, epoch, 0, 1).integers(0, 1 << 64, dtype=np.uint64)
    # The uncompiled function takes all rows at once, with NumPy.
    numbers = splitmix64.py_func(key, rows.astype(np.uint64), np.uint64(0))  # type: ignore[arg-type]
    drawn = (numbers % np.maximum(counts, 1).astype(np.uint64)).astype(np.int64)
    chosen = number // found[row] if options.form == "triplets" else np.minimum(number, counts[row] - 1)
    positive = positives.offsets[row] + (chosen if options.each_positive else drawn[row])
    negative = len(positives.values) + row[:, None] * width + np.arange(width)
    labels = np.concatenate([positives.values, negatives.reshape(-1)]).astype(np.int64)
    some = Examples(tables, rows, positives, labels, scores, row, number, positive, negative, found[row])
    return pa.table(_FORMS[options.form][1](some))


def _triplets(some: Examples) -> Columns:
    negative = some.negative[np.arange(len(some.row)), some.number % some.found]
    return _fixed(some, {"positive": some.positive, "negative": negative})


def _tuples(some: Examples) -> Columns:
    negatives = {f"negative_{number}": places for number, places in enumerate(some.negative.T, 1)}
    return _fixed(some, {"positive": some.positive, **negatives})


def _fixed(some: Examples, places: dict[str, np.ndarray]) -> Columns:
    columns = some.anchors() | {name: some.texts(each) for name, each in places.items()}
    if some.scores is None:
        return columns
    flat = np.column_stack([*places.values()]).reshape(-1)
    return columns | {"scores": _lists(some.scores[flat], np.full(len(some.row), len(places)))}


def _pairs(some: Examples) -> Columns:
    counts = some.positives.counts[some.row]
    first = counts if some.tables.options.each_positive else np.minimum(counts, 1)
    is_positive = some.number < first
    negative = some.negative[np.arange(len(some.row)), np.maximum(some.number - first, 0)]
    places = np.where(is_positive, some.positive, negative)
    columns = some.anchors() | {"other": some.texts(places)}
    if some.scores is None:
        return columns | {"label": is_positive.astype(np.int64)}
    return columns | {"score": pa.array(some.scores[places], from_pandas=True)}


def _one_list(some: Examples) -> Columns:
    places = np.column_stack([some.positive, some.negative])
    kept = np.arange(places.shape[1]) <= some.found[:, None]
    flat, counts = places[kept], kept.sum(axis=1)
    columns = some.anchors() | {"documents": _lists(some.texts(flat), counts)}
    if some.scores is not None:
        return columns | {"scores": _lists(some.scores[flat], counts)}
    return columns | {"labels": _lists((flat < len(some.positives.values)).astype(np.int64), counts)}


def _tevatron(some: Examples) -> Columns:
    tables, columns = some.tables, some.anchors("query")
    for name, (places, offsets) in some.both().items():
        keys = tables.strings(tables.labels, "key", some.labels[places])
        parts = [keys, pa.array([""] * len(keys), pa.string()), some.texts(places)]
        passages = pa.StructArray.from_arrays(parts, ["docid", "title", "text"])
        columns[{"pos": "positive_passages", "neg": "negative_passages"}[name]] = _lists(passages, np.diff(offsets))
    return {"query_id": tables.strings(tables.queries, "key", some.rows[some.row]), **columns}


def _flagembedding(some: Examples) -> Columns:
    columns, scores = some.anchors("query"), {}
    for name, (places, offsets) in some.both().items():
        columns[name] = _lists(some.texts(places), np.diff(offsets))
        if some.scores is not None:
            scores[f"{name}_scores"] = _lists(some.scores[places], np.diff(offsets))
    return columns | scores


def _lists(values: pa.Array | np.ndarray, counts: np.ndarray) -> pa.ListArray:
    flat = pa.array(values, from_pandas=True) if isinstance(values, np.ndarray) else values  # NaN becomes null
    return pa.ListArray.from_arrays(pa.array(offsets_of(counts).astype(np.int32)), flat)


_FORMS: dict[str, tuple[Count, Callable[[Examples], Columns]]] = {
    "triplets": (lambda positives, negatives, n: positives * negatives, _triplets),
    "tuples": (lambda positives, negatives, n: positives * (negatives == n), _tuples),
    "pairs": (lambda positives, negatives, n: positives + negatives * (positives > 0), _pairs),
    "lists": (lambda positives, negatives, n: positives * (negatives > 0), _one_list),
    "tevatron": (lambda positives, negatives, n: np.minimum(positives, 1) * (negatives > 0), _tevatron),
    "flagembedding": (lambda positives, negatives, n: np.minimum(positives, 1) * (negatives > 0), _flagembedding),
}
