"""The labels: raw lines to shards that are contiguous ranges of label ids, joined with their training frequencies."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import PCollection, TaggedOutput
from tokenizers import Tokenizer

from pipelines.sharding import assign, parse, tokenizer
from pipelines.sharding.frequencies import sum_counts
from pipelines.sharding.plans import LabelsPlan
from pipelines.sharding.read import ReadLines
from pipelines.sharding.rejects import Reject, Rejects
from pipelines.sharding.summary import SUMMARY, Summary
from schemas import parquet


class ShardLabels(beam.PTransform):
    """(block, counts) of the training points to the labels' shards, written; yields a collection of Summary."""

    def __init__(self, plan: LabelsPlan) -> None:
        super().__init__()
        self._plan = plan

    def expand(self, counts: PCollection) -> PCollection:
        plan = self._plan
        encoded = (
            counts.pipeline
            | "File" >> beam.Create([plan.source])
            | "Read" >> beam.ParDo(ReadLines(assign.BLOCK_LINES))
            | "Spread" >> beam.GroupByKey()
            | "Encode" >> beam.ParDo(EncodeLabels(plan)).with_outputs(SUMMARY, main="rows")
        )
        written = (
            {"labels": encoded["rows"], "counts": counts}
            | "Join counts" >> beam.CoGroupByKey()
            | "Write" >> beam.ParDo(WriteLabels(plan))
        )
        return (encoded[SUMMARY], written) | "Summaries" >> beam.Flatten()


class EncodeLabels(beam.DoFn):
    """(block, raw lines) to (shard, labels)."""

    def __init__(self, plan: LabelsPlan) -> None:
        self._plan = plan

    def setup(self) -> None:
        self._tokenizer = tokenizer.open_tokenizer(self._plan.tokenizer)

    def process(self, element: tuple[int, Any]) -> Iterator[Any]:
        block, parts = element
        for raw in parts:
            first = block * assign.BLOCK_LINES
            batch, truncated, rejects = encode_labels(raw["line"].to_pylist(), first, self._plan, self._tokenizer)
            counters = Counter(rows_in=raw.num_rows, truncated=truncated)
            yield TaggedOutput(SUMMARY, Summary(counters={self._plan.name: counters}, rejects=Rejects.of(rejects)))
            yield from assign.split_by(batch, batch["label_id"].to_numpy() // self._plan.shard_labels)


class WriteLabels(beam.DoFn):
    """(shard, its labels and counts in any order) to its file."""

    def __init__(self, plan: LabelsPlan) -> None:
        self._plan = plan

    def process(self, element: tuple[int, dict[str, Any]]) -> Iterator[Summary]:
        plan = self._plan
        shard, parts = element
        table = join_counts(list(parts["labels"]), list(parts["counts"]), shard * plan.shard_labels)
        entry = parquet.write_shard(plan.table, shard, plan.shards, table.cast(plan.schema), plan.row_group_rows)
        yield Summary(shards={plan.name: (entry,)}, counters={plan.name: _count(table)})


def encode_labels(
    raw: Sequence[bytes], first_row: int, plan: LabelsPlan, tokens: Tokenizer
) -> tuple[pa.RecordBatch, int, list[Reject]]:
    """Raw lines [B] from 0-based row `first_row` on to labels without frequency, texts cut short, and the rejects."""
    parsed = parse.parse_labels(raw, first_row, plan.file, plan.text)
    values, offsets, truncated = tokenizer.encode(tokens, parsed.batch["text"].to_pylist())
    ids = parquet.list_array(values, offsets, plan.schema.field("input_ids").type.value_type)
    return parsed.batch.append_column("input_ids", ids), int(truncated.sum()), parsed.rejects


def join_counts(labels: Sequence[pa.RecordBatch], counts: Sequence[pa.RecordBatch], first: int) -> pa.Table:
    """Labels [first, first + rows) in order of their ids, with the column `frequency`."""
    table = pa.Table.from_batches(labels).sort_by("label_id").combine_chunks()
    return table.append_column("frequency", pa.array(sum_counts(counts, first, table.num_rows)))


def _count(labels: pa.Table) -> Counter[str]:
    tokens = np.diff(parquet.list_column(labels, "input_ids")[1])
    frequency = labels["frequency"].to_numpy()
    counts = {
        "rows_out": labels.num_rows,
        "tokens": tokens.sum(),
        "empty_texts": (tokens == 0).sum(),
        "without_training_points": (frequency == 0).sum(),
    }
    return Counter({name: int(n) for name, n in counts.items()})
