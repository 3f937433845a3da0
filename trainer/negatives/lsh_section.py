"""Section `negatives.lsh`: options of negatives from hash tables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.options import Options, key

Family = Literal["simhash", "dwta"]
MOST_BYTES = 4 << 30  # maximum bytes of a run's hash tables without codes, for any number of labels


class LshSection(Options):
    """Negatives from hash tables over the classifier's vectors (LNS)."""

    hard: Annotated[int, Field(ge=1)] | Literal["all"] = key(
        "all",
        "maximum number of labels for each query: tables are searched until a query has this many labels. all: the "
        "union of the query's buckets in all tables, as in the paper",
    )
    query: Literal["embedding", "label"] = key(
        "embedding", "the vector that is hashed: the query's embedding x, or the vector of a random positive"
    )
    family: Family = key(
        "dwta", "hash functions: signs of random projections (simhash), or the largest coordinate in each bin (dwta)"
    )
    bits: int = key(6, "K, the number of hash functions per code", ge=1, le=28)
    tables: int = key(50, "L, the number of hash tables", ge=1)
    width: int = key(2, "number of coordinates in a bin of dwta; a table has width ** bits buckets", ge=2)
    capacity: int = key(
        128, "maximum number of labels that a bucket stores; a bucket with more labels stores a uniform sample", ge=1
    )
    every: int = key(
        50, "number of steps until changed rows are hashed again; this number grows by a factor of 1.1 each time", ge=1
    )

    @model_validator(mode="after")
    def _fits(self) -> LshSection:
        size = self.tables * self.buckets * (4 * self.capacity + 12)  # slots, and three counts per bucket
        if size > MOST_BYTES:
            raise ValueError(
                f"negatives.lsh: {self.tables} tables of {self.buckets:,} buckets with room for {self.capacity} labels "
                f"take {size / 2**30:.1f} GiB, more than the limit of {MOST_BYTES >> 30} GiB: lower "
                "negatives.lsh.capacity, tables, bits or width"
            )
        return self

    @property
    def buckets(self) -> int:
        """Number of buckets per table."""
        return int((self.width if self.family == "dwta" else 2) ** self.bits)

    @property
    def most(self) -> int:
        """Maximum number of labels per query."""
        return self.tables * self.capacity if self.hard == "all" else self.hard

    @property
    def limit(self) -> int:
        """Number of labels per query at which the search through tables stops; 0: no limit."""
        return 0 if self.hard == "all" else self.hard
