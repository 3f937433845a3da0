"""RAE-XMC: a dual encoder with a memory of training points; the nearest points vote for their labels."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from schemas.options import Options, key
from trainer.methods.dexml import DualEncoder, TextTableSchedule
from trainer.methods.recipe import MOST, NegativesSection
from trainer.methods.sections import TableSchedule


class MemorySection(Options):
    """Memory of training points: their embeddings from two epochs earlier, without gradient."""

    neighbours: int = key(
        24,
        "K, the number of nearest other points per point; each of the K points votes for its own labels",
        ge=1,
        le=MOST,
    )
    weight: float = key(1.0, "weight of the loss on votes, added to the loss on the batch's labels; 0: no votes", ge=0)
    temperature: float = key(0.05, "tau of the votes: cosines are divided by tau", gt=0)


class Rae(DualEncoder):
    """`loss` over the labels of the batch, plus a loss on the votes of each query's nearest points (from tables)."""

    method: Literal["rae"]
    negatives: NegativesSection = NegativesSection()  # labels of the batch
    memory: MemorySection = MemorySection()
    refresh: TextTableSchedule = TextTableSchedule()

    @property
    def tables(self) -> TableSchedule | None:
        return self.refresh if self.memory.weight else None

    @property
    def table_parameters(self) -> dict[str, Any]:
        return {"table_width": self.memory.neighbours, "index": self.refresh.index, "by": "points"}

    @model_validator(mode="after")
    def _check_memory(self) -> Rae:
        if self.data.mix or self.data.label_texts or self.data.by_parts:
            others = "data.mix, data.label_texts, data.parts and data.replay"
            raise ValueError(f"method = 'rae' needs all points of a single split: leave out {others}")
        if not self.encoder.normalize:
            raise ValueError("method = 'rae' needs unit vectors: set encoder.normalize = true")
        return self
