"""Section `refresh`: when tables of hard negatives are made and used."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.options import Options
from trainer.negatives.index_kinds import FRESH, MIPS, MOST_FRESH

LEAD = 2  # epochs between a dump and the first use of its table


class Refresh(Options):
    """Schedule of hard-negative tables (ASTRA's tau_s and tau_r), and the policy for late ones."""

    source: Literal["table", "in-trainer"] = Field(
        "table", description="tables mined beside the training, or an index within the trainer"
    )
    start: int = Field(5, ge=0, description="tau_s: the first epoch with hard negatives; two epochs after its dump")
    every: int = Field(5, ge=1, description="tau_r: epochs between tables")
    every_steps: int = Field(
        1000, ge=1, description="steps between the indexes of 'in-trainer' that hold a copy of the vectors"
    )
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
        description="'exact', 'auto', a Faiss factory string; with source = 'in-trainer' also 'fresh', every label by "
        f"its vector as it is, which 'auto' is up to {MOST_FRESH:,} labels, and 'mips': spherical k-means with the "
        "square root of L clusters, 64 of them searched",
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
        """Greatest age, in epochs from its dump, of a table that is not stale."""
        return self.max_age or LEAD + self.every - 1

    @model_validator(mode="before")
    @classmethod
    def _rename_late(cls, body: Any) -> Any:
        """Read `late = "continue"` and `"wait"` of earlier recipes and runs as `stale`."""
        if not isinstance(body, dict) or "late" not in body:
            return body
        policies = {"continue": "warn", "wait": "wait"}
        late = body["late"]
        if late not in policies or body.get("stale", policies[late]) != policies[late]:
            raise ValueError(f"refresh.late = {late!r}: it is refresh.stale now, one of warn, wait, random-only, stop")
        return {**{name: value for name, value in body.items() if name != "late"}, "stale": policies[late]}

    @model_validator(mode="after")
    def _check(self) -> "Refresh":
        if self.source == "table" and self.start < LEAD:
            raise ValueError(
                f"refresh.start = {self.start}: a table is used {LEAD} epochs after its dump at the earliest"
            )
        if 0 < self.max_age < LEAD:
            raise ValueError(
                f"refresh.max_age = {self.max_age}: no table is younger than {LEAD} epochs when it is used: set "
                f"{LEAD} or more, or 0"
            )
        if self.index in (MIPS, FRESH) and self.source == "table":
            raise ValueError(f"refresh.index = {self.index!r} is the trainer's own: set refresh.source = 'in-trainer'")
        if self.rebuild_steps >= self.every_steps:
            raise ValueError(
                f"refresh.rebuild_steps = {self.rebuild_steps} is not below refresh.every_steps = {self.every_steps}: "
                "the next index would be due before this one is used; lower refresh.rebuild_steps"
            )
        if self.source == "in-trainer" and self.by == "labels":
            raise ValueError(
                "refresh.by = 'labels' is for tables: the trainer's own index holds classifier vectors: leave it out"
            )
        return self
