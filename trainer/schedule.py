"""What changes while a run goes on: learning rates, and how many near queries a cluster has."""

import math
from typing import NamedTuple

MOST_WEIGHT = 1000  # of a source in a mix: how often an epoch deals its rows, at most


def rate_factor(step: int, steps: int, warmup: float, final: float) -> float:
    """The share of the full rate at global `step` in [0, steps): linear warm-up, then cosine decay (ASTRA, section 5).

    It rises over the share `warmup` of the steps, and falls to `final`.
    """
    rising = max(1.0, warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    progress = (step - rising) / max(1.0, steps - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


class ClusterSchedule(NamedTuple):
    """Clusters of `first` rows in epoch 0, twice as many every `every` epochs (0: never); 1 deals single rows.

    Easy negatives first, then hard ones (NGAME, section 3, "Curriculum Learning").
    """

    first: int = 1
    every: int = 0

    def at(self, epoch: int, most: int) -> int:
        """Rows of a cluster in `epoch`: doubled as the schedule says, while twice as many divide `most`."""
        size = self.first
        for _ in range(epoch // self.every if self.every else 0):
            if most % (2 * size):
                break
            size *= 2
        return size


SINGLE_ROWS = ClusterSchedule()
