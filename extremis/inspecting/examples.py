"""Queries as text, with their positives, and with hard negatives from a run's table.

Token ids are decoded with the tokenizer of DATA, and label ids are replaced by label texts.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extremis.console import results
from schemas import PAD
from schemas.errors import InputError
from schemas.hashing import hash_strings
from schemas.layout import DataLayout, RunLayout
from schemas.run_tables import run_tables
from schemas.secrets import without_controls
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table

FEATURES_SHOWN = 12
LONGEST_QUERY = 600
LONGEST_LABEL = 160


def clean_text(text: str, longest: int | None = None) -> str:
    """Return `text` on one line, without control characters, truncated to `longest` characters."""
    text = without_controls(" ".join(text.split()))
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"


class TextDecoder:
    """Decoder that turns token ids and label ids of DATA into texts. Raises TableError if DATA is not finished."""

    def __init__(self, data: DataLayout) -> None:
        self._data = data
        Table.open(data.root, "data")
        self._labels: Table | None = None
        self._tokenizer: Any = None

    def texts(self, rows: pa.Table, longest: int | None = None) -> list[str]:
        """Return the text of each row (query or label): the stored text if there is one, else the decoded tokens."""
        names = rows.column_names
        if "text" in names:
            texts = rows.column("text").to_pylist()
        elif "input_ids" in names:
            texts = self._decode(rows.column("input_ids").to_pylist())
        elif "feature_ids" in names:
            pairs = zip(rows.column("feature_ids").to_pylist(), rows.column("feature_values").to_pylist(), strict=True)
            texts = [_format_features(ids, values) for ids, values in pairs]
        else:
            texts = [""] * rows.num_rows
        return [clean_text(text, longest) for text in texts]

    def labels(self, ids: Iterable[int] | np.ndarray, longest: int | None = None) -> dict[int, str]:
        """Map label ids to texts, or to keys where texts are empty. Ids below 0 are padding and are ignored."""
        return {
            row["label_id"]: clean_text(row["text"], longest) or clean_text(str(row["key"]), longest)
            for row in self.label_rows(ids)
        }

    def label_rows(self, ids: Iterable[int] | np.ndarray) -> list[dict[str, Any]]:
        """Read label_id, key, text and frequency of labels in the order of their ids; ids below 0 are padding."""
        if self._labels is None:
            self._labels = Table.open(self._data.labels, "labels")
        unique = np.unique(np.fromiter(ids, np.int64))
        unique = unique[(unique >= 0) & (unique < self._labels.rows)]
        rows: list[dict[str, Any]] = self._labels.rows_at(unique, ["label_id", "key", "text", "frequency"]).to_pylist()
        return rows

    def _decode(self, ids: list[list[int]]) -> list[str]:
        from pipelines.sharding.tokenizer import FILE, open_tokenizer

        if self._tokenizer is None:
            files = Table.open(self._data.tokenizer, "tokenizer").read_files()
            self._tokenizer = open_tokenizer(files[FILE], self._data.tokenizer)
            if self._tokenizer.decoder is None and type(self._tokenizer.model).__name__ == "WordPiece":
                from tokenizers.decoders import WordPiece

                self._tokenizer.decoder = WordPiece()  # joins the pieces of a word
        return list(self._tokenizer.decode_batch(ids, skip_special_tokens=True))


def input_columns(names: Sequence[str]) -> list[str]:
    """Return the names of the columns that `TextDecoder.texts` needs."""
    if "text" in names:
        return ["text"]
    return ["input_ids"] if "input_ids" in names else [name for name in names if name.startswith("feature_")]


def _format_features(ids: list[int], values: list[float]) -> str:
    """Format the features with the largest values, for a row without text."""
    order = np.argsort(-np.abs(np.asarray(values, np.float64)), kind="stable")[:FEATURES_SHOWN]
    shown = " ".join(f"{ids[i]}:{values[i]:.3g}" for i in order.tolist())
    return f"features {shown}{' …' if len(ids) > FEATURES_SHOWN else ''}"


def find_row(table: Table, key: str) -> int | None:
    """Return the row with this key, or None. Raises TableError for a damaged table.

    `extremis shard` orders rows by a salted hash of the key, so that a binary search reads only a few row groups. If
    a table has a different order, all row groups are searched from the start.
    """
    for number in (*_likely_group(table, key), *range(len(table.groups))):
        position = pc.index(_keys(table, number), key).as_py()
        if position >= 0:
            return int(table.groups.first[number]) + int(position)
    return None


def _likely_group(table: Table, key: str) -> list[int]:
    """Return the row group that can contain the key if rows are ordered by hash; empty if there is no such group."""
    seed = table.parameters.get("seed")
    if not isinstance(seed, int):
        return []

    def last_hash(number: int) -> np.uint64:
        return hash_strings(_keys(table, number), seed)[-1]

    target = hash_strings(pa.array([key], pa.string()), seed)[0]
    number = bisect.bisect_left(range(len(table.groups)), target, key=last_hash)
    return [number] if number < len(table.groups) else []


def _keys(table: Table, number: int) -> pa.Array:
    return table.read_group(number, ["key"]).column("key").combine_chunks()


@dataclass
class Example:
    """A query as text. Negatives and predictions are (label id, score) pairs, best first."""

    split: str
    row: int
    key: str
    text: str
    positives: list[int]
    negatives: list[tuple[int, float]] = field(default_factory=list)
    predictions: list[tuple[int, float]] = field(default_factory=list)

    @property
    def label_ids(self) -> list[int]:
        """Return the ids of all labels in the example."""
        return [*self.positives, *(label for label, _ in self.negatives), *(label for label, _ in self.predictions)]


def splits_of(data: DataLayout, only: str | None = None) -> list[str]:
    """List the splits of DATA, train first, or just `only`. Raises InputError if `only` does not exist; TableError."""
    parents = Table.open(data.root, "data").parents
    names = [name.removeprefix("queries/") for name in parents if name.startswith("queries/")]
    names.sort(key=lambda name: (name != "train", name))
    if only is not None and only not in names:
        raise InputError(f"{data.root}: no split {only!r}; known splits: {', '.join(names)}.")
    return names if only is None else [only]


def read_examples(
    data: DataLayout, split: str, rows: np.ndarray, decoder: TextDecoder, run: RunLayout | None
) -> list[Example]:
    """Read the ascending `rows` of a split, with negatives from the newest table of `run` for this split.

    Raises TableError.
    """
    queries = Table.open(data.queries(split), "queries")
    batch = queries.rows_at(rows, ["query_id", "key", "label_ids", *input_columns(queries.columns)])
    columns = [batch.column(name).to_pylist() for name in ("query_id", "key", "label_ids")]
    texts = decoder.texts(batch, LONGEST_QUERY)
    examples = [
        Example(split, row, clean_text(key, LONGEST_LABEL), text, list(positives))
        for row, key, positives, text in zip(*columns, texts, strict=True)
    ]
    tables = (each.table for each in run_tables(run)) if run is not None else ()
    joined = next((t for t in tables if t.ids_of == "labels" and t.parents.get("queries") == queries.digest), None)
    if joined is not None:
        table = joined.rows_at(rows, ["label_ids", "scores"])
        labels, scores = matrix_column(table, "label_ids"), matrix_column(table, "scores")
        for example, row_labels, row_scores in zip(examples, labels.tolist(), scores.tolist(), strict=True):
            example.negatives = [pair for pair in zip(row_labels, row_scores, strict=True) if pair[0] != PAD]
    return examples


def find_query(data: DataLayout, key: str, split: str | None) -> tuple[str, np.ndarray]:
    """Find the query with this key in `split`, or in the first split that has the key; return the split and row [1].

    Raises InputError, TableError.
    """
    splits = splits_of(data, split)
    for name in splits:
        row = find_row(Table.open(data.queries(name), "queries"), key)
        if row is not None:
            return name, np.asarray([row])
    raise InputError(
        f"{data.root}: no query with key {key!r} in {', '.join(splits)}. "
        f"Keys come from the input (uid, _id, or the line number). Rejected rows are in {data.rejects}."
    )


def inspect_queries(
    data: DataLayout, rows: int, split: str | None, key: str | None = None, run: RunLayout | None = None
) -> dict[str, Any]:
    """Print the query with this `key`, or the first `rows` queries of a split, with hard negatives from `run`.

    Returns {"queries": [...]}, or {} if DATA has no split or `rows` is 0. Raises InputError, TableError.
    """
    decoder = TextDecoder(data)
    if key is not None:
        name, numbers = find_query(data, key, split)
    else:
        splits = splits_of(data, split)
        if not splits or rows == 0:
            return {}
        name = splits[0]
        numbers = np.arange(min(rows, Table.open(data.queries(name), "queries").rows))
    examples = read_examples(data, name, numbers, decoder, run)
    texts = decoder.labels((label for example in examples for label in example.label_ids), LONGEST_LABEL)
    for example in examples:
        _print(example, texts, run)
    return {"queries": [_describe(example, texts) for example in examples]}


def _print(example: Example, texts: dict[int, str], run: RunLayout | None) -> None:
    lines = [f"  {example.text}"]
    lines += [f"  + {texts.get(label, label)}  [{label}]" for label in example.positives]
    lines += [f"  - {texts.get(label, label)}  [{label}] {score:.3f}" for label, score in example.negatives]
    if run is not None and not example.negatives:
        lines.append(f"  no hard negatives of {run.root} belong to the split {example.split}")
    results.print(f"{example.split} row {example.row}, key {example.key}", style="bold")
    for line in lines:
        results.print(line)


def _describe(example: Example, texts: dict[int, str]) -> dict[str, Any]:
    facts = {"split": example.split, "query_id": example.row, "key": example.key, "text": example.text}
    positives = [{"label_id": label, "text": texts.get(label, "")} for label in example.positives]
    scored = [{"label_id": n, "text": texts.get(n, ""), "score": score} for n, score in example.negatives]
    return {**facts, "positives": positives, "negatives": scored}
