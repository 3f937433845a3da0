"""Sample of a few thousand rows of each table, from DATA or made up, to estimate the bytes per row."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extremis.planning.workload import Workload
from schemas import arrow
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files import shards
from schemas.shard_files.parquet import list_array, matrix_array

ROWS = 1 << 13
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)


def from_data(data: str, workload: Workload) -> tuple[Workload, dict[str, pa.Table]]:
    """Read the first rows of DATA's tables; return the workload with their averages, and them. Raises TableError."""
    layout = DataLayout(data)
    tokenizer = open_manifest(layout.tokenizer, "tokenizer")
    sample = {"queries": _head(layout.queries("train"), "queries"), "labels": _head(layout.labels, "labels")}
    queries, names = sample["queries"], sample["labels"]
    workload = replace(
        workload,
        tokens=_mean(pc.list_value_length(queries["input_ids"])),
        label_tokens=_mean(pc.list_value_length(names["input_ids"])),
        labels_per_query=_mean(pc.list_value_length(queries["label_ids"])),
        key_bytes=_mean(pc.binary_length(queries["key"])),
        text_bytes=_mean(pc.binary_length(names["text"])),
        vocabulary=int(tokenizer.parameters["vocabulary"]),
    )
    return workload, sample


def made_up(workload: Workload) -> tuple[Workload, dict[str, pa.Table]]:
    """Make up rows for the workload, and return both: ids by Zipf's law, lengths by Poisson's, random keys."""
    draw = np.random.default_rng(0)
    ids, kind = np.arange(ROWS), arrow.label_type(workload.labels)
    tokens = arrow.token_type(workload.vocabulary)
    queries = [
        pa.array(ids),
        pa.array(_words(draw, workload.key_bytes, _LETTERS[:16])),
        _lists(draw, workload.tokens, workload.vocabulary, tokens),
        _lists(draw, workload.labels_per_query, workload.labels, kind),
    ]
    labels = [
        pa.array(ids),
        pa.array(_words(draw, workload.key_bytes, _LETTERS[:16])),
        pa.array(_words(draw, workload.text_bytes, _LETTERS)),
        _lists(draw, workload.label_tokens, workload.vocabulary, tokens),
        pa.array(draw.zipf(1.5, ROWS).clip(max=workload.queries)),
    ]
    return workload, {
        "queries": pa.Table.from_arrays(queries, schema=arrow.queries(tokens, kind)),
        "labels": pa.Table.from_arrays(labels, schema=arrow.labels(tokens)),
    }


def embeddings(workload: Workload, dtype: str) -> pa.Table:
    """Make up embeddings (float16) or vectors (float32): normal numbers, which do not compress."""
    values = np.random.default_rng(1).standard_normal((ROWS, workload.columns)).astype(dtype)
    columns = [pa.array(np.arange(ROWS)), matrix_array(values, pa.from_numpy_dtype(dtype))]
    return pa.Table.from_arrays(columns, schema=arrow.embeddings(workload.columns, dtype))


def negatives(workload: Workload) -> pa.Table:
    """Make up K negatives a row: frequent labels more often, scores descending, around -5 as with a bias."""
    draw = np.random.default_rng(2)
    width, kind = workload.recipe.negatives.table_width, arrow.label_type(workload.labels)
    label_ids = _zipfian(draw, ROWS * width, workload.labels).reshape(ROWS, width)
    scores = -np.sort(5 - draw.standard_normal((ROWS, width)), axis=1).astype(np.float16)
    columns = [pa.array(np.arange(ROWS)), matrix_array(label_ids, kind), matrix_array(scores, pa.float16())]
    return pa.Table.from_arrays(columns, schema=arrow.negatives(width, kind))


def _head(url: str, kind: str) -> pa.Table:
    parts: list[pa.Table] = []
    for part in shards.iterate(url, open_manifest(url, kind)):
        parts.append(part)
        if sum(part.num_rows for part in parts) >= ROWS:
            break
    return pa.concat_tables(parts).combine_chunks()


def _lists(draw: np.random.Generator, mean: float, size: int, kind: pa.DataType) -> pa.ListArray:
    lengths = draw.poisson(mean, ROWS) if mean > 1 else np.ones(ROWS, np.int64)
    values = _zipfian(draw, int(lengths.sum()), size)
    return list_array(values, np.concatenate([[0], np.cumsum(lengths)]), kind)


def _zipfian(draw: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Draw ids in [0, size) by Zipf's law, the frequent ones spread over it: int64 [count]."""
    # The inverse of the distribution needs no table of `size` numbers.
    ranks = np.exp(draw.random(count) * np.log(size)).astype(np.int64) - 1
    return (ranks * 2_654_435_761) % size


def _words(draw: np.random.Generator, mean: float, letters: np.ndarray) -> list[str]:
    lengths = draw.poisson(mean, ROWS).clip(min=1)
    text = letters[draw.integers(0, len(letters), int(lengths.sum()))].tobytes().decode()
    ends = np.cumsum(lengths).tolist()
    return [text[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _mean(lengths: pa.ChunkedArray) -> float:
    return pc.mean(lengths).as_py() or 0.0
