"""Progress of a run, detection of jumps of the loss, and reports of epochs."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.refresh.adoption import Adoption
from trainer.schedule import Budget

NEGATIVES = "negatives"  # the part of a checkpoint with the state of sources of negatives
_WINDOW = 100  # number of previous steps to compare a loss with
_JUMP = 3.0  # a loss has jumped if it exceeds this multiple of the largest previous loss
_IN_A_ROW = 3  # consecutive steps that must have jumped: a single step may have a row with hundreds of labels


@dataclass
class Progress:
    """Position of the training loop, saved with each checkpoint."""

    epoch: int = 0
    step: int = 0  # next step of the epoch
    global_step: int = 0
    loss_sum: float = 0.0  # over the epoch's steps so far
    best_metric: float | None = None
    best_step: int | None = None
    worse: int = 0  # validations since the best validation
    stopped: bool = False  # stopped early: no further epochs run
    budget: Budget = field(default_factory=Budget)

    def state(self, timed: bool, patient: bool = False) -> dict[str, Any]:
        """Return the state for a checkpoint.

        The state includes seconds, which differ between runs, only if `timed`. The state includes the number of
        validations since the best validation only if `patient`.
        """
        state = asdict(self)
        if not timed:
            del state["budget"]
        if not patient:
            del state["worse"], state["stopped"]
        return state

    def record_validation(self, metric: float, patience: int) -> None:
        """Record a validation; stop the run after `patience` (0: never) consecutive validations without a new best."""
        if self.best_metric is None or metric > self.best_metric:
            self.best_metric, self.best_step, self.worse = metric, self.global_step, 0
            return
        self.worse += 1
        self.stopped = bool(patience) and self.worse >= patience

    @staticmethod
    def of(state: Mapping[str, Any]) -> "Progress":
        """Restore the progress from a `state`."""
        return Progress(**{**state, "budget": Budget(**state.get("budget", {}))})


@dataclass(frozen=True)
class EpochReport:
    """Report of an epoch. `epochs`: number of epochs of the run, if known."""

    epoch: int
    epochs: int
    loss: float
    seconds: float
    rows: int
    adoption: Adoption
    metrics: dict[str, float]


class LossWatch:
    """Detects a loss far above the largest recent loss. The recent steps may include rows of different sources."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = 0  # number of consecutive losses that have jumped

    def jumped(self, loss: float) -> float | None:
        """Record the loss of a step; if it jumped and stayed high, return the earlier maximum and reset."""
        largest = max(self._losses) if len(self._losses) == _WINDOW else math.inf
        if loss <= _JUMP * largest:
            self._high = 0
            self._losses.append(loss)
            return None
        self._high += 1
        if self._high < _IN_A_ROW:
            return None
        self._losses.clear()
        self._high = 0
        return largest
