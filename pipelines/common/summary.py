"""Summaries: reports of the workers to the launching process, merged in any order."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import PCollection
from pydantic import TypeAdapter

from pipelines.common.exchange import Packet, receive
from pipelines.formats.rejects import Rejects, add_counts
from schemas import storage
from schemas.manifest import Shard

SUMMARY = "summary"  # tag of the collections of Summary
INPUT = "input/"  # begins the names of input tables among the counters
_MERGED_AT_ONCE = 64


@dataclass(frozen=True, order=True)
class Block:
    """Rows of one raw block in staging: `sampled` holds those that a sample is drawn from first, `rest` the others.

    mentions: the label keys that the block's points name, each once (forms with keys only).
    """

    table: str
    part: int
    number: int
    sampled: Packet
    rest: Packet
    mentions: Packet | None = None

    def read(self) -> pa.RecordBatch:
        """Read all rows, with the column `part`."""
        rows = pa.concat_batches(list(receive([self.sampled, self.rest])))
        return rows.append_column("part", pa.array(np.full(rows.num_rows, self.part, np.int32)))


@dataclass(frozen=True, order=True)
class Patched:
    """A patch over shard `number` of the labels or points before: which of the view's, its file, and its row groups."""

    table: str
    number: int
    kind: str
    file: str
    bytes: int
    sha256: str
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Summary:
    """Shards and counters by table, rejects, and what lies in staging; `merge` is associative and commutative.

    blocks: parsed rows in staging. rejected: (input table, packet) of reject rows in staging. files: (bytes, SHA-256)
    of each input file by its URL. features: one more than the largest feature id of any row. patched: over what a
    version has already. kept: by collection and key, where a later pipeline finds the places of its packets.
    label_sizes: labels of each shard.
    """

    shards: dict[str, tuple[Shard, ...]] = field(default_factory=dict)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    rejects: Rejects = field(default_factory=Rejects)
    blocks: tuple[Block, ...] = ()
    rejected: tuple[tuple[str, Packet], ...] = ()
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    features: int = 0
    patched: tuple[Patched, ...] = ()
    kept: dict[str, dict[int, Packet]] = field(default_factory=dict)
    label_sizes: dict[int, int] = field(default_factory=dict)

    def merge(self, other: "Summary") -> "Summary":
        """Return both as one."""
        shards = {
            table: self.shards.get(table, ()) + other.shards.get(table, ()) for table in {*self.shards, *other.shards}
        }
        return Summary(
            shards,
            add_counts(self.counters, other.counters),
            self.rejects.merge(other.rejects),
            self.blocks + other.blocks,
            self.rejected + other.rejected,
            {**self.files, **other.files},
            max(self.features, other.features),
            self.patched + other.patched,
            {name: {**self.kept.get(name, {}), **other.kept.get(name, {})} for name in {*self.kept, *other.kept}},
            {**self.label_sizes, **other.label_sizes},
        )

    def shards_of(self, table: str) -> tuple[Shard, ...]:
        """Return the table's shards in the order of their names."""
        return tuple(sorted(self.shards.get(table, ()), key=lambda shard: shard.path))

    def blocks_of(self, table: str) -> list[Block]:
        """Return the blocks of an input table in the order of their rows."""
        return sorted(block for block in self.blocks if block.table == table)

    def count(self, table: str, name: str) -> int:
        """Return a counter of a table that is made; 0 where nothing was counted."""
        return int(self.counters.get(table, Counter())[name])

    def count_input(self, table: str, name: str) -> int:
        """Return a counter of an input table, which the first pipeline counted."""
        return self.count(INPUT + table, name)


_AS_JSON = TypeAdapter(Summary)


class MergeSummaries(beam.CombineFn):
    """Merger of the summaries of all stages."""

    def create_accumulator(self) -> list[Summary]:
        return []

    def add_input(self, accumulator: list[Summary], element: Summary) -> list[Summary]:
        # Merging copies what is there: many small ones first, so that the whole costs n log n.
        accumulator.append(element)
        return [reduce(Summary.merge, accumulator)] if len(accumulator) >= _MERGED_AT_ONCE else accumulator

    def merge_accumulators(self, accumulators: Iterable[list[Summary]]) -> list[Summary]:
        return [reduce(Summary.merge, (summary for summaries in accumulators for summary in summaries), Summary())]

    def extract_output(self, accumulator: list[Summary]) -> Summary:
        return reduce(Summary.merge, accumulator, Summary())


def merge_and_write(summaries: PCollection, url: str) -> None:
    """End a pipeline: one small file at `url` that the launching process reads, wherever the workers are."""
    merged = summaries | "Merge summaries" >> beam.CombineGlobally(MergeSummaries()).without_defaults()
    _ = merged | "Write summary" >> beam.Map(write_summary, url)


def as_json(summary: Summary) -> Any:
    """Return `summary` as plain JSON values."""
    return _AS_JSON.dump_python(summary, mode="json")


def from_json(values: Any) -> Summary:
    """Return the summary of what `as_json` gave."""
    return _AS_JSON.validate_python(values)


def write_summary(summary: Summary, url: str) -> None:
    """Write `summary` at `url`. Raises StorageError."""
    storage.write_sealed(url, _AS_JSON.dump_json(summary))


def read_summary(url: str) -> Summary:
    """Read the summary at `url`; none was written where a pipeline had nothing to do. Raises StorageError."""
    try:
        return _AS_JSON.validate_json(storage.read_sealed(url))
    except FileNotFoundError:
        return Summary()
