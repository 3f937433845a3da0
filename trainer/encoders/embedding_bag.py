"""Embedding bags: weighted sums of table rows, and gradients on the rows, for several batches and ranks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from schemas.ragged import SparseRows, offsets_of
from schemas.sizes import batch_by_size
from trainer.device import CPU
from trainer.group import ALONE, Group
from trainer.rows.matrix import RowMatrix
from trainer.rows.numba_kernels import by_row
from trainer.rows.torch_kernels import SPAN, sparse_product, split_rows, sum_entries
from trainer.stream.transfer import send

PIECE = 1 << 14  # number of bags that a rank sends at a time
_NO_BAGS = SparseRows(np.empty(0, np.int64), np.empty(0, np.float32), np.zeros(1, np.int64))


class ByFeature(NamedTuple):
    """Entries of bags, sorted by feature, for `sum_entries`: `bag` and `weight` [n], and `starts` [U + 1] of features.

    `pieces` splits the entries of features that occur in many bags.
    """

    bag: Any
    weight: Any
    starts: Any
    pieces: tuple[Any, Any] | None

    @classmethod
    def of(cls, column: np.ndarray, rows: SparseRows, features: int) -> "ByFeature":
        """Sort the entries of `rows` by feature number, `column` [n]; padding is assigned to bag 0 with weight 0."""
        bag, weight, starts = by_row(column, np.where(rows.values, rows.row_of(), 0), rows.values, features)
        most = np.diff(starts).max(initial=0)
        pieces = split_rows(torch.from_numpy(starts), len(column)) if most > SPAN else None
        return cls(bag, weight, starts, pieces)


@dataclass(frozen=True)
class BagInputs:
    """Distinct features `ids` [U], and the sparse [B, U] matrix (`column`, `weight`, `offsets`) of a batch.

    `bags`: the source rows. `dense`: the rows' vectors [B, d]. `kept` [B, D] bool: the elements of x that dropout
    keeps. On a CPU `places` equals `ids`, and `by_feature` is None. On a device `places` is a tensor, and the
    other tensors are on the device too.
    """

    ids: np.ndarray
    places: np.ndarray | torch.Tensor
    column: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    bags: SparseRows
    dense: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    by_feature: ByFeature | None = None

    @classmethod
    def of(
        cls,
        rows: SparseRows,
        device: torch.device = CPU,
        dense: np.ndarray | None = None,
        kept: torch.Tensor | None = None,
    ) -> "BagInputs":
        """Number the distinct features of B rows."""
        ids, column = np.unique(rows.ids, return_inverse=True)
        sorted_by = None if device == CPU else ByFeature.of(column, rows, len(ids))
        arrays = ids, column, rows.values, rows.offsets, dense, kept, sorted_by
        places, columns, weight, offsets, vectors, kept, sorted_by = send(arrays, device)
        places = ids if device == CPU else places
        return cls(ids, places, columns, weight, offsets, rows, vectors, kept, sorted_by)

    @classmethod
    def table_negatives(
        cls, rows: SparseRows, device: torch.device = CPU, dense: np.ndarray | None = None
    ) -> "BagInputs":
        """Use the feature ids of B rows unchanged; valid only for `sums` over the whole table, without gradients."""
        columns, weight, offsets, vectors = send((rows.ids, rows.values, rows.offsets, dense), device)
        return cls(rows.ids, rows.ids, columns, weight, offsets, rows, vectors)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum weight * rows[column] over the entries of each row: rows [U, D] -> [B, D]."""
        return embedding_bag(
            self.column, rows, self.offsets, mode="sum", per_sample_weights=self.weight, include_last_offset=True
        )

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient on the rows `ids`, [U, D], from the gradient on the sums [B, D]."""
        if self.by_feature is not None:
            return sum_entries(*self.by_feature[:3], grad.contiguous(), self.by_feature.pieces)
        row = torch.repeat_interleave(self.offsets.diff(), output_size=len(self.column))
        return sparse_product(self.column, row, self.weight, len(self.places), grad.contiguous())


@dataclass
class _PendingBags:
    """A batch and, once known, the gradient on its sums [B, D]; `rows`: gathered rows, only if there is one batch."""

    inputs: BagInputs
    rows: torch.Tensor
    grad: torch.Tensor | None = None

    def take_gradient(self, sums: torch.Tensor) -> None:
        """Store the gradient of the leaf `sums`, so that the leaf can be freed."""
        self.grad = sums.grad


class BagGradients:
    """Gradients on the rows of `table`, computed from the gradients on the bags of any number of batches.

    Ranks store and send bags and the gradients on bags, not gradients on rows, because a batch has many more features
    than bags. A single batch on a single rank is neither copied nor sent. More than PIECE bags are sent in pieces, one
    after another, so a rank holds only its own bags and one piece of every rank's bags in memory.
    """

    def __init__(self, table: RowMatrix) -> None:
        self._table = table
        self._pending: list[_PendingBags] = []
        self._summed: tuple[np.ndarray | torch.Tensor, torch.Tensor] | None = None

    def add(self, inputs: BagInputs, rows: torch.Tensor, sums: torch.Tensor) -> None:
        """Add a batch: `rows` from `RowMatrix.gather`, and the `sums`, a leaf [B, D] that later gets a gradient."""
        none = rows.new_empty(0, rows.shape[1])
        for batch in self._pending:
            batch.rows = none
        self._pending.append(_PendingBags(inputs, none if self._pending else rows))
        sums.register_post_accumulate_grad_hook(self._pending[-1].take_gradient)

    def reduce(self, group: Group) -> None:
        """Replace this rank's bags with the bags of all ranks; the result is bitwise the same on every rank."""
        if group.ranks > 1:
            self._sum_pieces(group)

    def take(self) -> tuple[np.ndarray | torch.Tensor, torch.Tensor] | None:
        """Return (ids, gathered rows with their gradient) for `RowMatrix.update`; None if there is no gradient."""
        batches = [(batch, batch.grad) for batch in self._pending if batch.grad is not None]
        if len(batches) > 1:
            self._sum_pieces(ALONE)
        summed, self._summed, self._pending = self._summed, None, []
        if summed is not None:
            places, gradient = summed
            rows = self._table.gather(places)
        elif batches:
            ((batch, grad),) = batches
            places, gradient = batch.inputs.places, batch.inputs.gradient(grad)
            rows = batch.rows if len(batch.rows) == len(batch.inputs.places) else self._table.gather(places)
        else:
            return None
        rows.grad = gradient
        return places, rows

    def _sum_pieces(self, group: Group) -> None:
        """Sum the gradients on rows over all ranks, piece by piece."""
        batches = (batch for batch in self._pending if batch.grad is not None)
        pieces = list(batch_by_size(batches, lambda batch: batch.inputs.bags.rows, PIECE))
        inputs, grad, count = self._gather_piece(group, pieces, 0)
        if count > 1:
            own = [np.empty(0, np.int64), *(batch.inputs.ids for piece in pieces for batch in piece)]
            (gathered,) = group.all_gather_arrays(np.unique(np.concatenate(own)).astype(np.int32))
            ids = np.unique(gathered.astype(np.int64))
            total = grad.new_zeros(len(ids), grad.shape[1])
            for number in range(count):
                if number:
                    inputs, grad, _ = self._gather_piece(group, pieces, number)
                total.index_add_(0, send(np.searchsorted(ids, inputs.ids), total.device), inputs.gradient(grad))
            self._summed = ids, total
        elif len(grad):
            self._summed = inputs.places, inputs.gradient(grad)
        self._pending = []

    def _gather_piece(
        self, group: Group, pieces: list[list[_PendingBags]], number: int
    ) -> tuple[BagInputs, torch.Tensor, int]:
        """Return the bags and gradients of piece `number` of all ranks, and the largest number of pieces on a rank."""
        batches = pieces[number] if number < len(pieces) else []
        bags = SparseRows.join([_NO_BAGS, *(batch.inputs.bags for batch in batches)])
        none = torch.empty(0, self._table.shape[1], device=self._table.device)
        grad = torch.cat([none, *(batch.grad for batch in batches if batch.grad is not None)])
        # Ids fit in 32 bits if the table fits in memory.
        ids, weights, counts, numbers = group.all_gather_arrays(
            bags.ids.astype(np.int32),
            bags.values,
            np.diff(bags.offsets).astype(np.int32),
            np.array([len(pieces)], np.int32),
        )
        gathered = SparseRows(ids.astype(np.int64), weights, offsets_of(counts))
        inputs = BagInputs.of(gathered, self._table.device)
        return inputs, group.all_gather(grad), int(numbers.max())
