"""How many epochs a run has that is given minutes: decided before each from the seconds so far, and written down."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.config import Train


def epochs_that_fit(options: Train, spent: Sequence[float]) -> int:
    """Of the whole run, before the epoch that comes after `spent`, the seconds of each epoch so far.

    Those for which the minutes left have room at the pace of the last one, this one at least, `options.epochs` at most.
    """
    if not options.minutes or not spent:
        return options.epochs
    left = options.minutes * 60 - sum(spent)
    return min(options.epochs, len(spent) + max(1, round(left / max(spent[-1], 1e-9))))


@dataclass
class Budget:
    """`spent`: seconds of each epoch, of the current one so far. `plans`: [its first step, epochs], one an epoch."""

    spent: list[float] = field(default_factory=list)
    plans: list[list[int]] = field(default_factory=list)

    def begin(self, step: int, epochs: int) -> None:
        """An epoch begins at global `step` of a run that is to have `epochs`."""
        self.plans.append([step, epochs])
        self.spent.append(0.0)

    def spend(self, seconds: float) -> None:
        """So many of the current epoch, which a run from before there were budgets never began."""
        if not self.spent:
            self.spent.append(0.0)
        self.spent[-1] += seconds

    def epochs(self, step: int, most: int) -> int:
        """Epochs of the run as they were planned at global `step`; `most` before there was a plan."""
        found = bisect_right(self.plans, step, key=lambda plan: plan[0])
        return self.plans[max(0, found - 1)][1] if self.plans else most
