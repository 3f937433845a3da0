"""Schedules of a run: learning rates, number of epochs in a given time, sizes of clusters."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_WEIGHT = 1000  # maximum number of times that an epoch repeats the rows of a source in a mix


def rate_factor(step: int, steps: int, warmup: float, final: float, decay: str = "cosine") -> float:
    """Return the learning rate at global `step` in [0, steps), as a fraction of the full rate.

    Linear warm-up over a fraction `warmup` of the steps, then cosine decay (ASTRA, section 5) or linear decay (DEXML,
    appendix B.2) to `final`.
    """
    rising = max(1.0, warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    progress = (step - rising) / max(1.0, steps - rising)
    left = 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return final + (1 - final) * left


def epochs_that_fit(minutes: float, most: int, seconds: Sequence[float]) -> int:
    """Return the number of epochs, at least one more and at most `most`, of a run of about `minutes` (0: `most`).

    Epochs that fit into the remaining time at the pace of the last of `seconds`, give or take a tenth of an epoch.
    """
    if not minutes or not seconds:
        return most
    left = minutes * 60 - sum(seconds)
    return min(most, len(seconds) + max(1, int(left / max(seconds[-1], 1e-9) + 0.1)))


@dataclass
class Budget:
    """Time budget of a run: `spent` seconds of each epoch so far, and `plans`, [first step, planned epochs] of each."""

    spent: list[float] = field(default_factory=list)
    plans: list[list[int]] = field(default_factory=list)

    def begin(self, step: int, epochs: int) -> None:
        """Begin an epoch at global `step` of a run with `epochs` planned."""
        self.plans.append([step, epochs])
        self.spent.append(0.0)

    def spend(self, seconds: float) -> None:
        """Add `seconds` to the current epoch. Checkpoints of a run without a time limit do not store `spent`."""
        if not self.spent:
            self.spent.append(0.0)
        self.spent[-1] += seconds

    def epochs(self, step: int, most: int) -> int:
        """Return the planned number of epochs at global `step`; `most` if there was no plan yet."""
        number = bisect_right(self.plans, step, key=lambda plan: plan[0])
        return self.plans[max(0, number - 1)][1] if self.plans else most


class ClusterSchedule(NamedTuple):
    """Clusters of `first` rows in epoch 0 (1: single rows); the size doubles every `every` epochs (0: never).

    Easy negatives come first, then hard negatives (NGAME, section 3, "Curriculum Learning").
    """

    first: int = 1
    every: int = 0

    def at(self, epoch: int, most: int) -> int:
        """Return the number of rows per cluster in `epoch`; the number doubles only while the result divides `most`."""
        size = self.first
        for _ in range(epoch // self.every if self.every else 0):
            if most % (2 * size):
                break
            size *= 2
        return size


SINGLE_ROWS = ClusterSchedule()
