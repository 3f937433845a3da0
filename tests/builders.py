"""A small DATA, made on the spot and known row by row, and negatives tables aligned with it."""

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas import tables
from schemas.layout import DataLayout
from schemas.manifest import Manifest, publish
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_array, matrix_array
from schemas.shard_files.shards import Sink, write_table
from schemas.tables import PAD
from trainer.inputs import Inputs
from trainer.stream.batch import Batch

Rows = list[list[int]]


@dataclass(frozen=True)
class Points:
    """What a table's rows hold: token ids, label ids, and feature ids of each; `value_of` gives their values."""

    tokens: Rows
    positives: Rows
    features: Rows


@dataclass(frozen=True)
class SmallData:
    """A published DATA and the rows behind it."""

    layout: DataLayout
    labels: int
    vocabulary: int
    points: dict[str, Points]  # by split
    label_points: Points  # label texts, each its own positive

    def frequency(self) -> np.ndarray:
        """Training points of each label, [L] int64."""
        return frequency(self.points["train"].positives, self.labels)


def build_data(
    root: str,
    *,
    rows: dict[str, int] | None = None,
    labels: int = 30,
    vocabulary: int = 50,
    shards: int = 3,
    row_group_rows: int = 7,
    label_group_rows: int = 5,
    most_tokens: int = 6,
    most_positives: int = 4,
    seed: int = 0,
    sink: Sink = "parquet",
    features: int = 0,
    with_tokens: bool = True,
) -> SmallData:
    """Publish random queries of each split (`rows`: how many), labels, tokenizer and data manifests under `root`.

    Rows without tokens occur; a point has one positive at least. `sink` is that of the queries.
    With `features` rows have sparse features of ids below it too, or alone where not `with_tokens`.
    """
    draw = np.random.default_rng(seed)
    layout = DataLayout(root)
    tokens, ids = tables.token_type(vocabulary) if with_tokens else None, tables.label_type(labels)
    parents = {}
    if with_tokens:
        tokenizer = publish(layout.tokenizer, Manifest(kind="tokenizer", parameters={"vocabulary": vocabulary}))
        parents = {"tokenizer": tokenizer.digest}
    made_from = dict(parents)
    points = {}
    for split, count in (rows or {"train": 64, "test": 20}).items():
        positives = [random_labels(draw, labels, 1, most_positives) for _ in range(count)]
        given = random_tokens(draw, count, vocabulary, most_tokens)
        points[split] = Points(given, positives, random_features(draw, count, features, most_tokens))
        table = _queries_table(points[split], tables.queries(tokens, ids, features=features > 0))
        made = write_table(
            layout.queries(split),
            "queries",
            cut(table, shards),
            row_group_rows,
            sink,
            parents=made_from,
        )
        parents[f"queries/{split}"] = made.digest
    label_points = Points(
        random_tokens(draw, labels, vocabulary, most_tokens),
        [[label] for label in range(labels)],
        random_features(draw, labels, features, most_tokens),
    )
    train = points.get("train", Points([], [], []))
    schema = tables.labels(tokens, features=features > 0)
    table = _labels_table(label_points, frequency(train.positives, labels), schema)
    made = write_table(
        layout.labels,
        "labels",
        cut(table, 2),
        label_group_rows,
        parameters={"training_points": len(train.tokens)},
        id_range=(0, labels),
    )
    parents["labels"] = made.digest
    parameters = {"propensity": {"a": 0.55, "b": 1.5}, "features": features or None}
    publish(root, Manifest(kind="data", parents=parents, parameters=parameters))
    return SmallData(layout, labels, vocabulary, points, label_points)


def build_negatives(
    url: str, queries: Manifest, positives: Rows, labels: int, width: int, *, seed: int = 0, pads: bool = True
) -> np.ndarray:
    """Publish a negatives table aligned with `queries`, and give its label ids [N, K].

    Random labels that are no positives of the row and do not repeat within it; short rows end in pads.
    """
    draw = np.random.default_rng(seed)
    table = np.full((queries.rows, width), PAD, np.int64)
    for row, own in enumerate(positives):
        others = draw.permutation(np.setdiff1d(np.arange(labels), own))
        kept = others[: draw.integers(0, width + 1) if pads else width]
        table[row, : len(kept)] = kept
    write_negatives(url, queries, table, labels)
    return table


def write_negatives(url: str, queries: Manifest, table: np.ndarray, labels: int, **changes: object) -> Manifest:
    """Publish label ids [N, K] as a negatives table, shard by shard as `queries`; `changes` spoil its manifest."""
    kind = tables.label_type(labels)
    rows = pa.table(
        {
            "query_id": pa.array(np.arange(len(table))),
            "label_ids": matrix_array(table, kind),
            "scores": matrix_array(np.zeros(table.shape, np.float16), pa.float16()),
        },
        schema=tables.negatives(table.shape[1], kind),
    )
    edges = np.concatenate([[0], np.cumsum([shard.rows for shard in queries.shards])])
    shards = [rows.slice(low, high - low) for low, high in itertools.pairwise(edges.tolist())]
    fields: dict = {"row_group_rows": queries.row_group_rows, "parents": {"queries": queries.digest}, **changes}
    return write_table(url, "negatives", shards, **fields)


def frequency(positives: Rows, labels: int) -> np.ndarray:
    """How many rows hold each label, [L] int64."""
    return np.bincount(np.asarray([label for row in positives for label in row], np.int64), minlength=labels)


def ragged(rows: Rows | list[list[float]], dtype: type = np.int64) -> Ragged:
    """Ragged rows of Python lists."""
    offsets = np.cumsum([0, *map(len, rows)])
    return Ragged(np.asarray([value for row in rows for value in row], dtype), offsets)


def tokens_of(rows: Ragged) -> Inputs:
    """Rows of token ids, as `ragged` gives them, for an encoder."""
    return Inputs(rows)


def random_tokens(draw: np.random.Generator, rows: int, vocabulary: int, most: int) -> Rows:
    """Token ids of rows of 0 to `most` tokens."""
    return [draw.integers(0, vocabulary, draw.integers(0, most + 1)).tolist() for _ in range(rows)]


def random_features(draw: np.random.Generator, rows: int, features: int, most: int) -> Rows:
    """Feature ids of rows of 0 to `most` of them, sorted; without `features`, none are drawn."""
    return [random_labels(draw, features, 0, most) for _ in range(rows)] if features else [[] for _ in range(rows)]


def value_of(row: list[int]) -> list[float]:
    """The values that go with a row's feature ids."""
    return [((7 * feature) % 5 + 1) / 4 for feature in row]


def random_labels(draw: np.random.Generator, labels: int, least: int, most: int) -> list[int]:
    """Distinct sorted label ids, from `least` to `most` of them."""
    return sorted(draw.choice(labels, min(labels, int(draw.integers(least, most + 1))), replace=False).tolist())


def cut(table: pa.Table, shards: int) -> list[pa.Table]:
    """`table` in shards of nearly equal length."""
    edges = [table.num_rows * i // shards for i in range(shards + 1)]
    return [table.slice(low, high - low) for low, high in itertools.pairwise(edges)]


def _queries_table(points: Points, schema: pa.Schema) -> pa.Table:
    count = len(points.tokens)
    columns = {
        "query_id": pa.array(np.arange(count)),
        "key": pa.array([f"query {i}" for i in range(count)], pa.string()),
        "label_ids": list_array(*ragged(points.positives), schema.field("label_ids").type.value_type),
        **_inputs(points, schema),
    }
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _labels_table(points: Points, counts: np.ndarray, schema: pa.Schema) -> pa.Table:
    names = pa.array([f"label {i}" for i in range(len(points.tokens))], pa.string())
    columns = {
        "label_id": pa.array(np.arange(len(points.tokens))),
        "key": names,
        "text": names,
        "frequency": pa.array(counts),
        **_inputs(points, schema),
    }
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _inputs(points: Points, schema: pa.Schema) -> dict[str, pa.Array]:
    columns = {}
    if "input_ids" in schema.names:
        columns["input_ids"] = list_array(*ragged(points.tokens), schema.field("input_ids").type.value_type)
    if "feature_ids" in schema.names:
        columns["feature_ids"] = list_array(*ragged(points.features), pa.int32())
        values = [value_of(row) for row in points.features]
        columns["feature_values"] = list_array(*ragged(values, np.float32), pa.float32())
    return columns


def batch_of(positives: Rows, hard: np.ndarray | None = None, tokens: Rows | None = None) -> Batch:
    """A batch of rows 0, 1, ... with these positives, table rows `hard` [B, K] and token ids."""
    rows = np.arange(len(positives))
    none: Rows = [[] for _ in rows]
    return Batch(0, 0, rows, tokens_of(ragged(tokens or none)), *ragged(positives), hard)
