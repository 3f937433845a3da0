"""Clusters that grow while a run goes on (NGAME, section 3, "Curriculum Learning"): easy negatives first, then hard."""

from typing import NamedTuple


class Doubling(NamedTuple):
    """Clusters of `first` rows in epoch 0, twice as many every `every` epochs (0: never); 1 deals single rows."""

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


ROWS = Doubling()  # single rows
