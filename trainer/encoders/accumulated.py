"""Gradients on a table's rows, gathered by several backward passes and applied in one update."""

import numpy as np
import torch

from trainer.group import Group
from trainer.rows import RowMatrix


class RowGradients:
    """Sums the gradients on rows that were gathered one batch after the other.

    One batch an update costs nothing. With more, the sums are kept in a table as large as the rows' own, so that memory
    does not grow with the number of batches.
    """

    def __init__(self, table: RowMatrix) -> None:
        self._table = table
        self._waiting: list[tuple[np.ndarray, torch.Tensor]] = []
        self._sum: torch.Tensor | None = None
        self._touched: np.ndarray | None = None

    def add(self, ids: np.ndarray, gathered: torch.Tensor) -> None:
        """Rows `ids` [U] (unique) and what `RowMatrix.gather` gave for them: its gradient counts, once it has one."""
        self._settle()
        self._waiting.append((ids, gathered))

    def reduce(self, group: Group) -> None:
        """Sum over ranks, each with rows of its own: the same bits on every rank."""
        if group.ranks == 1:
            return
        ids, rows = self.take() or (np.empty(0, np.int64), torch.empty(0, self._table.shape[1]))
        gradients = rows.grad if rows.grad is not None else rows
        lengths = group.gather(torch.tensor([len(ids)]), [1] * group.ranks).tolist()
        everything = group.gather(torch.from_numpy(ids), lengths)
        for own, part in zip(everything.split(lengths), group.gather(gradients, lengths).split(lengths), strict=True):
            if len(own):
                self._add(own.numpy(), part)

    def take(self) -> tuple[np.ndarray, torch.Tensor] | None:
        """(ids, gathered rows with their gradient) for `RowMatrix.update`; None where nothing came back."""
        waiting = [(ids, rows) for ids, rows in self._waiting if rows.grad is not None]
        if self._touched is None and len(waiting) <= 1:
            self._waiting = []
            return waiting[0] if waiting else None
        self._settle()
        self._waiting = []
        assert self._sum is not None
        assert self._touched is not None
        ids = np.flatnonzero(self._touched)
        self._touched = None
        rows = self._table.gather(ids)
        at = torch.from_numpy(ids)
        rows.grad = self._sum[at]
        self._sum[at] = 0
        return ids, rows

    def _settle(self) -> None:
        """Add up the gradients that have come."""
        still = []
        for ids, rows in self._waiting:
            if rows.grad is None:
                still.append((ids, rows))
                continue
            self._add(ids, rows.grad)
        self._waiting = still

    def _add(self, ids: np.ndarray, gradient: torch.Tensor) -> None:
        if self._sum is None:
            self._sum = torch.zeros(self._table.shape)
        if self._touched is None:
            self._touched = np.zeros(len(self._sum), bool)
        self._sum.index_add_(0, torch.from_numpy(ids), gradient)
        self._touched[ids] = True
