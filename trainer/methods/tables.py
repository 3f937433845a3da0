"""Tables that are made beside the training and joined to its rows: their schedule, and what becomes of late ones."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.options import Options

LEAD = 2  # epochs between a dump and the first use of its table


class Tables(Options):
    """Schedule of tables (ASTRA's tau_s and tau_r), and the policy for late ones."""

    start: int = Field(5, ge=LEAD, description="tau_s: the first epoch with a table; two epochs after its dump")
    every: int = Field(5, ge=1, description="tau_r: epochs between tables")
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

    @model_validator(mode="after")
    def _check(self) -> Any:
        if 0 < self.max_age < LEAD:
            raise ValueError(
                f"refresh.max_age = {self.max_age}: no table is younger than {LEAD} epochs when it is used: set "
                f"{LEAD} or more, or 0"
            )
        return self
