"""Rejected rows: their places, reasons and numbers, in an order that does not depend on the workers."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import pyarrow as pa

from schemas import arrow

SHOWN = 5
K = TypeVar("K")


class Reason(str, Enum):
    """Reason of a reject; the value is its name in the rejects table and in a manifest's counters."""

    NOT_JSON = "not_json"
    NOT_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    NOT_UNICODE = "not_unicode"
    MALFORMED = "malformed"  # a text line that is not of its form
    LABEL_OUT_OF_RANGE = "label_out_of_range"
    FEATURE_OUT_OF_RANGE = "feature_out_of_range"
    NO_LABELS = "no_labels"
    DUPLICATE_KEY = "duplicate_key"  # the key is that of another row with another content
    UNKNOWN_LABEL = "unknown_label"  # one mention of a label that is not there
    UNKNOWN_QUERY = "unknown_query"


@dataclass(frozen=True, order=True)
class Reject:
    """One rejected row: file, line (from 1), reason, and its content."""

    file: str
    line: int
    reason: Reason
    detail: str

    def __str__(self) -> str:
        detail = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in self.detail)
        return f"{self.file}, line {self.line}: {detail}"


def to_batch(rejects: Sequence[Reject]) -> pa.RecordBatch:
    """Return rows of the rejects table."""
    columns = [[r.file for r in rejects], [r.line for r in rejects], [r.reason.value for r in rejects]]
    return pa.record_batch([*columns, [r.detail for r in rejects]], schema=arrow.rejects())


@dataclass(frozen=True)
class Rejects:
    """Counts by reason of each input table, and the first few rows of all."""

    counts: Mapping[str, Counter[Reason]] = field(default_factory=dict)
    first: tuple[Reject, ...] = ()

    @classmethod
    def of(cls, table: str, rejects: Sequence[Reject]) -> "Rejects":
        """Count the rejects of one input table."""
        return cls({table: Counter(reject.reason for reject in rejects)}, tuple(heapq.nsmallest(SHOWN, rejects)))

    @classmethod
    def sum_of(cls, many: Iterable["Rejects"]) -> "Rejects":
        """Return all as one."""
        all_of = list(many)
        first = heapq.nsmallest(SHOWN, (reject for each in all_of for reject in each.first))
        return cls(sum_counters(each.counts for each in all_of), tuple(first))

    def by_reason(self, table: str) -> dict[str, int]:
        """Count the rejects of `table` by reason."""
        return {reason.value: n for reason, n in sorted(self.counts.get(table, {}).items())}


def sum_counters(many: Iterable[Mapping[str, Counter[K]]]) -> dict[str, Counter[K]]:
    """Add up the counters of each table."""
    total: dict[str, Counter[K]] = {}
    for counters in many:
        for table, counts in counters.items():
            total.setdefault(table, Counter()).update(counts)
    return total
