"""Scores of (query, label) pairs and their gradients as sparse products: no [pairs, D] is ever materialised."""

import warnings

import torch

from trainer.device import CPU
from trainer.rows.kernels import by_row
from trainer.rows.on_device import starts_of

_PAIRS = 1 << 17  # whose rows are gathered at a time

# Torch calls its sparse formats beta at first use; the tests hold what is used of them here against dense products.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def pair_scores(x: torch.Tensor, w: torch.Tensor, query: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return x[query_n] . w[label_n] for x [B, D], w [C, D] -> [n]; `query` ascending.

    Gradients do not flow through it. `query` and `label` are both int32, or both int64.
    """
    if x.device != CPU:  # whose memory is fast, and sampled products wait for it: both sides of some pairs at a time
        blocks = zip(query.split(_PAIRS), label.split(_PAIRS), strict=True)
        return torch.cat([(x.index_select(0, some) * w.index_select(0, others)).sum(1) for some, others in blocks])
    # The dense product sampled at the pairs reads rows where they lie; gathering both sides takes 20 times as long.
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

    Rows come in any order, unless they are said to be `ascending`.
    """
    if row.device != CPU:
        # A stable sort keeps the order of a row's entries, and so the bits of their sum.
        row, order = (row, None) if ascending else row.sort(stable=True)
        column, value = (column, value) if order is None else (column[order], value[order])
        column, starts = column.long(), starts_of(row, rows).long()
    elif ascending:
        starts = starts_of(row, rows).to(column.dtype)
    else:
        # A counting sort: a tenth of the time of torch's.
        sorted_by_row = by_row(row.numpy(), column.numpy(), value.numpy(), rows)
        column, value, starts = map(torch.from_numpy, sorted_by_row)
        starts = starts.to(column.dtype)
    # A weighted sum of gathered rows per output row, in a fixed order: the same bits at every run.
    return torch.nn.functional.embedding_bag(
        column, dense, starts, mode="sum", per_sample_weights=value, include_last_offset=True
    )
