"""A small DATA, made on the spot and known row by row, and negatives tables aligned with it."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipelines.sharding.tokenizer import FILE
from schemas import PAD, arrow
from schemas.hashing import hash_strings
from schemas.layout import DataLayout
from schemas.manifest import Manifest, open_manifest, publish, write_file
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_array, matrix_array
from schemas.shard_files.shards import Sink, write_table
from schemas.table import Table
from trainer.inputs import Inputs
from trainer.stream.batch import Batch

Rows = list[list[int]]


@dataclass(frozen=True)
class Points:
    """Rows of a table: token ids, label ids, and feature ids of each; `value_of` gives their values."""

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
        """Count the training points of each label, [L] int64."""
        return frequency(self.points["train"].positives, self.labels)


@dataclass(frozen=True)
class Shape:
    """Sizes of a small DATA; `rows` of each split, `sink` of the queries.

    With `features` rows have sparse features of ids below it too, or alone where not `with_tokens`.
    """

    rows: Mapping[str, int] = field(default_factory=lambda: {"train": 64, "test": 20})
    labels: int = 30
    vocabulary: int = 50
    shards: int = 3
    row_group_rows: int = 7
    label_group_rows: int = 5
    most_tokens: int = 6
    most_positives: int = 4
    seed: int = 0
    sink: Sink = "parquet"
    features: int = 0
    with_tokens: bool = True
    popular: bool = False  # label l is among a query's with a chance as 1 / (l + 1)


def build_data(root: str, **sizes: Any) -> SmallData:
    """Publish random queries of each split, labels, tokenizer and data manifests of a `Shape` under `root`.

    Rows without tokens occur; a point has one positive at least.
    """
    shape = Shape(**sizes)
    draw = np.random.default_rng(shape.seed)
    layout = DataLayout(root)
    tokens = arrow.token_type(shape.vocabulary) if shape.with_tokens else None
    schema = arrow.queries(tokens, arrow.label_type(shape.labels), features=shape.features > 0)
    parents = {}
    if shape.with_tokens:
        parents = {"tokenizer": _write_tokenizer(layout.tokenizer, shape.vocabulary).digest}
    made_from = dict(parents)
    points = {}
    for split, count in shape.rows.items():
        chances = 1 / np.arange(1, shape.labels + 1) if shape.popular else None
        positives = [random_labels(draw, shape.labels, 1, shape.most_positives, chances) for _ in range(count)]
        points[split] = _random_points(draw, positives, shape)
        shards = [in_hash_order(shard) for shard in cut(_queries_table(points[split], schema), shape.shards)]
        url = layout.queries(split)
        manifest = write_table(url, "queries", shards, shape.row_group_rows, shape.sink, parents=made_from)
        parents[f"queries/{split}"] = manifest.digest
    label_points = _random_points(draw, [[label] for label in range(shape.labels)], shape)
    data = SmallData(layout, shape.labels, shape.vocabulary, points, label_points)
    parents["labels"] = _write_labels(data, arrow.labels(tokens, features=shape.features > 0), shape).digest
    parameters = {"propensity": {"a": 0.55, "b": 1.5}, "features": shape.features or None}
    publish(root, Manifest(kind="data", parents=parents, parameters=parameters))
    return data


def _write_tokenizer(url: str, vocabulary: int) -> Manifest:
    """Publish a tokenizer of words "w0", "w1", ..., one per token."""
    words = WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="")
    file = write_file(url, FILE, Tokenizer(words).to_str().encode())
    return publish(url, Manifest(kind="tokenizer", shards=(file,), parameters={"vocabulary": vocabulary}))


def build_negatives(
    url: str, queries: Manifest, positives: Rows, labels: int, width: int, *, seed: int = 0, pads: bool = True
) -> np.ndarray:
    """Publish a negatives table aligned with `queries`, and give its label ids [N, K].

    Random labels that are no positives of the row and do not repeat within it; short rows end in pads.
    """
    draw = np.random.default_rng(seed)
    table = np.full((queries.rows, width), PAD, np.int64)
    for row, positive in enumerate(positives):
        others = draw.permutation(np.setdiff1d(np.arange(labels), positive))
        kept = others[: draw.integers(0, width + 1) if pads else width]
        table[row, : len(kept)] = kept
    write_negatives(url, queries, table, labels)
    return table


def write_negatives(url: str, queries: Manifest, table: np.ndarray, labels: int, **changes: object) -> Manifest:
    """Publish label ids [N, K] as a negatives table, shard by shard as `queries`; `changes` spoil its manifest."""
    kind = arrow.label_type(labels)
    rows = pa.table(
        {
            "query_id": pa.array(np.arange(len(table))),
            "label_ids": matrix_array(table, kind),
            "scores": matrix_array(np.zeros(table.shape, np.float32), pa.float32()),
        },
        schema=arrow.negatives(table.shape[1], kind),
    )
    edges = np.concatenate([[0], np.cumsum([shard.rows for shard in queries.shards])])
    shards = [rows.slice(low, high - low) for low, high in itertools.pairwise(edges.tolist())]
    fields: dict = {"row_group_rows": queries.row_group_rows, "parents": {"queries": queries.digest}, **changes}
    return write_table(url, "negatives", shards, **fields)


def frequency(positives: Rows, labels: int) -> np.ndarray:
    """Count the rows of each label, [L] int64."""
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


def random_labels(
    draw: np.random.Generator, labels: int, least: int, most: int, chances: np.ndarray | None = None
) -> list[int]:
    """Distinct sorted label ids, from `least` to `most` of them."""
    share = None if chances is None else chances / chances.sum()
    count = min(labels, int(draw.integers(least, most + 1)))
    return sorted(draw.choice(labels, count, replace=False, p=share).tolist())


def cut(table: pa.Table, shards: int) -> list[pa.Table]:
    """`table` in shards of nearly equal length."""
    edges = [table.num_rows * i // shards for i in range(shards + 1)]
    return [table.slice(low, high - low) for low, high in itertools.pairwise(edges)]


def in_hash_order(shard: pa.Table, seed: int = 0) -> pa.Table:
    """`shard` with its keys dealt anew to its rows, in the order of their hashes, as `extremis shard` writes rows."""
    order = np.argsort(hash_strings(shard["key"], seed), kind="stable")
    return shard.set_column(shard.schema.get_field_index("key"), "key", shard["key"].take(pa.array(order)))


def _random_points(draw: np.random.Generator, positives: Rows, shape: Shape) -> Points:
    tokens = random_tokens(draw, len(positives), shape.vocabulary, shape.most_tokens)
    return Points(tokens, positives, random_features(draw, len(positives), shape.features, shape.most_tokens))


def _write_labels(data: SmallData, schema: pa.Schema, shape: Shape) -> Manifest:
    train = data.points.get("train", Points([], [], []))
    table = _labels_table(data.label_points, frequency(train.positives, shape.labels), schema)
    parameters = {"training_points": len(train.tokens)}
    shards, url = cut(table, 2), data.layout.labels
    return write_table(url, "labels", shards, shape.label_group_rows, parameters=parameters, id_range=(0, shape.labels))


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


def add_filtered_split(data: SmallData, name: str, filters: Rows, row_group_rows: int) -> None:
    """Add a split `name` to DATA: the rows of test, with the filter labels `filters`, a list a row."""
    rows = pa.concat_tables(list(Table.open(data.layout.queries("test")).batches()))
    column = list_array(*ragged(filters, np.int32), pa.int32())
    rows = rows.append_column(pa.field("filter_label_ids", column.type, nullable=False), column)
    added = write_table(data.layout.queries(name), "queries", [rows], row_group_rows)
    whole = open_manifest(data.layout.root, "data")
    parents = {**whole.parents, f"queries/{name}": added.digest}
    publish(data.layout.root, whole.model_copy(update={"parents": parents}))
