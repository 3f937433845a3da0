"""The classifier: one vector per label, gathered and updated by the rows that a step touches."""

from collections.abc import Callable

import numpy as np
import torch

from schemas.randomness import InitialWeights, Purpose
from trainer.config import Classifier as ClassifierConfig
from trainer.device import torch_generator
from trainer.losses.binary import binary_cross_entropy, binary_step
from trainer.rows.matrix import DTYPES, RowMatrix, RowOptimizer
from trainer.rows.memory import zeros
from trainer.stream.batch import Candidates

LossOf = Callable[[torch.Tensor, torch.Tensor, Candidates], torch.Tensor]  # x [B, D], w [C, D] and what they score

_FILLED = 1 << 16  # labels whose initial vectors are drawn at a time


class Classifier:
    """w_l in R^D for l in [0, L), with an optional bias as last column, which meets a constant 1 in x.

    A rank holds the labels [start, stop), `part`: ids given and rows are counted from start.
    Raises InputError where `config.storage` has no room.
    """

    def __init__(
        self, config: ClassifierConfig, labels: int, dimension: int, seed: int, part: tuple[int, int] | None = None
    ) -> None:
        self.labels = labels
        self.start, self.stop = part or (0, labels)
        self.bias = config.bias
        self._lr = config.lr
        weight = zeros((self.stop - self.start, dimension + int(config.bias)), DTYPES[config.dtype], config.storage)
        _initialise(weight, config, labels, self.start, seed)
        self.rows = RowMatrix(
            weight,
            RowOptimizer(config.optimizer, config.momentum, config.weight_decay),
            first=self.start,
            seed=seed,
            storage=config.storage,
        )

    @property
    def vectors(self) -> torch.Tensor:
        """[stop - start, D], or D + 1 with the bias, in `config.dtype`: what is dumped, indexed and searched."""
        return self.rows.weight

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, D] as the vectors meet it: with a last column of ones where there is a bias."""
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.bias else x

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Copies of the rows `ids` [C] as float32, without a gradient."""
        return self.rows.weight.index_select(0, torch.from_numpy(ids)).float().numpy()

    def gather(self, ids: np.ndarray) -> torch.Tensor:
        """Return rows `ids` [C] as a float32 leaf that takes a gradient."""
        return self.rows.gather(ids)

    def update(self, ids: np.ndarray, gathered: torch.Tensor, factor: float, step: int = 0) -> None:
        """One optimizer step on rows `ids` from the gradient on what `gather` gave; `factor` scales the rate."""
        self.rows.update(ids, gathered, self._lr * factor, step)

    def descend(
        self,
        x: torch.Tensor,
        candidates: Candidates,
        factor: float,
        step: int = 0,
        scale: float = 1.0,
        loss: LossOf = binary_cross_entropy,
    ) -> tuple[float, torch.Tensor]:
        """`scale` times the loss of x [B, D], its gradient on x, and the step of all rows it scores.

        Gather, loss, backward pass and update; binary cross-entropy does it in one pass over rows in main memory.
        """
        if self.rows.compiled and loss is binary_cross_entropy:
            return binary_step(x, self.rows, candidates, self._lr * factor, step, scale)
        leaf, w = x.detach().requires_grad_(), self.gather(candidates.ids)
        value = loss(leaf, w, candidates) * scale
        value.backward()
        self.update(candidates.ids, w, factor, step)
        assert leaf.grad is not None
        return float(value.detach()), leaf.grad


def _initialise(weight: torch.Tensor, config: ClassifierConfig, labels: int, first: int, seed: int) -> None:
    """Rows [first, ...) of L random vectors, and the bias's first value; zeros are there already.

    Random numbers are keyed by blocks of labels, so a rank draws only those that it has rows of.
    """
    stop, drawn = first + len(weight), config.initial == "random" and config.initial_scale
    for block in range(first // _FILLED, -(-stop // _FILLED) if drawn else 0):
        start = block * _FILLED
        rows = torch.empty(min(_FILLED, labels - start), weight.shape[1])
        draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.CLASSIFIER, block)
        rows.normal_(0, config.initial_scale, generator=draw)
        low, high = max(start, first), min(start + len(rows), stop)
        weight[low - first : high - first] = rows[low - start : high - start]
    if config.bias and config.initial_bias:
        weight[:, -1] = config.initial_bias
