"""Synthetic tables for a planned run: rows, row groups and types as planned, ids by Zipf's law, and random vectors.

Shards of a table may be `linked`: all are links to one file, so that a table of any size takes the space of one shard.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.rehearsal.stage import Sizes
from pipelines.options import MIN_SHARDS, default_row_group_rows
from schemas import arrow
from schemas.layout import DataLayout, shard_name
from schemas.manifest import Manifest, Shard, columns_of, publish
from schemas.ragged import offsets_of
from schemas.shard_files.parquet import list_array, matrix_array, write_shard
from schemas.table import Table

LINKED_ROWS = 1 << 17  # maximum per shard: more rows would take space and time without changing reads
_PRIME = 2_654_435_761  # spreads frequent ids over the range
_CENTRES = 2000  # vectors are drawn around these centres: without clusters, no index saves work
Draw = np.random.Generator
Columns = Callable[[Draw, int], list[Any]]  # makes columns of the given number of rows, without ids


def write_data(root: str, sizes: Sizes, linked: bool = True) -> None:
    """Write synthetic DATA. Raises StorageError."""
    data, tokens, label = DataLayout(root), arrow.token_type(sizes.vocabulary), arrow.label_type(sizes.labels)
    manifest = publish(data.tokenizer, Manifest(kind="tokenizer", parameters={"vocabulary": sizes.vocabulary}))
    parents = {"tokenizer": manifest.digest}

    def texts(draw: Draw, count: int, mean: float) -> pa.Array:
        lengths = _lengths(draw, count, mean)
        return _lists(zipf(draw, int(lengths.sum()), sizes.vocabulary), lengths, tokens)

    def queries(draw: Draw, count: int) -> list[Any]:
        lengths = _lengths(draw, count, sizes.labels_per_query)
        ids = _labels(draw, int(lengths.sum()), sizes.labels)
        places = np.unique(np.repeat(np.arange(count), lengths) * sizes.labels + ids)  # a label occurs once per row
        positives = _lists(places % sizes.labels, np.bincount(places // sizes.labels, minlength=count), label)
        return [_names(draw, count, sizes.key_bytes), texts(draw, count, sizes.tokens), positives]

    def labels(draw: Draw, count: int) -> list[Any]:
        names = [_names(draw, count, size) for size in (sizes.key_bytes, sizes.text_bytes)]
        return [*names, texts(draw, count, sizes.label_tokens), pa.array(zipf(draw, count, 1000) + 1)]

    groups = default_row_group_rows(sizes.queries), default_row_group_rows(sizes.labels)
    schema, fields = arrow.queries(tokens, label), dict[str, Any](parents=dict(parents))
    manifest = write(data.queries("train"), "queries", sizes.queries, schema, groups[0], queries, linked, **fields)
    parents["queries/train"] = manifest.digest
    fields = {"parameters": {"training_points": sizes.queries}}
    manifest = write(data.labels, "labels", sizes.labels, arrow.labels(tokens), groups[1], labels, linked, **fields)
    publish(root, Manifest(kind="data", parents={**parents, "labels": manifest.digest}))


def write_negatives(url: str, table: Table, sizes: Sizes) -> None:
    """Write negatives, in linked shards, for the rows of `table`."""
    schema = arrow.negatives(sizes.width, arrow.label_type(sizes.labels))

    def columns(draw: Draw, count: int) -> list[Any]:
        ids = _labels(draw, count * sizes.width, sizes.labels).reshape(count, -1)
        scores = -np.sort(draw.random(ids.shape, np.float32))
        return [matrix_array(values, schema.types[n].value_type) for n, values in enumerate((ids, scores), 1)]

    group = table.manifest.row_group_rows or 1
    write(url, "negatives", table.rows, schema, group, columns, True, parents={"queries": table.digest})


def write_vectors(url: str, kind: str, rows: int, schema: pa.Schema, group: int, **fields: Any) -> None:
    """Write label vectors, or embeddings of queries, around shared centres, in shards that are not linked."""
    width, value_type = schema.types[1].list_size, schema.types[1].value_type
    centres = np.random.default_rng(0).standard_normal((_CENTRES, width), np.float32)

    def columns(draw: Draw, count: int) -> list[Any]:
        vectors = centres[draw.integers(0, _CENTRES, count)] + 0.5 * draw.standard_normal((count, width), np.float32)
        return [matrix_array(vectors.astype(value_type.to_pandas_dtype()), value_type)]

    write(url, kind, rows, schema, group, columns, False, **fields)


def write(
    url: str, kind: str, rows: int, schema: pa.Schema, group: int, columns: Columns, linked: bool, **fields: Any
) -> Manifest:
    """Write a table in shards of equal size, except the last; the manifest contains `fields`. Raises StorageError."""
    most = min(LINKED_ROWS, -(-rows // (MIN_SHARDS * group)) * group)
    count, shards = -(-rows // most), list[Shard]()
    for number in range(count):
        size, first = min(most, rows - number * most), 0 if linked else number * most
        if linked and number and size == most:
            entry = shards[0].model_copy(update={"path": shard_name(number, count)})
            os.link(f"{url}/{shards[0].path}", f"{url}/{entry.path}")
        else:
            arrays = [pa.array(np.arange(first, first + size)), *columns(np.random.default_rng(number), size)]
            entry = write_shard(url, number, count, pa.Table.from_arrays(arrays, schema=schema), group)
        shards.append(entry)
    body = {"columns": columns_of(schema), "rows": rows, "row_group_rows": group, "id_range": (0, rows), **fields}
    return publish(url, Manifest(kind=kind, shards=tuple(shards), **body))


def zipf(draw: Draw, count: int, top: int) -> np.ndarray:
    """Draw ids in [0, top) that follow Zipf's law, int64 [count]."""
    return np.minimum(np.exp(draw.random(count) * np.log(top)).astype(np.int64), top) - 1


def _labels(draw: Draw, count: int, labels: int) -> np.ndarray:
    return np.remainder(zipf(draw, count, labels) * _PRIME, labels)


def _lengths(draw: Draw, count: int, mean: float) -> np.ndarray:
    return draw.integers(1, max(2, round(2 * mean)), count)


def _lists(values: np.ndarray, lengths: Any, kind: pa.DataType) -> pa.ListArray:
    return list_array(values.astype(kind.to_pandas_dtype()), offsets_of(np.asarray(lengths, np.int64)), kind)


def _names(draw: Draw, count: int, size: float) -> pa.Array:
    letters = draw.integers(97, 123, count * round(size), np.uint8)
    offsets = np.arange(count + 1, dtype=np.int32) * round(size)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(letters))
