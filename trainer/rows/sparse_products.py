"""Scores of (query, label) pairs and their gradients, as sparse products without a matrix [pairs, D]."""

import warnings

import torch
from torch.nn.functional import embedding_bag

from trainer.device import CPU
from trainer.rows.numba_kernels import by_row
from trainer.rows.torch_kernels import starts_of

SPAN = 128  # entries of a row that are summed in sequence
_PAIRS = 1 << 17  # pairs whose rows are gathered at a time

# Torch warns at first use that its sparse formats are in beta; tests compare the operations used here with dense
# products.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def pair_scores(x: torch.Tensor, w: torch.Tensor, query: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return x[query_n] . w[label_n] for x [B, D], w [C, D] -> [n]; `query` ascending.

    Gradients do not flow through the result. `query` and `label` are both int32, or both int64.
    """
    if x.device != CPU:  # on a GPU sampled products wait for memory: gather both sides of some pairs at a time
        blocks = zip(query.split(_PAIRS), label.split(_PAIRS), strict=True)
        return torch.cat([(x.index_select(0, some) * w.index_select(0, others)).sum(1) for some, others in blocks])
    # The dense product sampled at the pairs reads rows in place; gathering both sides takes 20 times as long.
    starts, shape = starts_of(query, len(x)).to(label.dtype), (len(x), len(w))
    pairs = torch.sparse_csr_tensor(starts, label, x.new_zeros(len(query)), shape, check_invariants=False)
    return torch.sparse.sampled_addmm(pairs, x, w.T, beta=0.0).values()


def sparse_product(
    row: torch.Tensor,
    column: torch.Tensor,
    value: torch.Tensor,
    rows: int,
    dense: torch.Tensor,
    ascending: bool = False,
) -> torch.Tensor:
    """Return A @ dense [rows, D], where A has `value` at (row, column); repeated entries add up.

    Rows may come in any order, unless `ascending` is set.
    """
    if row.device != CPU:
        # A stable sort keeps the order of a row's entries, and so the exact bits of their sum.
        row, order = (row, None) if ascending else row.sort(stable=True)
        column, value = (column, value) if order is None else (column[order], value[order])
        starts = starts_of(row, rows).long()
        return sum_entries(column.long(), value, starts, dense, split_rows(starts, len(column)))
    if ascending:
        starts = starts_of(row, rows).to(column.dtype)
    else:
        # A counting sort takes a tenth of the time of torch's sort.
        sorted_by_row = by_row(row.numpy(), column.numpy(), value.numpy(), rows)
        column, value, starts = map(torch.from_numpy, sorted_by_row)
        starts = starts.to(column.dtype)
    return sum_entries(column, value, starts, dense)


def sum_entries(
    column: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    dense: torch.Tensor,
    pieces: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the sums [rows, D] of value * dense[column] over entries [starts[i], starts[i + 1]) of each row i.

    The order of summation is fixed, so every run gives the same bits. `pieces`: result of `split_rows`, for a device
    that sums a row's entries one after another and rows in parallel.
    """
    cuts, firsts = pieces or (starts, None)
    sums = embedding_bag(column, dense, cuts, mode="sum", per_sample_weights=value, include_last_offset=True)
    if firsts is None:
        return sums
    numbers = torch.arange(len(sums), device=sums.device)
    return embedding_bag(numbers, sums, firsts, mode="sum", include_last_offset=True)


def split_rows(starts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Split rows with `count` entries, [starts[i], starts[i + 1]), at every SPAN-th entry; None if nothing is split.

    Returns the start of each piece [pieces + 1], and the first piece of each row [rows + 1], int64.
    """
    if count <= SPAN:
        return None
    numbers = torch.arange(len(starts), device=starts.device)
    cuts = torch.cat([starts, torch.arange(0, count, SPAN, device=starts.device)]).sort().values
    return cuts, numbers + (starts + (SPAN - 1)).div(SPAN, rounding_mode="floor")
