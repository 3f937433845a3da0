"""One split: raw lines to shards. Read in blocks, parse and tokenize, group by shard, order, number, write."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsDict, TaggedOutput
from tokenizers import Tokenizer

from pipelines.sharding import assign, filters, lines, parse, tokenizer
from pipelines.sharding.frequencies import count_labels
from pipelines.sharding.rejects import Reason, Reject, Rejects
from pipelines.sharding.summary import Summary
from schemas import parquet, storage, tables

SUMMARY, ROWS, FREQUENCIES = "summary", "rows", "frequencies"


@dataclass(frozen=True)
class QueriesPlan:
    """Everything about one split that is settled before a worker starts."""

    split: str
    file: str  # the input's name, for messages
    source: str  # its URL
    filter_source: str | None  # only where the filter file holds a pair
    rows: int  # lines of the file
    labels: int
    vocabulary: int
    tokenizer: str
    table: str
    shards: int
    row_group_rows: int
    seed: int
    text: str
    keep_text: bool

    @property
    def name(self) -> str:
        return f"queries/{self.split}"

    @property
    def block_lines(self) -> int:
        return assign.block_lines(self.shards)

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return tables.queries(
            tables.token_type(self.vocabulary),
            tables.label_type(self.labels),
            text=self.keep_text,
            filters=self.filter_source is not None,
        )

    @property
    def row_schema(self) -> pa.Schema:
        """Columns on the way: those of the table without `query_id`, and what ordering and counting need."""
        extra = [("hash", pa.uint64()), ("row", pa.int64()), ("truncated", pa.bool_()), ("merged", pa.int32())]
        return pa.schema([*extra, *(field.with_nullable(True) for field in self.schema if field.name != "query_id")])


class ShardQueries(beam.PTransform):
    """The split's shards, written; yields the collections `summary` (Summary) and `frequencies` (block, counts)."""

    def __init__(self, plan: QueriesPlan, label_block: int) -> None:
        super().__init__()
        self._plan = plan
        self._label_block = label_block

    def expand(self, pipeline: beam.Pipeline) -> Any:
        plan = self._plan
        found = [plan.filter_source] if plan.filter_source else []
        raw = pipeline | "File" >> beam.Create([plan.source]) | "Read" >> beam.ParDo(ReadLines(plan.block_lines))
        pairs = (
            pipeline
            | "Filter file" >> beam.Create(found, reshuffle=False)
            | "Read filter" >> beam.ParDo(ReadPairs(plan.rows, plan.labels, plan.block_lines))
        )
        encoded = (
            {"lines": raw, "pairs": pairs}
            # Grouping by block also spreads the tokenizing over the workers: one gzip file has but one reader.
            | "Join filter" >> beam.CoGroupByKey()
            | "Encode" >> beam.ParDo(EncodePoints(plan)).with_outputs(SUMMARY, main="rows")
        )
        every = (
            pipeline
            | "Every shard" >> beam.Create(range(plan.shards))
            | "Empty" >> beam.ParDo(EmptyBatch(plan.row_schema))
        )
        ordered = (
            (encoded["rows"], every)
            | "With empty shards" >> beam.Flatten()
            | "By shard" >> beam.GroupByKey()
            | "Order"
            >> beam.ParDo(OrderShard(plan, self._label_block)).with_outputs(SUMMARY, ROWS, FREQUENCIES, main="main")
        )
        written = ordered["main"] | "Write" >> beam.ParDo(WriteQueries(plan), rows=AsDict(ordered[ROWS]))
        summary = (encoded[SUMMARY], ordered[SUMMARY], written) | "Summaries" >> beam.Flatten()
        return {SUMMARY: summary, FREQUENCIES: ordered[FREQUENCIES]}


class ReadLines(beam.DoFn):
    """URL of a gzip file to (block number, raw lines)."""

    def __init__(self, block_lines: int) -> None:
        self._block_lines = block_lines

    def process(self, element: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        return enumerate(lines.read_blocks(element, self._block_lines))


class ReadPairs(beam.DoFn):
    """URL of a filter file to (block number, its pairs: columns `row` and `label_id`)."""

    def __init__(self, rows: int, labels: int, block_lines: int) -> None:
        self._rows, self._labels, self._block_lines = rows, labels, block_lines

    def process(self, element: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        pairs = filters.parse_pairs(storage.read_bytes(element), element, self._rows, self._labels)
        batch = pa.record_batch({"row": pa.array(pairs[:, 0]), "label_id": pa.array(pairs[:, 1])})
        return assign.split_by(batch, pairs[:, 0] // self._block_lines)


class EmptyBatch(beam.DoFn):
    """Shard number to (shard, no rows): a shard that no key falls into is written too."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def process(self, element: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        yield element, pa.RecordBatch.from_pylist([], self._schema)


class EncodePoints(beam.DoFn):
    """(block, lines and filter pairs) to (shard, rows)."""

    def __init__(self, plan: QueriesPlan) -> None:
        self._plan = plan

    def setup(self) -> None:
        self._tokenizer = tokenizer.open_tokenizer(self._plan.tokenizer)

    def process(self, element: tuple[int, dict[str, Any]]) -> Iterator[Any]:
        block, parts = element
        pairs = [np.stack([part["row"], part["label_id"]], axis=1) for part in parts["pairs"]]
        for raw in parts["lines"]:
            batch, rejects = encode_points(
                raw["line"].to_pylist(),
                block * self._plan.block_lines,
                np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64),
                self._plan,
                self._tokenizer,
            )
            counters = Counter(rows_in=raw.num_rows)
            yield TaggedOutput(SUMMARY, Summary(counters={self._plan.name: counters}, rejects=Rejects.of(rejects)))
            shard = (batch["hash"].to_numpy() % np.uint64(self._plan.shards)).astype(np.int64)
            yield from assign.split_by(batch, shard)


class OrderShard(beam.DoFn):
    """(shard, its rows in any order) to (shard, its rows in order); also its row count and its label counts."""

    def __init__(self, plan: QueriesPlan, label_block: int) -> None:
        self._plan = plan
        self._label_block = label_block

    def process(self, element: tuple[int, Any]) -> Iterator[Any]:
        shard, batches = element
        rows, rejects = order(pa.Table.from_batches(batches, self._plan.row_schema), self._plan.file)
        summary = Summary(counters={self._plan.name: _count(rows)}, rejects=Rejects.of(rejects))
        yield TaggedOutput(SUMMARY, summary)
        yield TaggedOutput(ROWS, (shard, rows.num_rows))
        for block in count_labels(parquet.list_column(rows, "label_ids")[0], self._label_block):
            yield TaggedOutput(FREQUENCIES, block)
        yield shard, rows


class WriteQueries(beam.DoFn):
    """(shard, its rows in order) to its file; `rows` (shard to row count) tells where the shard's ids start."""

    def __init__(self, plan: QueriesPlan) -> None:
        self._plan = plan

    def process(self, element: tuple[int, pa.Table], rows: dict[int, int]) -> Iterator[Summary]:
        plan = self._plan
        shard, table = element
        first = sum(rows[before] for before in range(shard))
        ids = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
        numbered = table.append_column("query_id", ids).select(plan.schema.names)
        entry = parquet.write_shard(plan.table, shard, plan.shards, numbered.cast(plan.schema), plan.row_group_rows)
        yield Summary(shards={plan.name: (entry,)})


def encode_points(
    raw: Sequence[bytes], first_row: int, pairs: np.ndarray, plan: QueriesPlan, tokens: Tokenizer
) -> tuple[pa.RecordBatch, list[Reject]]:
    """Raw lines [B] from 0-based row `first_row` on to rows of `plan.row_schema`, and the rejects.

    `pairs` int64 [F, 2]: filter pairs (row, label) of these lines, sorted.
    """
    points = parse.parse_points(raw, first_row, plan.file, plan.labels, plan.text)
    batch = points.batch
    texts = batch["text"].to_pylist()
    values, offsets, truncated = tokenizer.encode(tokens, texts)
    schema = plan.row_schema
    columns = {
        "hash": pa.array(assign.hash_keys(batch["key"].to_pylist(), plan.seed), pa.uint64()),
        "row": batch["row"],
        "truncated": pa.array(truncated),
        "merged": batch["merged"],
        "key": batch["key"],
        "input_ids": parquet.list_array(values, offsets, schema.field("input_ids").type.value_type),
        "label_ids": batch["label_ids"].cast(schema.field("label_ids").type),
    }
    if "filter_label_ids" in schema.names:
        kind = schema.field("filter_label_ids").type.value_type
        columns["filter_label_ids"] = filters.join_pairs(batch["row"].to_numpy(), pairs, kind)
    if "text" in schema.names:
        columns["text"] = batch["text"]
    return pa.record_batch([columns[name] for name in schema.names], schema=schema), points.rejects


def order(rows: pa.Table, file: str) -> tuple[pa.Table, list[Reject]]:
    """Rows by (hash, key, line); of rows with one key only the first in the file stays, the others are rejected."""
    rows = rows.sort_by([("hash", "ascending"), ("key", "ascending"), ("row", "ascending")]).combine_chunks()
    keys = rows["key"].to_pylist()
    lines = rows["row"].to_pylist()
    again = [i for i in range(1, len(keys)) if keys[i] == keys[i - 1]]
    rejects = []
    first = 0
    for i in again:
        first = first if keys[first] == keys[i] else i - 1
        detail = f"the uid {ascii(keys[i])[:80]} is that of line {lines[first] + 1}"
        rejects.append(Reject(file, lines[i] + 1, Reason.DUPLICATE_UID, detail))
    if again:
        rows = rows.take(pa.array(np.delete(np.arange(len(keys)), again)))
    return rows, rejects


def _count(rows: pa.Table) -> Counter[str]:
    tokens = np.diff(parquet.list_column(rows, "input_ids")[1])
    counts = {
        "rows_out": rows.num_rows,
        "tokens": tokens.sum(),
        "truncated": rows["truncated"].to_numpy().sum(),
        "empty_texts": (tokens == 0).sum(),
        "labels": len(parquet.list_column(rows, "label_ids")[0]),
        "labels_merged": rows["merged"].to_numpy().sum(),
    }
    if "filter_label_ids" in rows.column_names:
        counts["filter_pairs_applied"] = len(parquet.list_column(rows, "filter_label_ids")[0])
    return Counter({name: int(n) for name, n in counts.items()})
