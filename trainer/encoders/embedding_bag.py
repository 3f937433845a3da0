"""Bags of a table's rows: their sums, and gradients on the rows, of several batches and ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from schemas.ragged import SparseRows, offsets_of
from trainer.device import CPU
from trainer.group import Group
from trainer.rows.matrix import RowMatrix
from trainer.rows.sparse_products import sparse_product
from trainer.stream.transfer import send

PIECE = 1 << 14  # bags of a rank that are sent at a time
_NO_BAGS = SparseRows(np.empty(0, np.int64), np.empty(0, np.float32), np.zeros(1, np.int64))


@dataclass(frozen=True)
class BagInputs:
    """Distinct features `ids` [U], and the sparse [B, U] matrix (`column`, `weight`, `offsets`) of a batch.

    `first`: rows of the whole batch that come before these. `bags`: the rows they were made of. On a CPU `places` are
    `ids`, elsewhere a tensor; the tensors are on the device.
    """

    ids: np.ndarray
    places: np.ndarray | torch.Tensor
    column: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    bags: SparseRows
    first: int = 0

    @classmethod
    def of(cls, rows: SparseRows, first: int = 0, device: torch.device = CPU) -> "BagInputs":
        """Number the distinct features of B rows."""
        ids, column = np.unique(rows.ids, return_inverse=True)
        places, columns, weight, offsets = send((ids, column, rows.values, rows.offsets), device)
        return cls(ids, ids if device == CPU else places, columns, weight, offsets, rows, first)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum weight * rows[column] over the entries of each row: rows [U, D] -> [B, D]."""
        return embedding_bag(
            self.column, rows, self.offsets, mode="sum", per_sample_weights=self.weight, include_last_offset=True
        )

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient on the rows of `ids`, [U, D], of one on the sums [B, D]."""
        row = torch.repeat_interleave(self.offsets.diff(), output_size=len(self.column))
        return sparse_product(self.column, row, self.weight, len(self.ids), grad.contiguous())


@dataclass
class _PendingBags:
    """A batch with the gradient on its sums, once there is one: the leaf `sums` [B, D] is dropped then."""

    inputs: BagInputs
    rows: torch.Tensor
    sums: torch.Tensor | None
    released_grad: torch.Tensor | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient on the sums [B, D]; None before it is computed."""
        return self.released_grad if self.sums is None else self.sums.grad

    def release(self) -> None:
        """Free all but the bags and their gradient."""
        self.rows = self.rows.new_empty(0, self.rows.shape[1])  # with several batches rows are gathered anew
        if self.sums is not None and self.sums.grad is not None:
            self.released_grad = self.sums.grad
            self.sums = None


class BagGradients:
    """Gradients on the rows of `table`, from those on the bags of any number of batches.

    Bags and their gradients are kept, and sent to other ranks, instead of the rows': a batch has many more features
    than rows. One batch of one rank costs nothing. Beyond PIECE bags they are sent, and become those of rows, a piece
    after the other, so that a rank has its own bags and one piece of all ranks' in memory.
    """

    def __init__(self, table: RowMatrix) -> None:
        self._table = table
        self._pending: list[_PendingBags] = []
        self._summed: _RowGradients | None = None

    def add(self, inputs: BagInputs, rows: torch.Tensor, sums: torch.Tensor) -> None:
        """Keep `rows` of `RowMatrix.gather`, and their sums, a leaf [B, D]: it counts once it has a gradient."""
        for batch in self._pending:
            batch.release()
        self._pending.append(_PendingBags(inputs, rows.new_empty(0, rows.shape[1]) if self._pending else rows, sums))

    def reduce(self, group: Group) -> None:
        """Replace this rank's bags by those of all ranks: the same bits on every rank."""
        if group.ranks == 1:
            return
        pieces = self._pieces()
        inputs, grad, count = self._gather_piece(group, pieces, 0)
        if count == 1:
            self._pending = [_PendingBags(inputs, grad[:0], None, grad)] if len(grad) else []
            return
        (ids,) = group.gather_arrays(_distinct_ids(self._pending).astype(np.int32))
        self._summed = _RowGradients(np.unique(ids.astype(np.int64)), grad)
        self._summed.add(inputs, grad)
        for number in range(1, count):
            self._summed.add(*self._gather_piece(group, pieces, number)[:2])
        self._pending = []

    def take(self) -> tuple[np.ndarray | torch.Tensor, torch.Tensor] | None:
        """Return (ids, gathered rows with their gradient) for `RowMatrix.update`; None without any gradient."""
        summed, self._summed = self._summed, None
        pieces = self._pieces()
        pending, self._pending = self._pending, []
        if summed is None and len(pieces) > 1:
            summed = _RowGradients(_distinct_ids(pending), self._concatenate([])[1])
            for piece in pieces:
                bags, grad = self._concatenate(piece)
                summed.add(BagInputs.of(bags, 0, self._table.device), grad)
        if summed is not None:
            rows = self._table.gather(summed.ids)
            rows.grad = summed.total
            return summed.ids, rows
        (batches,) = pieces
        if not batches:
            return None
        if len(batches) > 1:
            bags, grad = self._concatenate(batches)
            inputs, rows = BagInputs.of(bags, 0, self._table.device), grad[:0]
        else:
            inputs, rows, grad = batches[0].inputs, batches[0].rows, batches[0].grad  # type: ignore[assignment]
        if len(rows) != len(inputs.ids):
            rows = self._table.gather(inputs.places)
        rows.grad = inputs.gradient(grad)
        return inputs.places, rows

    def _pieces(self) -> list[list[_PendingBags]]:
        """Return the batches with gradients in pieces of some PIECE bags; one piece at least."""
        pieces: list[list[_PendingBags]] = [[]]
        bags = 0
        for batch in self._pending:
            if batch.grad is None:
                continue
            if bags >= PIECE:
                pieces.append([])
                bags = 0
            pieces[-1].append(batch)
            bags += len(batch.grad)
        return pieces

    def _gather_piece(
        self, group: Group, pieces: list[list[_PendingBags]], number: int
    ) -> tuple[BagInputs, torch.Tensor, int]:
        """Return the bags of one piece of every rank, their gradients, and the greatest number of pieces of a rank."""
        bags, grad = self._concatenate(pieces[number] if number < len(pieces) else [])
        # Ids fit in 32 bits wherever the table fits in memory.
        ids, weights, counts, numbers = group.gather_arrays(
            bags.ids.astype(np.int32),
            bags.values,
            np.diff(bags.offsets).astype(np.int32),
            np.array([len(pieces)], np.int32),
        )
        gathered = SparseRows(ids.astype(np.int64), weights, offsets_of(counts))
        inputs = BagInputs.of(gathered, 0, self._table.device)
        return inputs, group.gather(grad), int(numbers.max())

    def _concatenate(self, batches: list[_PendingBags]) -> tuple[SparseRows, torch.Tensor]:
        """Return the bags [n] of `batches`, and their gradients [n, D]."""
        grads = [batch.grad for batch in batches if batch.grad is not None]
        bags = SparseRows.join([_NO_BAGS, *(batch.inputs.bags for batch in batches)])
        return bags, torch.cat([torch.empty(0, self._table.shape[1], device=self._table.device), *grads])


class _RowGradients:
    """The gradients of the rows `ids` [U], summed piece by piece: `total` [U, D]."""

    def __init__(self, ids: np.ndarray, like: torch.Tensor) -> None:
        self.ids, self.total = ids, like.new_zeros(len(ids), like.shape[1])

    def add(self, inputs: BagInputs, grad: torch.Tensor) -> None:
        position = send(np.searchsorted(self.ids, inputs.ids), self.total.device)
        self.total.index_add_(0, position, inputs.gradient(grad))


def _distinct_ids(batches: list[_PendingBags]) -> np.ndarray:
    """Return the distinct features of all batches with gradients, ascending."""
    ids = [batch.inputs.ids for batch in batches if batch.grad is not None]
    return np.unique(np.concatenate([np.empty(0, np.int64), *ids]))
