"""Lines that are no point or label: where, why, and how many, in an order that does not depend on the workers."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

SHOWN = 5


class Reason(str, Enum):
    """Why a line was rejected; the value is its name in a manifest's counters."""

    NOT_JSON = "not_json"
    NOT_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    NOT_UNICODE = "not_unicode"
    LABEL_OUT_OF_RANGE = "label_out_of_range"
    NO_LABELS = "no_labels"
    DUPLICATE_UID = "duplicate_uid"
    MALFORMED = "malformed"  # a text line that is not of its form
    FEATURE_OUT_OF_RANGE = "feature_out_of_range"
    DUPLICATE_KEY = "duplicate_key"  # the key is that of another row with another content
    UNKNOWN_LABEL = "unknown_label"
    UNKNOWN_QUERY = "unknown_query"


@dataclass(frozen=True, order=True)
class Reject:
    """One rejected line: file, line (from 1), reason, and what was found there."""

    file: str
    line: int
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.detail}"


@dataclass(frozen=True)
class Rejects:
    """Counts by (file, reason) and the first few lines of all; merging is associative and commutative."""

    counts: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    first: tuple[Reject, ...] = ()

    @classmethod
    def of(cls, rejects: Iterable[Reject]) -> "Rejects":
        some = list(rejects)
        counts = Counter((reject.file, reject.reason) for reject in some)
        return cls(counts, tuple(heapq.nsmallest(SHOWN, some)))

    def merge(self, other: "Rejects") -> "Rejects":
        return Rejects(self.counts + other.counts, tuple(heapq.nsmallest(SHOWN, [*self.first, *other.first])))

    def by_reason(self, file: str) -> dict[str, int]:
        """Rejected lines of `file` by reason."""
        return {reason.value: n for (name, reason), n in sorted(self.counts.items()) if name == file}

    def total(self, file: str) -> int:
        return sum(self.by_reason(file).values())
