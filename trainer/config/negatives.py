"""Which labels a query is scored against, and when tables of hard ones are made and used."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.options import Options

LEAD = 2  # epochs between a dump and the first use of its table


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


class Refresh(Options):
    """When hard-negative tables are made and used (ASTRA's tau_s and tau_r), and what happens when they are not."""

    source: Literal["table", "in-trainer"] = Field(
        "table", description="tables mined beside the training, or an index of stale vectors within the trainer"
    )
    start: int = Field(5, ge=0, description="tau_s: the first epoch with hard negatives; two epochs after its dump")
    every: int = Field(5, ge=1, description="tau_r: epochs between tables")
    every_steps: int = Field(1000, ge=1, description="steps between the indexes of 'in-trainer'")
    rebuild_steps: int = Field(
        0,
        ge=0,
        description="of 'in-trainer': an index is built beside the training and used so many steps after its copy of "
        "the vectors was made; 0: training waits for it",
    )
    by: Literal["classifier", "labels"] = Field(
        "classifier", description="nearest by classifier vectors (w-hard) or by label embeddings (theta-hard)"
    )
    index: str = Field(
        "auto",
        description="'exact', 'auto', a Faiss factory string, or with source = 'in-trainer' 'mips': spherical k-means "
        "with the square root of L clusters, 64 of them searched",
    )
    stale: Literal["warn", "wait", "random-only", "stop"] = Field(
        "warn",
        description="when the newest table is older than max_age, or there is none: say so and go on with it, wait for "
        "a younger one, go on without hard negatives, or stop",
    )
    max_age: int = Field(
        0, ge=0, description="epochs from a table's dump to its use; 0: up to every + 1, so that none may be late"
    )
    wait_seconds: float = Field(600.0, gt=0, description="how long 'wait' waits before it goes on as 'warn'")

    @property
    def oldest(self) -> int:
        """Epochs from its dump at which a table is not stale yet."""
        return self.max_age or LEAD + self.every - 1

    @model_validator(mode="before")
    @classmethod
    def _before_there_were_policies(cls, body: Any) -> Any:
        """`late = "continue"` and `"wait"` of earlier recipes and runs."""
        if not isinstance(body, dict) or "late" not in body:
            return body
        known = {"continue": "warn", "wait": "wait"}
        late = body["late"]
        if late not in known or body.get("stale", known[late]) != known[late]:
            raise ValueError(f"refresh.late = {late!r}: it is refresh.stale now, one of warn, wait, random-only, stop")
        return {**{name: value for name, value in body.items() if name != "late"}, "stale": known[late]}

    @model_validator(mode="after")
    def _possible(self) -> "Refresh":
        if self.source == "table" and self.start < LEAD:
            raise ValueError(
                f"refresh.start = {self.start}: a table is used {LEAD} epochs after its dump at the earliest"
            )
        if 0 < self.max_age < LEAD:
            raise ValueError(
                f"refresh.max_age = {self.max_age}: no table is younger than {LEAD} epochs when it is used"
            )
        if self.index == "mips" and self.source == "table":
            raise ValueError("refresh.index = 'mips' is the trainer's own: set refresh.source = 'in-trainer'")
        if self.rebuild_steps >= self.every_steps:
            raise ValueError(
                f"refresh.rebuild_steps = {self.rebuild_steps} is not below refresh.every_steps = {self.every_steps}: "
                "the next index would be due before this one is used"
            )
        if self.source == "in-trainer" and self.by == "labels":
            raise ValueError("refresh.by = 'labels' is for tables: the trainer's own index holds classifier vectors")
        return self
