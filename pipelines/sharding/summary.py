"""What the workers tell the launching process: shards written, counters and rejects, merged in any order."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import apache_beam as beam

from pipelines.sharding.rejects import Reason, Reject, Rejects
from schemas import storage
from schemas.manifest import Shard

SUMMARY = "summary"  # tag of the collections of Summary


@dataclass(frozen=True)
class Summary:
    """Shards and counters by table (`queries/train`, `labels`), and rejects; `merge` is associative and commutative."""

    shards: dict[str, tuple[Shard, ...]] = field(default_factory=dict)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    rejects: Rejects = field(default_factory=Rejects)

    def merge(self, other: "Summary") -> "Summary":
        shards = {
            table: self.shards.get(table, ()) + other.shards.get(table, ()) for table in {*self.shards, *other.shards}
        }
        counters = {table: Counter(counts) for table, counts in self.counters.items()}
        for table, counts in other.counters.items():
            counters.setdefault(table, Counter()).update(counts)
        return Summary(shards, counters, self.rejects.merge(other.rejects))

    def shards_of(self, table: str) -> tuple[Shard, ...]:
        """The table's shards in the order of their names."""
        return tuple(sorted(self.shards.get(table, ()), key=lambda shard: shard.path))

    def to_json(self) -> bytes:
        body = {
            "shards": {table: [s.model_dump() for s in self.shards_of(table)] for table in self.shards},
            "counters": self.counters,
            "rejects": [[file, reason.value, n] for (file, reason), n in self.rejects.counts.items()],
            "first_rejects": [[r.file, r.line, r.reason.value, r.detail] for r in self.rejects.first],
        }
        return json.dumps(body).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Summary":
        body = json.loads(data)
        return cls(
            {table: tuple(Shard(**shard) for shard in shards) for table, shards in body["shards"].items()},
            {table: Counter(counts) for table, counts in body["counters"].items()},
            Rejects(
                Counter({(file, Reason(reason)): n for file, reason, n in body["rejects"]}),
                tuple(
                    Reject(file, line, Reason(reason), detail) for file, line, reason, detail in body["first_rejects"]
                ),
            ),
        )


class MergeSummaries(beam.CombineFn):
    """Summaries of all stages to one."""

    def create_accumulator(self) -> Summary:
        return Summary()

    def add_input(self, accumulator: Summary, element: Summary) -> Summary:
        return accumulator.merge(element)

    def merge_accumulators(self, accumulators: Iterable[Summary]) -> Summary:
        return reduce(Summary.merge, accumulators, Summary())

    def extract_output(self, accumulator: Summary) -> Summary:
        return accumulator


class WriteSummary(beam.DoFn):
    """The last stage: one small file that the launching process reads, wherever the workers were."""

    def __init__(self, url: str) -> None:
        self._url = url

    def process(self, element: Summary) -> None:
        storage.write_bytes(self._url, element.to_json())
