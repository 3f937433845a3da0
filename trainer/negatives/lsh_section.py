"""Section `negatives.lsh`: options of negatives from hash tables."""

from __future__ import annotations

import importlib
from typing import Literal

from pydantic import Field, model_validator

from trainer.negatives.base import NegativeSource, SourceContext, SourceSection

Family = Literal["simhash", "dwta"]
Policy = Literal["reservoir", "fifo"]
MOST_BUCKETS = 1 << 15


class LshSection(SourceSection):
    """Negatives from hash tables over the classifier's vectors (LNS)."""

    hard: int = Field(0, ge=0, description="labels a query, at most; 0: none from here")
    query: Literal["embedding", "label"] = Field(
        "embedding", description="what is hashed: x, or the vector of one positive that is drawn each step"
    )
    family: Family = "dwta"
    bits: int = Field(6, ge=1, le=15, description="K functions to a code")
    tables: int = Field(50, ge=1, description="L hash tables")
    width: int = Field(2, ge=2, description="coordinates of a bin of dwta; a table has width ** bits buckets")
    capacity: int = Field(128, ge=1, description="labels that a bucket keeps")
    policy: Policy = Field("reservoir", description="which they are: a uniform sample, or the newest")
    every: int = Field(50, ge=1, description="steps until touched rows are hashed again for the first time")
    growth: float = Field(1.1, ge=1, description="of the steps from one time to the next")

    @model_validator(mode="after")
    def _few_buckets(self) -> LshSection:
        if self.family == "dwta" and self.width**self.bits > MOST_BUCKETS:
            raise ValueError(f"negatives.lsh.width ** bits is above {MOST_BUCKETS} buckets a table: lower one of them")
        return self

    def open(self, context: SourceContext) -> NegativeSource:
        hashed = importlib.import_module("trainer.negatives.lsh")  # with its compiled loops, where it is used
        return hashed.HashedNegatives(self, context.vectors, context.seed, context.first_epoch)
