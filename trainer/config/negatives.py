"""Which labels a query is scored against, and when tables of hard ones are made and used."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.options import Options


class Hashing(Options):
    """Negatives from hash tables over the classifier's vectors (LNS)."""

    hard: int = Field(0, ge=0, description="labels a query, at most; 0: none from here")
    query: Literal["embedding", "label"] = Field(
        "embedding", description="what is hashed: x, or the vector of one positive that is drawn each step"
    )
    family: Literal["simhash", "dwta"] = "dwta"
    bits: int = Field(6, ge=1, le=15, description="K functions to a code")
    tables: int = Field(50, ge=1, description="L hash tables")
    width: int = Field(2, ge=2, description="coordinates of a bin of dwta; a table has width ** bits buckets")
    capacity: int = Field(128, ge=1, description="labels that a bucket keeps")
    policy: Literal["reservoir", "fifo"] = Field(
        "reservoir", description="which they are: a uniform sample, or the newest"
    )
    every: int = Field(50, ge=1, description="steps until touched rows are hashed again for the first time")
    growth: float = Field(1.1, ge=1, description="of the steps from one time to the next")


class Negatives(Options):
    """Which labels a query is scored against, besides its positives."""

    random: int = Field(3200, ge=0, description="k_r labels drawn uniformly with replacement from [0, L)")
    pool: Literal["shared", "own", "all", "batch"] = Field(
        "shared",
        description="one pool a batch, one a query, every label (no sampling), or with head.kind = 'label-encoder' the "
        "positives and hard negatives of the whole batch",
    )
    chunk: int = Field(4096, ge=1, description="labels scored at a time when pool = 'all'")
    hard: int = Field(0, ge=0, description="k_h hard negatives a query, out of the table's K")
    width: int = Field(0, ge=0, description="K of the mined table; 0: the same as hard")
    warmup: int = Field(
        0, ge=0, description="random negatives in epochs that have no table yet; 0: random + hard (Algorithm 1, step 8)"
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
    in_batch: int = Field(0, ge=0, description="other queries' positives a query, those with the highest scores")
    lsh: Hashing = Hashing()
    start: int = Field(0, ge=0, description="the first epoch with negatives from in_batch and lsh")

    @property
    def table_width(self) -> int:
        return self.width or self.hard

    @property
    def found(self) -> int:
        """Negatives a query that are found with the model as it is at the step, at most."""
        return self.in_batch + self.lsh.hard

    @model_validator(mode="after")
    def _possible(self) -> "Negatives":
        if self.width and self.width < self.hard:
            raise ValueError(f"negatives.width = {self.width} is below negatives.hard = {self.hard}")
        if self.pool in ("shared", "own") and self.random + self.hard + self.found == 0:
            raise ValueError("no negatives at all: set negatives.random, negatives.hard or negatives.pool = 'all'")
        if self.pool == "all" and self.hard + self.found:
            raise ValueError(
                "negatives.pool = 'all' scores every label already: set negatives.hard, in_batch and lsh.hard to 0"
            )
        if self.curriculum and not self.hard:
            raise ValueError("negatives.curriculum goes over to hard negatives: it needs negatives.hard > 0")
        if self.warmup and not self.hard + self.found:
            raise ValueError("negatives.warmup is for epochs before the first hard negatives: set negatives.hard > 0")
        if self.start and not self.found:
            raise ValueError("negatives.start is for in_batch and lsh: set one of them, or leave it out")
        if self.lsh.family == "dwta" and self.lsh.width**self.lsh.bits > 1 << 15:
            raise ValueError("negatives.lsh.width ** bits is above 32768 buckets a table: lower one of them")
        return self
