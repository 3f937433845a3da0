"""How far a run is, as its checkpoints say, and what an epoch did."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.budget import Budget
from trainer.refresh.adoption import Adoption


@dataclass
class Progress:
    """Where the loop is; saved with each checkpoint."""

    epoch: int = 0
    step: int = 0  # of the epoch, next to do
    global_step: int = 0
    loss_sum: float = 0.0  # over the epoch's steps so far
    best_metric: float | None = None
    best_step: int | None = None
    budget: Budget = field(default_factory=Budget)

    def state(self, timed: bool) -> dict[str, Any]:
        """As a checkpoint has it: with seconds only where they decide something, since no two runs have the same."""
        state = asdict(self)
        if not timed:
            del state["budget"]
        return state

    @staticmethod
    def of(state: Mapping[str, Any]) -> "Progress":
        """What `state` made of one."""
        return Progress(**{**state, "budget": Budget(**state.get("budget", {}))})


@dataclass(frozen=True)
class EpochReport:
    """What an epoch did, for whoever watches. `epochs`: of the run, as far as is known."""

    epoch: int
    epochs: int
    loss: float
    seconds: float
    rows: int
    adoption: Adoption
    metrics: dict[str, float]
