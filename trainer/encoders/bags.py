"""Bags of a table's rows: their sums, and what gradients on the sums are on the rows, of several batches and ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from trainer.group import Group
from trainer.rows import RowMatrix
from trainer.scoring import sparse_product


@dataclass(frozen=True)
class BagInputs:
    """Distinct features `ids` [U], and the sparse [B, U] matrix (`column`, `weight`, `offsets`) of a batch.

    `first`: rows of the whole batch that come before these.
    """

    ids: np.ndarray
    column: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    first: int = 0

    @classmethod
    def of(cls, features: np.ndarray, weights: np.ndarray, offsets: np.ndarray, first: int = 0) -> "BagInputs":
        """Of a feature and its weight an entry [V], row by row: `offsets` [B + 1]."""
        ids, column = np.unique(features, return_inverse=True)
        return cls(ids, torch.from_numpy(column), torch.from_numpy(weights), torch.from_numpy(offsets), first)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Of weight * rows[column] over the entries of each row: rows [U, D] -> [B, D]."""
        return embedding_bag(
            self.column, rows, self.offsets, mode="sum", per_sample_weights=self.weight, include_last_offset=True
        )

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """What a gradient on the sums [B, D] is on the rows of `ids`, [U, D]."""
        row = torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.offsets.diff())
        return sparse_product(self.column, row, self.weight, len(self.ids), grad.contiguous())


class BagGradients:
    """Gradients on the rows of `table`, from those on the bags of any number of batches.

    Bags and their gradients are kept, and sent to other ranks, instead of the rows': a batch has many more features
    than rows. One batch of one rank costs nothing.
    """

    def __init__(self, table: RowMatrix) -> None:
        self._table = table
        self._waiting: list[tuple[BagInputs, torch.Tensor, torch.Tensor]] = []

    def add(self, inputs: BagInputs, rows: torch.Tensor, v: torch.Tensor) -> None:
        """`rows` that `RowMatrix.gather` gave, and their sums, the leaf v [B, D]: counts, once it has a gradient."""
        nothing = rows.new_empty(0, rows.shape[1])  # with several batches rows are gathered anew, and not kept
        self._waiting = [(before, nothing, leaf) for before, _, leaf in self._waiting]
        self._waiting.append((inputs, nothing if self._waiting else rows, v))

    def reduce(self, group: Group) -> None:
        """Take the bags of all ranks in the place of this one's: the same bits on every rank."""
        if group.ranks == 1:
            return
        features, weights, offsets, grad = self._together()
        counts = np.diff(offsets).astype(np.int32)
        # Ids fit in 32 bits wherever the table fits in memory.
        features, weights, counts = group.gather_arrays(features.astype(np.int32), weights, counts)
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        leaf = torch.empty(len(counts), self._table.shape[1])
        leaf.grad = group.gather(grad)
        inputs = BagInputs.of(features.astype(np.int64), weights, offsets)
        self._waiting = [(inputs, leaf.new_empty(0, leaf.shape[1]), leaf)] if len(counts) else []

    def take(self) -> tuple[np.ndarray, torch.Tensor] | None:
        """(ids, gathered rows with their gradient) for `RowMatrix.update`; None where nothing came back."""
        waiting = [(inputs, rows, v) for inputs, rows, v in self._waiting if v.grad is not None]
        if len(waiting) > 1:
            features, weights, offsets, grad = self._together()
            inputs, rows = BagInputs.of(features, weights, offsets), grad[:0]
        elif waiting:
            inputs, rows, v = waiting[0]
            assert v.grad is not None
            grad = v.grad
        self._waiting = []
        if not waiting:
            return None
        if len(rows) != len(inputs.ids):
            rows = self._table.gather(inputs.ids)
        rows.grad = inputs.gradient(grad)
        return inputs.ids, rows

    def _together(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
        """(features [V], weights [V], offsets [n + 1], gradients [n, D]) of all that has come back."""
        came = [(inputs, v.grad) for inputs, _, v in self._waiting if v.grad is not None]
        features = [inputs.ids[inputs.column.numpy()] for inputs, _ in came]
        weights = [inputs.weight.numpy() for inputs, _ in came]
        counts = [inputs.offsets.diff().numpy() for inputs, _ in came]
        return (
            np.concatenate([np.empty(0, np.int64), *features]),
            np.concatenate([np.empty(0, np.float32), *weights]),
            np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))]),
            torch.cat([torch.empty(0, self._table.shape[1]), *(grad for _, grad in came)]),
        )
