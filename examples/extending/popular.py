"""Popular labels as negatives: the labels that were positives most often so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from trainer.negatives.base import NegativeSource, Sampled, SourceContext, SourceSection, State

if TYPE_CHECKING:
    from trainer.stream.batch import Batch


class PopularSection(SourceSection):
    hard: int = Field(0, ge=0, description="popular labels per query")

    def open(self, context: SourceContext) -> Popular:
        return Popular(self.hard)


class Popular(NegativeSource):
    name, stateful = "popular", True  # a resumed run continues with the counts

    def __init__(self, count: int) -> None:
        self._count, self._seen = count, np.zeros(0, np.int64)

    def find(self, batch: Batch, x: object = None) -> Sampled:
        counts = np.bincount(batch.positives, minlength=len(self._seen))
        counts[: len(self._seen)] += self._seen
        self._seen = counts
        return Sampled(np.tile(np.argsort(-counts, kind="stable")[: self._count], (len(batch), 1)))

    def state(self) -> State:
        return {"seen": self._seen}

    def load(self, state: State) -> None:
        self._seen = state["seen"].copy()
