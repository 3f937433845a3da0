"""Section `negatives` of a recipe: the entry of every source is here."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.options import Options
from trainer.negatives.base import SourceSection
from trainer.negatives.in_batch import InBatchSection
from trainer.negatives.lsh_section import LshSection

_MOST = 1 << 24  # labels of a query or of a pool


class Negatives(Options):
    """Labels that a query is scored against, besides its positives."""

    random: int = Field(3200, ge=0, le=_MOST, description="k_r labels drawn uniformly with replacement from [0, L)")
    pool: Literal["shared", "own", "all", "batch"] = Field(
        "shared",
        description="one pool a batch, one a query, every label (no sampling), or the positives and hard negatives of "
        "the whole batch",
    )
    chunk: int = Field(4096, ge=1, description="labels scored at a time when pool = 'all'")
    hard: int = Field(0, ge=0, le=_MOST, description="k_h hard negatives a query, out of the table's K")
    width: int = Field(0, ge=0, le=_MOST, description="K of the mined table; 0: the same as hard")
    warmup: int = Field(
        0,
        ge=0,
        le=_MOST,
        description="random negatives in epochs that have no table yet; 0: random + hard (Algorithm 1, step 8)",
    )
    reweight: bool = Field(
        True,
        description="weight random negatives by 1 / (k_r q_l), which makes the loss unbiased; q_l = 1 / L if uniform",
    )
    curriculum: bool = Field(
        False,
        description="from the first epoch with hard negatives on, their number grows from none to `hard` in the last, "
        "and that of random ones goes from those before to `random`",
    )
    frequency_share: float = Field(
        0.0, ge=0, le=1, description="share of the random draws that go by training frequency, not uniformly"
    )
    frequency_power: float = Field(
        1.0, gt=0, description="these draw a label with n training points by (n + 1) ** power"
    )
    start: int = Field(0, ge=0, description="the first epoch with negatives from the sources below")
    # Sources, one entry each.
    in_batch: InBatchSection = InBatchSection()
    lsh: LshSection = LshSection()

    @property
    def table_width(self) -> int:
        return self.width or self.hard

    @property
    def sections(self) -> list[SourceSection]:
        """Sections of the sources that are used."""
        options = (getattr(self, name) for name in type(self).model_fields)
        return [section for section in options if isinstance(section, SourceSection) and section.hard]

    @property
    def sampled(self) -> int:
        """Negatives a query from the sources, at most."""
        return sum(section.most for section in self.sections)

    @model_validator(mode="after")
    def _possible(self) -> "Negatives":
        if self.width and self.width < self.hard:
            raise ValueError(f"negatives.width = {self.width} is below negatives.hard = {self.hard}: raise it")
        if self.pool in ("shared", "own") and self.random + self.hard + self.sampled == 0:
            raise ValueError("no negatives at all: set negatives.random, negatives.hard or negatives.pool = 'all'")
        if self.pool == "all" and self.hard + self.sampled:
            raise ValueError(
                "negatives.pool = 'all' scores every label already: set negatives.hard, in_batch and lsh.hard to 0"
            )
        if self.curriculum and not self.hard:
            raise ValueError("negatives.curriculum goes over to hard negatives: it needs negatives.hard > 0")
        if self.warmup and not self.hard + self.sampled:
            raise ValueError("negatives.warmup is for epochs before the first hard negatives: set negatives.hard > 0")
        if self.start and not self.sampled:
            raise ValueError("negatives.start is for in_batch and lsh: set one of them, or leave it out")
        return self
