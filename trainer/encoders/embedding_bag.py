"""Bags of a table's rows: their sums, and what gradients on the sums are on the rows, of several batches and ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from schemas.ragged import SparseRows, offsets_of
from trainer.group import Group
from trainer.rows.matrix import RowMatrix
from trainer.rows.sparse_products import sparse_product

PIECE = 1 << 14  # bags of a rank that are sent at a time


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
    def of(cls, rows: SparseRows, first: int = 0) -> "BagInputs":
        """Number the distinct features of B rows."""
        ids, column = np.unique(rows.ids, return_inverse=True)
        return cls(ids, torch.from_numpy(column), torch.from_numpy(rows.values), torch.from_numpy(rows.offsets), first)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Of weight * rows[column] over the entries of each row: rows [U, D] -> [B, D]."""
        return embedding_bag(
            self.column, rows, self.offsets, mode="sum", per_sample_weights=self.weight, include_last_offset=True
        )

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """What a gradient on the sums [B, D] is on the rows of `ids`, [U, D]."""
        row = torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.offsets.diff())
        return sparse_product(self.column, row, self.weight, len(self.ids), grad.contiguous())


@dataclass
class _Waiting:
    """A batch whose gradient is to come, or has: the leaf `v` [B, D] goes once it has one."""

    inputs: BagInputs
    rows: torch.Tensor
    v: torch.Tensor | None
    known: torch.Tensor | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """[B, D]; None where nothing has come back."""
        return self.known if self.v is None else self.v.grad

    def settle(self) -> None:
        """Let go of all but the bags and their gradient."""
        self.rows = self.rows.new_empty(0, self.rows.shape[1])  # with several batches rows are gathered anew
        if self.v is not None and self.v.grad is not None:
            self.known = self.v.grad
            self.v = None


class BagGradients:
    """Gradients on the rows of `table`, from those on the bags of any number of batches.

    Bags and their gradients are kept, and sent to other ranks, instead of the rows': a batch has many more features
    than rows. One batch of one rank costs nothing. Beyond PIECE bags they are sent, and become those of rows, a piece
    after the other, so that a rank has its own bags and one piece of all ranks' in memory.
    """

    def __init__(self, table: RowMatrix) -> None:
        self._table = table
        self._waiting: list[_Waiting] = []
        self._summed: _RowGradients | None = None

    def add(self, inputs: BagInputs, rows: torch.Tensor, v: torch.Tensor) -> None:
        """`rows` that `RowMatrix.gather` gave, and their sums, the leaf v [B, D]: counts, once it has a gradient."""
        for one in self._waiting:
            one.settle()
        self._waiting.append(_Waiting(inputs, rows.new_empty(0, rows.shape[1]) if self._waiting else rows, v))

    def reduce(self, group: Group) -> None:
        """Take the bags of all ranks in the place of this one's: the same bits on every rank."""
        if group.ranks == 1:
            return
        pieces = self._pieces()
        inputs, grad, most = self._of_all(group, pieces, 0)
        if most == 1:
            self._waiting = [_Waiting(inputs, grad[:0], None, grad)] if len(grad) else []
            return
        (ids,) = group.gather_arrays(_ids_of(self._waiting).astype(np.int32))
        self._summed = _RowGradients(np.unique(ids.astype(np.int64)), grad.shape[1])
        self._summed.add(inputs, grad)
        for number in range(1, most):
            self._summed.add(*self._of_all(group, pieces, number)[:2])
        self._waiting = []

    def take(self) -> tuple[np.ndarray, torch.Tensor] | None:
        """(ids, gathered rows with their gradient) for `RowMatrix.update`; None where nothing came back."""
        summed, self._summed = self._summed, None
        pieces = self._pieces()
        waiting, self._waiting = self._waiting, []
        if summed is None and len(pieces) > 1:
            summed = _RowGradients(_ids_of(waiting), self._table.shape[1])
            for piece in pieces:
                features, weights, counts, grad = self._together(piece)
                summed.add(BagInputs.of(SparseRows(features, weights, offsets_of(counts))), grad)
        if summed is not None:
            rows = self._table.gather(summed.ids)
            rows.grad = summed.total
            return summed.ids, rows
        (came,) = pieces
        if not came:
            return None
        if len(came) > 1:
            features, weights, counts, grad = self._together(came)
            inputs, rows = BagInputs.of(SparseRows(features, weights, offsets_of(counts))), grad[:0]
        else:
            inputs, rows, grad = came[0].inputs, came[0].rows, came[0].grad  # type: ignore[assignment]
        if len(rows) != len(inputs.ids):
            rows = self._table.gather(inputs.ids)
        rows.grad = inputs.gradient(grad)
        return inputs.ids, rows

    def _pieces(self) -> list[list[_Waiting]]:
        """What has come back, in pieces of some PIECE bags; one piece at least."""
        pieces: list[list[_Waiting]] = [[]]
        bags = 0
        for one in self._waiting:
            if one.grad is None:
                continue
            if bags >= PIECE:
                pieces.append([])
                bags = 0
            pieces[-1].append(one)
            bags += len(one.grad)
        return pieces

    def _of_all(self, group: Group, pieces: list[list[_Waiting]], number: int) -> tuple[BagInputs, torch.Tensor, int]:
        """The bags of one piece of every rank, their gradients, and how many pieces a rank has at most."""
        features, weights, counts, grad = self._together(pieces[number] if number < len(pieces) else [])
        # Ids fit in 32 bits wherever the table fits in memory.
        features, weights, counts, numbers = group.gather_arrays(
            features.astype(np.int32), weights, counts, np.array([len(pieces)], np.int32)
        )
        return (
            BagInputs.of(SparseRows(features.astype(np.int64), weights, offsets_of(counts))),
            group.gather(grad),
            int(numbers.max()),
        )

    def _together(self, came: list[_Waiting]) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
        """(features [V], weights [V], features of each bag [n] int32, gradients [n, D]), laid end to end."""
        features = [one.inputs.ids[one.inputs.column.numpy()] for one in came]
        weights = [one.inputs.weight.numpy() for one in came]
        counts = [one.inputs.offsets.diff().numpy().astype(np.int32) for one in came]
        return (
            np.concatenate([np.empty(0, np.int64), *features]),
            np.concatenate([np.empty(0, np.float32), *weights]),
            np.concatenate([np.empty(0, np.int32), *counts]),
            torch.cat([torch.empty(0, self._table.shape[1]), *(one.grad for one in came if one.grad is not None)]),
        )


class _RowGradients:
    """The gradients of the rows `ids` [U], summed piece by piece: `total` [U, D]."""

    def __init__(self, ids: np.ndarray, dimension: int) -> None:
        self.ids, self.total = ids, torch.zeros(len(ids), dimension)

    def add(self, inputs: BagInputs, grad: torch.Tensor) -> None:
        place = torch.from_numpy(np.searchsorted(self.ids, inputs.ids))
        self.total.index_add_(0, place, inputs.gradient(grad))


def _ids_of(waiting: list[_Waiting]) -> np.ndarray:
    """The distinct features of all that has come back, ascending."""
    every = [one.inputs.ids for one in waiting if one.grad is not None]
    return np.unique(np.concatenate([np.empty(0, np.int64), *every]))
