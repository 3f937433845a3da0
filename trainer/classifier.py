"""The classifier: one vector per label, gathered and updated by the rows that a step touches."""

import numpy as np
import torch

from trainer.config import Classifier as ClassifierConfig
from trainer.randomness import torch_generator
from trainer.rows import RowMatrix, RowOptimizer

_FILLED = 1 << 16  # labels whose initial vectors are drawn at a time


class Classifier:
    """w_l in R^D for l in [0, L), with an optional bias as last column, which meets a constant 1 in x.

    A rank holds the labels [start, stop), `part`: ids given and rows are counted from start.
    """

    def __init__(
        self, config: ClassifierConfig, labels: int, dimension: int, seed: int, part: tuple[int, int] | None = None
    ) -> None:
        self.labels = labels
        self.start, self.stop = part or (0, labels)
        self.bias = config.bias
        self._lr = config.lr
        weight = torch.zeros(self.stop - self.start, dimension + int(config.bias))
        _initialise(weight, config, labels, self.start, seed)
        self.rows = RowMatrix(weight, RowOptimizer(config.optimizer, config.momentum, config.weight_decay))

    @property
    def vectors(self) -> torch.Tensor:
        """[stop - start, D], or D + 1 with the bias: what is dumped, indexed and searched."""
        return self.rows.weight

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, D] as the vectors meet it: with a last column of ones where there is a bias."""
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.bias else x

    def gather(self, ids: np.ndarray) -> torch.Tensor:
        """Rows `ids` [C] as a leaf that takes a gradient."""
        return self.rows.gather(ids)

    def update(self, ids: np.ndarray, gathered: torch.Tensor, factor: float) -> None:
        """One optimizer step on rows `ids` from the gradient on what `gather` gave; `factor` scales the rate."""
        self.rows.update(ids, gathered, self._lr * factor)


def _initialise(weight: torch.Tensor, config: ClassifierConfig, labels: int, first: int, seed: int) -> None:
    """Rows [first, ...) of L random vectors, and the bias's first value; zeros are there already.

    Random numbers are keyed by blocks of labels, so a rank draws only those that it has rows of.
    """
    stop = first + len(weight)
    for block in range(first // _FILLED, -(-stop // _FILLED) if config.initial_scale else 0):
        start = block * _FILLED
        rows = torch.empty(min(_FILLED, labels - start), weight.shape[1])
        rows.normal_(0, config.initial_scale, generator=torch_generator(seed, "initial weights", 3, block))
        low, high = max(start, first), min(start + len(rows), stop)
        weight[low - first : high - first] = rows[low - start : high - start]
    if config.bias:
        weight[:, -1] = config.initial_bias
