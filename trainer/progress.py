"""Progress of a run, as its checkpoints keep it, and reports of its epochs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.refresh.adoption import Adoption
from trainer.schedule import Budget


@dataclass
class Progress:
    """Position of the loop; saved with each checkpoint."""

    epoch: int = 0
    step: int = 0  # of the epoch, next to do
    global_step: int = 0
    loss_sum: float = 0.0  # over the epoch's steps so far
    best_metric: float | None = None
    best_step: int | None = None
    budget: Budget = field(default_factory=Budget)

    def state(self, timed: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps: seconds only where they decide something, since no two runs have the same."""
        state = asdict(self)
        if not timed:
            del state["budget"]
        return state

    @staticmethod
    def of(state: Mapping[str, Any]) -> "Progress":
        """Read a `state`."""
        return Progress(**{**state, "budget": Budget(**state.get("budget", {}))})


@dataclass(frozen=True)
class EpochReport:
    """Report of an epoch. `epochs`: of the run, as far as is known."""

    epoch: int
    epochs: int
    loss: float
    seconds: float
    rows: int
    adoption: Adoption
    metrics: dict[str, float]
