"""What the workers tell the launching process, merged in any order."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import apache_beam as beam

from pipelines.common.exchange import Packet
from pipelines.formats.rejects import Reason, Reject, Rejects
from pipelines.sharding.blocks import Block
from schemas import storage
from schemas.manifest import Shard

SUMMARY = "summary"  # tag of the collections of Summary
INPUT = "input/"  # begins the names of input tables among the counters


@dataclass(frozen=True)
class Summary:
    """Shards and counters by table, rejects, and what lies in staging; `merge` is associative and commutative.

    blocks: parsed rows in staging. rejected: (input table, packet) of reject rows in staging. files: (bytes, SHA-256)
    of each input file by its URL. features: one more than the largest feature id of any row.
    """

    shards: dict[str, tuple[Shard, ...]] = field(default_factory=dict)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    rejects: Rejects = field(default_factory=Rejects)
    blocks: tuple[Block, ...] = ()
    rejected: tuple[tuple[str, Packet], ...] = ()
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    features: int = 0

    def merge(self, other: "Summary") -> "Summary":
        shards = {
            table: self.shards.get(table, ()) + other.shards.get(table, ()) for table in {*self.shards, *other.shards}
        }
        counters = {table: Counter(counts) for table, counts in self.counters.items()}
        for table, counts in other.counters.items():
            counters.setdefault(table, Counter()).update(counts)
        return Summary(
            shards,
            counters,
            self.rejects.merge(other.rejects),
            self.blocks + other.blocks,
            self.rejected + other.rejected,
            {**self.files, **other.files},
            max(self.features, other.features),
        )

    def shards_of(self, table: str) -> tuple[Shard, ...]:
        """The table's shards in the order of their names."""
        return tuple(sorted(self.shards.get(table, ()), key=lambda shard: shard.path))

    def blocks_of(self, table: str) -> list[Block]:
        """The blocks of an input table in the order of their rows."""
        return sorted(block for block in self.blocks if block.table == table)

    def count(self, table: str, name: str) -> int:
        """A counter of a table that is made; 0 where nothing was counted."""
        return int(self.counters.get(table, Counter())[name])

    def count_input(self, table: str, name: str) -> int:
        """A counter of an input table, which the first pipeline counted."""
        return self.count(INPUT + table, name)

    def to_json(self) -> bytes:
        body = {
            "shards": {table: [s.model_dump() for s in self.shards_of(table)] for table in self.shards},
            "counters": self.counters,
            "rejects": [[table, reason.value, n] for (table, reason), n in self.rejects.counts.items()],
            "first_rejects": [[r.file, r.line, r.reason.value, r.detail] for r in self.rejects.first],
            "blocks": [block.to_json() for block in self.blocks],
            "rejected": self.rejected,
            "files": self.files,
            "features": self.features,
        }
        return json.dumps(body).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Summary":
        body = json.loads(data)
        return cls(
            {table: tuple(Shard(**shard) for shard in shards) for table, shards in body["shards"].items()},
            {table: Counter(counts) for table, counts in body["counters"].items()},
            Rejects(
                Counter({(table, Reason(reason)): n for table, reason, n in body["rejects"]}),
                tuple(
                    Reject(file, line, Reason(reason), detail) for file, line, reason, detail in body["first_rejects"]
                ),
            ),
            tuple(Block.from_json(block) for block in body["blocks"]),
            tuple((table, tuple(packet)) for table, packet in body["rejected"]),
            {url: (size, digest) for url, (size, digest) in body["files"].items()},
            body["features"],
        )


class MergeSummaries(beam.CombineFn):
    """Summaries of all stages to one."""

    def create_accumulator(self) -> list[Summary]:
        return []

    def add_input(self, accumulator: list[Summary], element: Summary) -> list[Summary]:
        # Merging copies what is there: many small ones first, so that the whole costs n log n.
        accumulator.append(element)
        return [reduce(Summary.merge, accumulator)] if len(accumulator) >= _MERGED_AT_ONCE else accumulator

    def merge_accumulators(self, accumulators: Iterable[list[Summary]]) -> list[Summary]:
        return [reduce(Summary.merge, (one for some in accumulators for one in some), Summary())]

    def extract_output(self, accumulator: list[Summary]) -> Summary:
        return reduce(Summary.merge, accumulator, Summary())


_MERGED_AT_ONCE = 64


class WriteSummary(beam.DoFn):
    """The last stage: one small file that the launching process reads, wherever the workers were."""

    def __init__(self, url: str) -> None:
        self._url = url

    def process(self, element: Summary) -> None:
        storage.write_bytes(self._url, element.to_json(), durable=False)
