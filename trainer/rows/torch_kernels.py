"""Steps on rows of a matrix on a device, in plain PyTorch: a reference and a substitute for the Triton kernels.

Candidates become `DevicePairs`; pairs are scored, and rows updated. The functions do the same as the compiled loops of
`numba_kernels.py` in main memory, with the same random bits for rounding. No value is read back, so the host never
waits: arrays are as long as the number of pairs, whatever the values. Sparse products, for any loss, come last.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding_bag, softplus

from schemas import PAD
from trainer.device import CPU
from trainer.rows.codes import ADAGRAD, BFLOAT16, FLOAT32, LOWBIAS, MOMENTUM, SGD, Matrix, Rule
from trainer.rows.numba_kernels import by_row

DTYPE_CODES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_LOW32 = 0xFFFFFFFF
# Factors and shifts of splitmix64 (Steele, Lea and Flood, 2014), in two's complement.
_GOLDEN, _F1, _F2 = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S1, _S2, _S3 = 30, 27, 31
SPAN = 128  # most entries of a sparse row that are summed in sequence
_PAIRS = 1 << 17  # pairs whose rows are gathered at a time

# Torch warns at first use that its sparse formats are in beta; tests compare the operations used here with dense
# products.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class DevicePairs(NamedTuple):
    """Pairs on a device, ascending by query: query q has pairs [query_starts[q], query_starts[q + 1]).

    `label` [n]: index into the step's ids [C]. `order` [n] sorts pairs by label: label number i has pairs
    order[label_starts[i] : label_starts[i + 1]]. `weight` [n] is negative for a positive label; its absolute value is
    the weight in the loss. `margin` [n], if there is any, is added to scores. Padding comes after all labels; its pairs
    have the weight 0.
    """

    query: torch.Tensor  # [n] int32
    label: torch.Tensor  # [n] int64
    weight: torch.Tensor  # [n] float32
    query_starts: torch.Tensor  # [B + 1] int32
    order: torch.Tensor  # [n] int64
    label_starts: torch.Tensor  # [C + 1] int32
    margin: torch.Tensor | None = None  # [n] float32


ScoredPairs = tuple[DevicePairs, torch.Tensor, torch.Tensor]  # pairs, their slopes [n], and x [B, D]


def order_pairs(candidates: Any, queries: int, labels: int) -> DevicePairs:
    """Return the pairs of `candidates` (on the device) by query and by label; B = `queries`, C = `labels`."""
    query, label = candidates.pair_query.to(torch.int32), candidates.pair_label.long()
    ordered, order = torch.sort(candidates.pair_label, stable=True)
    return DevicePairs(
        query=query,
        label=label,
        weight=torch.where(candidates.pair_positive, -candidates.pair_weight, candidates.pair_weight),
        query_starts=starts_of(query, queries),
        order=order,
        label_starts=starts_of(ordered, labels),
        margin=candidates.pair_margin if len(candidates.pair_margin) else None,
    )


def merge_labels(drawn: Any, hard: torch.Tensor | None = None) -> tuple[torch.Tensor, DevicePairs]:
    """Return the distinct labels of `drawn` (DrawnLabels on the device) and their pairs: ids [n], padded at the end.

    `hard` [B, H]: hard negatives to insert into `drawn`. The function works like `merge.merge`, but the n pairs stay n,
    so that no length has to be read back: a label that a query draws twice gives two pairs, and padding, or a draw of a
    label that the query already has, gives a pair with weight 0.
    """
    none = torch.iinfo(drawn.label.dtype).max  # padding is sorted after all labels
    label, weight, count = drawn.label, drawn.weight, len(drawn.label)
    if hard is not None:
        places = (drawn.hard_starts[:, None] + torch.arange(hard.shape[1], device=hard.device)).flatten()
        found = hard.flatten().to(label.dtype)
        label = label.scatter(0, places, torch.where(found < 0, none, found))
        weight = weight.scatter(0, places, (found >= 0).to(weight.dtype))
    ordered, order = label.new_full((count + 1,), PAD), torch.empty(count, dtype=torch.int64, device=label.device)
    torch.sort(label, stable=True, out=(ordered[:count], order))
    changes = torch.zeros(count, dtype=torch.bool, device=label.device)
    torch.ne(ordered[1:count], ordered[: count - 1], out=changes[1:])
    number = changes.cumsum(0)  # of the pair's label among distinct labels, in the order of `order`
    # Ascending by label, then query, then use: 2 q, or 2 q + 1 for a draw. If the first key of a label and a query is
    # not a draw, keys of draws differ from it, and the draws are dropped.
    key = torch.add(drawn.use.index_select(0, order), number, alpha=2 * (len(drawn.starts) - 1))
    dropped = key != key.index_select(0, torch.searchsorted(key, key & -2))
    numbers = torch.arange(count + 1, device=label.device)
    starts = torch.searchsorted(number, numbers, out_int32=True)
    ids = ordered.index_select(0, starts[:count])
    if hard is not None:
        ids = ids.masked_fill(ids == none, PAD)
    margin = None
    if any(drawn.margins):
        of_draws, of_hard = drawn.margins
        margin = torch.where(drawn.use & 1 == 1, of_draws, of_hard).masked_fill_(drawn.weight < 0, 0)
    return ids, DevicePairs(
        query=drawn.use >> 1,
        label=torch.empty_like(number).scatter_(0, order, number),
        weight=weight.masked_fill(torch.empty_like(dropped).scatter_(0, order, dropped), 0),
        query_starts=drawn.starts,
        order=order,
        label_starts=starts,
        margin=margin,
    )


def score_pairs(
    x: torch.Tensor, matrix: Matrix, ids: torch.Tensor, pairs: DevicePairs, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pairs' binary cross-entropy per query [B], and `scale` times: its slopes [n], the gradient on x."""
    query = pairs.query.long()
    w = matrix.vectors.index_select(0, ids.index_select(0, pairs.label).clamp(min=0)).float()
    score = (w * x.index_select(0, query)).sum(1)
    if pairs.margin is not None:
        score = score + pairs.margin
    margin = torch.where(pairs.weight > 0, score, -score)
    loss = x.new_zeros(len(x)).index_add_(0, query, pairs.weight.abs() * softplus(margin))
    slopes = scale * pairs.weight * torch.sigmoid(margin)
    return loss, slopes, torch.zeros_like(x).index_add_(0, query, slopes[:, None] * w)


def differentiate_pool(
    scores: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a pool of negatives with `scores` [B, R] and `weight` [R], and slopes [B, R] in `dtype`.

    A score of -inf (masked) adds nothing. The scores are overwritten.
    """
    loss = torch.dot(softplus(scores).sum(0), weight)
    return loss, scores.sigmoid_().mul_(weight).to(dtype)


def update_rows(
    matrix: Matrix, rule: Rule, ids: torch.Tensor, gradient: torch.Tensor, scored: ScoredPairs | None = None
) -> None:
    """Make one step on rows `ids` [C], distinct except for padding, with the `gradient` [R, D] of the first R rows.

    The gradient of `scored` pairs is added; without pairs, R is C. Padding comes last.
    """
    if not len(ids):
        return
    g, real = gradient, ids[:1] >= 0  # real: not all of the ids are padding
    if scored is not None:
        pairs, slopes, x = scored
        g = x.new_zeros(len(ids), x.shape[1])
        g[: len(gradient)] = gradient
        g.index_add_(0, pairs.label, slopes[:, None] * x.index_select(0, pairs.query.long()))
    # A pad repeats the work of the first row, so that the same values are written twice.
    g = torch.where((ids < 0)[:, None], g[:1], g)
    ids = torch.where(ids < 0, ids[:1], ids).clamp(min=0).long()
    places = _Places(ids, real)
    rows = places.read(matrix.vectors)
    w = _descend(matrix, rule, places, rows.float(), g)
    places.write(matrix.vectors, rows, narrow(w, ids + matrix.origin, rule.key, matrix.vectors.dtype))


class _Places(NamedTuple):
    """Rows `ids` [C] of vectors and of their state; if `real` [1] is false, what was there is written again."""

    ids: torch.Tensor
    real: torch.Tensor

    def read(self, state: torch.Tensor) -> torch.Tensor:
        return state.index_select(0, self.ids)

    def write(self, state: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        state.index_copy_(0, self.ids, torch.where(self.real, after, before))


def _descend(matrix: Matrix, rule: Rule, places: _Places, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return rows w [C, D] after an optimizer step with gradient g [C, D]; updates the optimizer's state."""
    rate, beta1, beta2, eps = torch.as_tensor(rule.rate), *map(float, (rule.beta1, rule.beta2, rule.eps))
    w = w * torch.as_tensor(rule.keep)
    if rule.method == SGD:
        return w - rate * g
    if rule.method == MOMENTUM:
        first = places.read(matrix.first)
        first_moment = beta1 * first + g
        places.write(matrix.first, first, first_moment)
        return w - rate * first_moment
    if rule.method == ADAGRAD:
        scalar = places.read(matrix.scalar)
        square = scalar + (g * g).sum(1) / g.shape[1]
        places.write(matrix.scalar, scalar, square)
        return w - (rate / (square.sqrt() + eps))[:, None] * g
    before = [places.read(state) for state in (matrix.scalar, matrix.first, matrix.second)]
    count, first, second = before
    count, first = count + 1, first + (1 - beta1) * (g - first)
    second = beta2 * second + (1 - beta2) * g * g
    for state, old, new in zip(
        (matrix.scalar, matrix.first, matrix.second), before, (count, first, second), strict=True
    ):
        places.write(state, old, new)
    correction1, correction2 = ((1 - beta ** count.double()).float()[:, None] for beta in (beta1, beta2))
    return w - rate * (first / correction1) / ((second / correction2).sqrt() + eps)


def narrow(values: torch.Tensor, labels: torch.Tensor, key: Any, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 [C, D] stochastically to `dtype`, with random bits of (key, label, column); float32 is unchanged.

    The bits and the rounding are the same as in `numba_kernels.py`.
    """
    if dtype == torch.float32:
        return values
    raw = values.contiguous().view(torch.int32).to(torch.int64) & _LOW32
    noise = _noise(labels, key, values.shape[1])
    return ((raw + noise & _LOW32) >> 16).to(torch.int16).view(dtype)


def _noise(labels: torch.Tensor, key: Any, columns: int) -> torch.Tensor:
    """Return 16 random bits for each element of [C, columns], as int64: a word serves column j and column j + half."""
    mixed = labels * _GOLDEN + key
    mixed = (mixed ^ _shifted(mixed, _S1)) * _F1
    mixed = (mixed ^ _shifted(mixed, _S2)) * _F2
    mixed = mixed ^ _shifted(mixed, _S3)
    first, stride = mixed & _LOW32, _shifted(mixed, 32) | 1
    half = (columns + 1) // 2
    word = first[:, None] + torch.arange(half, device=labels.device) * stride[:, None] & _LOW32
    for shift, factor in LOWBIAS:
        word = word ^ word >> shift
        word = word if factor is None else word * factor & _LOW32
    return torch.cat([word & 0xFFFF, word[:, : columns - half] >> 16], 1)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift 64-bit numbers right, filling with zeros from the left."""
    return bits >> by & (1 << 64 - by) - 1


def starts_of(ordered: torch.Tensor, count: int) -> torch.Tensor:
    """Return where each number in [0, `count`] starts in `ordered` [n], ascending: int32 [count + 1]."""
    numbers = torch.arange(count + 1, device=ordered.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, numbers, out_int32=True)


def pair_scores(x: torch.Tensor, w: torch.Tensor, query: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return x[query[i]] . w[label[i]] for each pair i, [n]; x [B, D], w [C, D], `query` [n] ascending.

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
    """Return A @ dense [rows, D], where A has entries `value` [n] at (`row`, `column`); repeated entries add up.

    `ascending`: the entries are sorted by row already.
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
    that sums a row's entries one after another and rows in parallel: pieces are summed first, then rows of pieces.
    """
    cuts, firsts = pieces or (starts, None)
    sums = embedding_bag(column, dense, cuts, mode="sum", per_sample_weights=value, include_last_offset=True)
    if firsts is None:
        return sums
    numbers = torch.arange(len(sums), device=sums.device)
    return embedding_bag(numbers, sums, firsts, mode="sum", include_last_offset=True)


def split_rows(starts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Split rows of entries, `count` in all, at every SPAN-th entry; None if there are too few to split.

    Returns the start of each piece [pieces + 1], and the first piece of each row [rows + 1], int64.
    """
    if count <= SPAN:
        return None
    numbers = torch.arange(len(starts), device=starts.device)
    cuts = torch.cat([starts, torch.arange(0, count, SPAN, device=starts.device)]).sort().values
    return cuts, numbers + (starts + (SPAN - 1)).div(SPAN, rounding_mode="floor")
