"""Points of one split on their way to its shards: attach the ids of their labels, tokenize, spread over the shards."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import PCollection, TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from pipelines.common import assign
from pipelines.common.exchange import Files, Packet, SendBuffer, read_places, receive
from pipelines.common.summary import SUMMARY, Block
from pipelines.formats.base import PAIRS as PAIRS_OF
from pipelines.formats.rejects import Reject
from pipelines.sharding import points
from pipelines.sharding.plan import QueriesPlan
from pipelines.sharding.resolve import known_ids, read_mentions
from pipelines.sharding.steps import ROWS, by_shard, encode, keep, open_tokens, reported
from schemas import storage

ENCODE = "tokenize"  # step
PAIRS = pa.schema(
    [("hash", pa.uint64()), ("part", pa.int32()), ("row", pa.int64()), ("key", pa.string()), ("label_id", pa.int64())]
)


class Group(NamedTuple):
    """Blocks of an input table, and where the ids of the labels that they name are; None where they name none."""

    blocks: tuple[Block, ...]
    ids: Packet | None


Tables = Mapping[str, list[Group]]


@beam.ptransform_fn
def assemble_queries(pipeline: Any, plan: QueriesPlan, tables: Tables, staged: Files, rejects: Files) -> PCollection:
    """Assemble one split; yields Summary, whose `kept` tell where the rows of each shard are, and its pairs.

    tables: groups of blocks by input table. Rows go to `staged`.
    """
    sides: dict[str, tuple[list[Group], _Assembler]]
    sides = {rows_of(plan): (tables[plan.source], AssemblePoints(plan, staged, rejects))}
    if plan.pairs:
        sides[pairs_of(plan)] = tables[PAIRS_OF + plan.source], AssemblePairs(plan, staged, rejects)
    summaries = []
    for name, (groups, assembler) in sides.items():
        blocks = pipeline | f"Blocks of {name}" >> beam.Create(groups)
        assembled = blocks | f"Assemble {name}" >> beam.ParDo(assembler).with_outputs(SUMMARY, main=ROWS)
        summaries += [assembled[SUMMARY], assembled[ROWS] | f"Keep {name}" >> keep(name, staged)]
    return summaries | "Summaries" >> beam.Flatten()


def rows_of(plan: QueriesPlan) -> str:
    """Name the collection of the split's rows by shard."""
    return f"rows of {plan.split}"


def pairs_of(plan: QueriesPlan) -> str:
    """Name the collection of the split's pairs by shard."""
    return f"pairs of {plan.split}"


class _Assembler(beam.DoFn):
    """Assembler of groups of blocks to (shard, packet), and summaries; holds rows back for a bundle."""

    def __init__(self, plan: QueriesPlan, staged: Files, rejects: Files) -> None:
        self._plan, self._staged, self._rejects = plan, staged, rejects

    def start_bundle(self) -> None:
        self._buffer: SendBuffer[int] = SendBuffer(self._staged)

    def process(self, element: Group) -> Iterator[Any]:
        plan = self._plan
        plan.meter.start(ENCODE)
        for block, batch, rejects in _with_labels(Group(*element), plan):
            yield TaggedOutput(SUMMARY, reported(block.table, rejects, self._rejects))
            rows = self.finish(batch)
            yield from plan.meter.count_bytes(ENCODE, self._buffer.add(by_shard(rows, plan.shards)))
            self.count(rows.num_rows)

    def finish_bundle(self) -> Iterator[Any]:
        for sent in self._plan.meter.count_bytes(ENCODE, self._buffer.send()):
            yield GlobalWindows.windowed_value(sent)

    def finish(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return what is sent of rows with `label_ids`."""
        raise NotImplementedError

    def count(self, rows: int) -> None:
        """Count `rows` that are done."""


class AssemblePoints(_Assembler):
    """Assembler of tokenized rows of the plan's `row_schema`."""

    def setup(self) -> None:
        plan = self._plan
        self._tokens = open_tokens(plan)
        self._filters = (
            np.frombuffer(storage.read_sealed(plan.filters), np.int64).reshape(-1, 2) if plan.filters else None
        )

    def finish(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        plan = self._plan
        batch = points.attach_filters(encode(batch, plan, self._tokens), self._filters, plan)
        return batch.select(plan.row_schema.names)

    def count(self, rows: int) -> None:
        self._plan.meter.count(ENCODE, rows)


class AssemblePairs(_Assembler):
    """Assembler of pairs with their labels' ids: columns PAIRS."""

    def finish(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        batch = batch.filter(pc.equal(pc.list_value_length(batch["label_ids"]), 1))
        labels = batch["label_ids"].flatten().cast(pa.int64())
        return batch.append_column("label_id", labels).select(PAIRS.names)


def _with_labels(group: Group, plan: QueriesPlan) -> Iterator[tuple[Block, pa.RecordBatch, list[Reject]]]:
    """Yield each block, its rows of the plan's share with their labels' ids, and its rejects."""
    mentions = [read_mentions(block) for block in group.blocks]
    ends = np.cumsum([0 if named is None else named.num_rows for named in mentions])
    ids = np.split(known_ids(int(ends[-1]), receive(read_places(group.ids))), ends[:-1])
    for block, named, label_ids in zip(group.blocks, mentions, ids, strict=True):
        batch = block.read()
        if plan.share != (0.0, 1.0):
            batch = batch.filter(pa.array(assign.in_share(batch["hash"].to_numpy(), plan.share)))
        yield block, *points.attach_labels(batch, plan, label_ids, None if named is None else named["key"])
