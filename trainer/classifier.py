"""The classifier: one vector per label, gathered and updated by the rows that a step touches."""

import numpy as np
import torch

from trainer.config import Classifier as ClassifierConfig
from trainer.randomness import torch_generator
from trainer.rows import RowMatrix, RowOptimizer


class Classifier:
    """w_l in R^D for l in [0, L), with an optional bias as last column, which meets a constant 1 in x."""

    def __init__(self, config: ClassifierConfig, labels: int, dimension: int, seed: int) -> None:
        self.labels = labels
        self.bias = config.bias
        self._lr = config.lr
        weight = torch.zeros(labels, dimension + int(config.bias))
        if config.initial_scale:
            weight.normal_(0, config.initial_scale, generator=torch_generator(seed, "initial weights", 3))
        if config.bias:
            weight[:, -1] = config.initial_bias
        self.rows = RowMatrix(weight, RowOptimizer(config.optimizer, config.momentum, config.weight_decay))

    @property
    def vectors(self) -> torch.Tensor:
        """[L, D], or [L, D + 1] with the bias: what is dumped, indexed and searched."""
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
