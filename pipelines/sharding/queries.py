"""One split's pipeline: read in blocks, parse and tokenize, group by shard, order, number, write."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsDict, TaggedOutput

from pipelines.sharding import assign, tokenizer
from pipelines.sharding.frequencies import count_labels
from pipelines.sharding.plans import QueriesPlan
from pipelines.sharding.read import ReadLines, ReadPairs
from pipelines.sharding.rejects import Rejects
from pipelines.sharding.rows import count, encode_points, order
from pipelines.sharding.summary import SUMMARY, Summary
from schemas import parquet

ROWS, FREQUENCIES = "rows", "frequencies"


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
        summary = Summary(counters={self._plan.name: count(rows)}, rejects=Rejects.of(rejects))
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
