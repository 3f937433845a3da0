"""Classifier: one vector per label; a step gathers and updates only the rows of its candidates."""

from collections.abc import Sequence

import torch

from schemas.randomness import InitialWeights, Purpose
from trainer.device import CPU, torch_generator
from trainer.group import ALONE, Group, label_range
from trainer.heads.base import Head, HeadStep
from trainer.losses.base import Loss
from trainer.losses.binary import Merged, binary_cross_entropy, binary_step, merge_ahead
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.methods.sections import Classifier as ClassifierConfig
from trainer.rows.matrix import DTYPES, IN_MEMORY, HostMatrix, RowMatrix, RowOptimizer, zeros
from trainer.stream.batch import Candidates

_FILLED = 1 << 16  # number of labels with initial vectors drawn at a time


class Classifier(Head):
    """A vector w_l in R^D for each label l in [0, L), with an optional bias in the last column, where x contains a 1.

    Each rank of `group` has the labels [start, stop). `bounds` [G + 1] gives the ranges of all ranks; None means ranges
    of equal size. Row ids are relative to `start`. Raises InputError if the rows do not fit into `config.storage` or on
    the `device`.
    """

    def __init__(
        self,
        config: ClassifierConfig,
        labels: int,
        dimension: int,
        seed: int,
        loss: Loss = binary_cross_entropy,
        group: Group = ALONE,
        device: torch.device = CPU,
        bounds: Sequence[int] | None = None,
    ) -> None:
        self.labels = labels
        rank, ranks = group.rank, group.ranks
        self.start, self.stop = bounds[rank : rank + 2] if bounds else label_range(labels, rank, ranks)
        self.bias = config.bias
        self._lr, self._loss, self._group = config.lr, loss, group
        self._normalize, self._narrow = config.normalize, config.products == "bfloat16"
        shape = self.stop - self.start, dimension + int(config.bias)
        on_host = device != CPU and config.storage != IN_MEMORY
        weight = zeros(shape, DTYPES[config.dtype], config.storage, CPU if on_host else device)
        _initialise(weight, config, labels, self.start, seed)
        optimizer = RowOptimizer(config.optimizer, config.momentum, config.weight_decay)
        rows = RowMatrix(weight, optimizer, first=self.start, seed=seed, storage=config.storage)
        self.matrix = HostMatrix(rows, device) if on_host else rows

    @property
    def vectors(self) -> torch.Tensor:
        return self.matrix.weight

    def learn(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        total, on_x, scale = None, None, 1 / len(step.batch)
        for candidates in step.planner.chunks(step.batch, step.sampled):
            merged = merge_ahead(candidates, self.matrix.device)
            step.before_change(candidates, None if merged is None else merged[0])
            loss, gradient = self.descend(step.x, candidates, step.factor, step.number, scale, merged)
            total = loss if total is None else total + loss
            on_x = gradient if on_x is None else on_x.add_(gradient)
        if total is None or on_x is None:
            return step.x.new_zeros((), dtype=torch.float64), torch.zeros_like(step.x)
        return torch.as_tensor(total, dtype=torch.float64), on_x

    def descend(
        self,
        x: torch.Tensor,
        candidates: Candidates,
        factor: float,
        number: int = 0,
        scale: float = 1.0,
        merged: Merged | None = None,
    ) -> tuple[float | torch.Tensor, torch.Tensor]:
        """Update all rows of `candidates`; return `scale` times the loss of x [B, D], and the gradient on x.

        The method gathers rows, computes the loss and gradients, and updates the rows. Binary cross-entropy does all
        this in a single pass over the rows. `merged`: the result of `merge_ahead`, if the device has merged the
        candidates already.
        """
        lr = self._lr * factor
        value: float | torch.Tensor
        if self._loss.options == binary_cross_entropy.options:
            merged = merged or merge_ahead(candidates, self.matrix.device)
            value, on_x = binary_step(x, self.matrix, candidates, lr, number, scale, merged, self._narrow)
        else:
            assert candidates.drawn is None, "a device merges labels only for binary cross-entropy"
            ids = self.matrix.prepare(candidates.ids)
            leaf, w = x.detach().requires_grad_(), self.matrix.gather(ids)
            loss = self._loss(leaf, w, candidates, self._group) * scale
            loss.backward()
            self.matrix.update(ids, w, lr, number)
            assert leaf.grad is not None
            value, on_x = loss.detach().double(), leaf.grad
        if self._normalize:
            if merged is not None:
                assert isinstance(self.matrix, RowMatrix), "labels of rows on the host are merged on the host"
                self.matrix.normalize(merged[0])
            else:
                self.matrix.normalize(candidates.ids)
        return value, on_x

    def rows(self, optimizer: bool = True) -> dict[str, torch.Tensor]:
        return {"weight": self.matrix.weight, **(self.matrix.state if optimizer else {})}


def merges_on(device: torch.device, recipe: Recipe) -> bool:
    """Return whether `device` merges the labels of own pools; needs binary cross-entropy and rows on the device."""
    on_device = device != CPU and isinstance(recipe, ClassifierRecipe) and recipe.classifier.storage == IN_MEMORY
    return on_device and recipe.loss == binary_cross_entropy.options


def _initialise(weight: torch.Tensor, config: ClassifierConfig, labels: int, first: int, seed: int) -> None:
    """Fill `weight`, which is zero, with rows [first, ...) of the L random initial vectors, and with the initial bias.

    Random numbers are keyed by blocks of labels, so a rank draws only the blocks that contain its rows.
    """
    stop, drawn = first + len(weight), config.initial == "random" and config.initial_scale
    for block in range(first // _FILLED, -(-stop // _FILLED) if drawn else 0):
        start = block * _FILLED
        rows = torch.empty(min(_FILLED, labels - start), weight.shape[1])
        draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.CLASSIFIER, block)
        rows.normal_(0, config.initial_scale, generator=draw)
        if config.normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
        low, high = max(start, first), min(start + len(rows), stop)
        weight[low - first : high - first] = rows[low - start : high - start]
    if config.bias and config.initial_bias:
        weight[:, -1] = config.initial_bias
