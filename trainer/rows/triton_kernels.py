"""Steps on rows of a matrix on a GPU, as Triton kernels: like `torch_kernels.py`, with each row read and written once.

Several programs never add to the same sum, so the same input gives the same bits in every run. A program handles either
one query, looping over its pairs, or a few labels. A label's pairs are summed in sequence, except for whole spans of
_SPAN pairs, which separate programs sum first: otherwise a label of every query would take as long as all other labels
together. Arithmetic is in float32; rows are loaded and stored as the bits of their dtype.

A program stores its changes after a barrier, which ensures that all its threads have loaded the old values. The barrier
is needed because several warps load the scalar of a row, and several threads load each number of a tile that is smaller
than a warp.
"""

import math

import torch
import triton
import triton.language as tl

from trainer.rows.codes import ADAGRAD, ADAM, FLOAT32, MOMENTUM, SGD, Matrix, Rule
from trainer.rows.torch_kernels import DevicePairs, ScoredPairs

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_TILE = 2048  # elements of a tile of pairs' rows: 16 registers per thread of four warps
_MOST_PAIRS = 32  # pairs of one label or query, at a time
_ROWS_TILE = 1024  # elements of a tile of rows' pairs, 4 per thread: as many rows are in flight as registers allow
_PAIRS_OF_ROWS = 2  # pairs of each row that a program sums at a time: most labels have one pair
_MOST_ROWS = 16  # rows that a program updates
POOL_TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}  # tile of scores
_SPAN = 32  # pairs that are summed first, if all belong to one label
_WIDE, _SPLITS = 512, 4  # from this width on, _SPLITS programs share a query: few of its pairs fit in a tile
_SGD, _MOMENTUM, _ADAGRAD, _ADAM = (tl.constexpr(method) for method in (SGD, MOMENTUM, ADAGRAD, ADAM))
_FLOAT32 = tl.constexpr(FLOAT32)


@triton.jit
def _widened(bits, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 values of `bits` in a dtype."""
    if DTYPE == _FLOAT32:
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def _noise(label, key, column, half):  # type: ignore[no-untyped-def]
    """Return 16 random bits per column, as uint32."""
    mixed = label.to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    first, stride = mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32) | 1
    place = tl.where(column < half, column, column - half).to(tl.uint32)
    word = first + place * stride
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    word = word ^ (word >> 16)
    return tl.where(column < half, word & 0xFFFF, word >> 16)


@triton.jit
def _narrowed(values, noise, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of float32 `values` rounded to a dtype by `noise`."""
    raw = values.to(tl.uint32, bitcast=True)
    if DTYPE == _FLOAT32:
        bits = raw.to(tl.int32, bitcast=True)
    else:
        bits = ((raw + noise) >> 16).to(tl.int16)
    return bits


@triton.jit
def _one_less(power):  # type: ignore[no-untyped-def]
    """Return 1 - exp(power) for power <= 0, accurately even near 0."""
    series = -power * (1.0 + power / 2.0 * (1.0 + power / 3.0 * (1.0 + power / 4.0)))
    return tl.where(power > -0.05, series, 1.0 - tl.exp(power))


@triton.jit
def score_kernel(  # type: ignore[no-untyped-def]
    x, vectors, ids, label, weight, margins, starts, loss, slopes, on_x, scale, D,
    HAS_MARGINS: tl.constexpr, DTYPE: tl.constexpr, SPLITS: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Score the pairs of a query in SPLITS programs: loss, slopes, and each program's part of the gradient on x."""
    query = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < D
    own = tl.load(x + query * D + column, mask=inside, other=0.0)
    start, stop = tl.load(starts + query), tl.load(starts + query + 1)
    if SPLITS > 1:
        share = tl.cdiv(stop - start, SPLITS)
        start += part * share
        stop = tl.minimum(stop, start + share)
    gradient = tl.zeros([WIDTH], tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    for low in range(start, stop, PAIRS):
        pair = low + tl.arange(0, PAIRS)
        is_pair = pair < stop
        row = tl.load(ids + tl.load(label + pair, mask=is_pair, other=0), mask=is_pair, other=0).to(tl.int64)
        pair_weight = tl.load(weight + pair, mask=is_pair, other=0.0)
        places = row[:, None] * D + column[None, :]
        both = (is_pair & (row >= 0))[:, None] & inside[None, :]
        w = _widened(tl.load(vectors + places, mask=both, other=0), DTYPE)
        score = tl.sum(w * own[None, :], 1)
        if HAS_MARGINS:
            score += tl.load(margins + pair, mask=is_pair, other=0.0)
        margin = tl.where(pair_weight > 0, score, -score)
        small = tl.exp(-tl.abs(margin))
        total += tl.abs(pair_weight) * (tl.where(margin > 0, margin, 0.0) + tl.log(1.0 + small))
        slope = scale * pair_weight * (tl.where(margin > 0, 1.0, small) / (1.0 + small))
        tl.store(slopes + pair, slope, mask=is_pair)
        gradient += tl.sum(slope[:, None] * w, 0)
    place = query + part.to(tl.int64) * tl.num_programs(0)
    tl.store(on_x + place * D + column, gradient, mask=inside)
    tl.store(loss + place, tl.sum(total, 0))


@triton.jit
def span_kernel(  # type: ignore[no-untyped-def]
    x, slopes, query, label, ids, order, sums, D,
    SPAN: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a span of SPAN pairs, ordered by label, if all pairs have one label; one program per span."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    low = tl.program_id(0) * SPAN
    first = tl.load(label + tl.load(order + low))
    last = tl.load(label + tl.load(order + low + SPAN - 1))
    has_one_label = (first == last) & (tl.load(ids + first) >= 0)
    inside = (column < D) & has_one_label
    g = tl.zeros([WIDTH], tl.float32)
    for at in range(low, tl.where(has_one_label, low + SPAN, low), PAIRS):
        pair = tl.load(order + at + tl.arange(0, PAIRS))
        slope, query_row = tl.load(slopes + pair), tl.load(query + pair).to(tl.int64)
        places = query_row[:, None] * D + column[None, :]
        g += tl.sum(slope[:, None] * tl.load(x + places, mask=inside[None, :], other=0.0), 0)
    tl.store(sums + number * D + column, g, mask=inside)


@triton.jit
def pool_kernel(  # type: ignore[no-untyped-def]
    scores, weight, out, loss, queries, labels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Compute the loss and the slopes of a tile of a shared pool's scores; slopes may overwrite the scores."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < queries)[:, None] & (column < labels)[None, :]
    place = row[:, None] * labels + column[None, :]
    score = tl.load(scores + place, mask=inside, other=-float("inf"))
    pair_weight = tl.load(weight + column, mask=column < labels, other=0.0)[None, :]
    small = tl.exp(-tl.abs(score))
    value = pair_weight * (tl.where(score > 0, score, 0.0) + tl.log(1.0 + small))
    slope = pair_weight * (tl.where(score > 0, 1.0, small) / (1.0 + small))
    tl.debug_barrier()
    tl.store(out + place, slope.to(out.dtype.element_ty), mask=inside)
    tl.store(loss + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(value, 1), 0))


@triton.jit(do_not_specialize=["origin", "rows", "count"])
def update_kernel(  # type: ignore[no-untyped-def]
    vectors, first, second, scalar, ids, dense, rows, x, slopes, query, order, starts, sums, count,
    origin, key, rate, keep, beta1, beta2, eps, log1, log2, D,
    HAS_PAIRS: tl.constexpr, METHOD: tl.constexpr, DTYPE: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of `dense` [rows, D] and of pairs, and update ROWS of the `count` rows, except padding."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    row = tl.load(ids + number, mask=number < count, other=-1).to(tl.int64)
    is_row = row >= 0
    inside = is_row[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    # Loaded before the loop over pairs, which takes time as well.
    bits = tl.load(vectors + place, mask=inside, other=0)
    if (METHOD == _ADAGRAD) | (METHOD == _ADAM):
        scalar_state = tl.load(scalar + row, mask=is_row, other=0.0)
    has_dense = inside & (number < rows)[:, None]
    g = tl.load(dense + number[:, None] * D + column[None, :], mask=has_dense, other=0.0)
    if HAS_PAIRS:
        start = tl.load(starts + number, mask=is_row, other=0)
        stop = tl.load(starts + number + 1, mask=is_row, other=0)
        first_span = tl.cdiv(start, SPAN)
        spans = tl.maximum(stop // SPAN - first_span, 0)
        before = tl.where(spans > 0, first_span * SPAN - start, stop - start)
        single = stop - start - spans * SPAN
        for low in range(0, tl.max(single, 0), PAIRS):
            k = low + tl.arange(0, PAIRS)[None, :]
            is_pair = k < single[:, None]
            rank = start[:, None] + k + tl.where(k < before[:, None], 0, spans[:, None] * SPAN)
            pair = tl.load(order + rank, mask=is_pair, other=0)
            slope = tl.load(slopes + pair, mask=is_pair, other=0.0)
            query_row = tl.load(query + pair, mask=is_pair, other=0).to(tl.int64)
            both = is_pair[:, :, None] & inside[:, None, :]
            own = tl.load(x + query_row[:, :, None] * D + column[None, None, :], mask=both, other=0.0)
            g += tl.sum(slope[:, :, None] * own, 1)
        for low in range(0, tl.max(spans, 0), PAIRS):
            k = low + tl.arange(0, PAIRS)[None, :]
            both = (k < spans[:, None])[:, :, None] & inside[:, None, :]
            span = (first_span[:, None] + k).to(tl.int64)
            g += tl.sum(tl.load(sums + span[:, :, None] * D + column[None, None, :], mask=both, other=0.0), 1)
    rate = tl.load(rate)
    w = _widened(bits, DTYPE) * tl.load(keep)
    if METHOD == _SGD:
        w -= rate * g
    elif METHOD == _MOMENTUM:
        first_moment = beta1 * tl.load(first + place, mask=inside, other=0.0) + g
        w -= rate * first_moment
    elif METHOD == _ADAGRAD:
        scalar_state += tl.sum(g * g, 1) / D
        w -= (rate / (tl.sqrt(scalar_state) + eps))[:, None] * g
    else:
        scalar_state += 1.0
        first_moment = tl.load(first + place, mask=inside, other=0.0)
        first_moment += (1.0 - beta1) * (g - first_moment)
        second_moment = beta2 * tl.load(second + place, mask=inside, other=0.0) + (1.0 - beta2) * g * g
        correction1, correction2 = _one_less(scalar_state * log1)[:, None], _one_less(scalar_state * log2)[:, None]
        w -= rate * (first_moment / correction1) / (tl.sqrt(second_moment / correction2) + eps)
    noise = _noise((row + origin)[:, None], tl.load(key), column[None, :], (D + 1) // 2)
    tl.debug_barrier()
    if (METHOD == _MOMENTUM) | (METHOD == _ADAM):
        tl.store(first + place, first_moment, mask=inside)
    if METHOD == _ADAM:
        tl.store(second + place, second_moment, mask=inside)
    if (METHOD == _ADAGRAD) | (METHOD == _ADAM):
        tl.store(scalar + row, scalar_state, mask=is_row)
    tl.store(vectors + place, _narrowed(w, noise, DTYPE), mask=inside)


def score_pairs(
    x: torch.Tensor, matrix: Matrix, ids: torch.Tensor, pairs: DevicePairs, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as `torch_kernels.score_pairs`."""
    shape = score_tiles(x.shape[1])
    splits = shape["SPLITS"]
    loss, slopes = x.new_empty(splits, len(x)), x.new_empty(len(pairs.label))
    on_x = x.new_empty(splits, *x.shape)
    if len(x):
        score_kernel[len(x), splits](
            x, bits_of(matrix.vectors), ids, pairs.label, pairs.weight,
            pairs.weight if pairs.margin is None else pairs.margin, pairs.query_starts, loss, slopes, on_x,
            scale, x.shape[1], HAS_MARGINS=pairs.margin is not None, DTYPE=matrix.dtype_code, **shape,
        )  # fmt: skip
    return (loss.sum(0), slopes, on_x.sum(0)) if splits > 1 else (loss[0], slopes, on_x[0])


def differentiate_pool(
    scores: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `torch_kernels.differentiate_pool`, in one pass over the scores."""
    queries, labels = scores.shape
    out = scores if dtype == scores.dtype else torch.empty_like(scores, dtype=dtype)
    grid = triton.cdiv(labels, POOL_TILE["COLUMNS"]), triton.cdiv(queries, POOL_TILE["ROWS"])
    loss = scores.new_empty(grid)
    pool_kernel[grid](scores, weight, out, loss, queries, labels, **POOL_TILE)
    return loss.sum(dtype=torch.float64), out


def update_rows(
    matrix: Matrix, rule: Rule, ids: torch.Tensor, gradient: torch.Tensor, scored: ScoredPairs | None = None
) -> None:
    """Do the same as `torch_kernels.update_rows`."""
    if not len(ids):
        return
    D = matrix.vectors.shape[1]
    unused = gradient  # a pointer that is never read
    pairs, slopes, x = scored or (None, unused, unused)
    sums = unused if pairs is None else _sum_spans(x, slopes, pairs, ids)
    rate, keep = torch.as_tensor(rule.rate), torch.as_tensor(rule.keep)
    key = rate if matrix.dtype_code == FLOAT32 else torch.as_tensor(rule.key)  # float32 needs no random bits
    numbers = [float(number) for number in (rule.beta1, rule.beta2, rule.eps)]
    numbers += [math.log(beta) if beta else -math.inf for beta in numbers[:2]]
    shape = row_tiles(D)
    update_kernel[triton.cdiv(len(ids), shape["ROWS"]),](
        bits_of(matrix.vectors),
        *(unused if state is None else state for state in (matrix.first, matrix.second, matrix.scalar)),
        ids, gradient, len(gradient),
        x, slopes, *((unused,) * 3 if pairs is None else (pairs.query, pairs.order, pairs.label_starts)),
        sums, len(ids), matrix.origin, key, rate, keep, *numbers, D,
        HAS_PAIRS=pairs is not None, METHOD=rule.method, DTYPE=matrix.dtype_code, SPAN=_SPAN, **shape,
    )  # fmt: skip


def _sum_spans(x: torch.Tensor, slopes: torch.Tensor, pairs: DevicePairs, ids: torch.Tensor) -> torch.Tensor:
    """Return the gradients [n // _SPAN, D] of spans of pairs; spans with several labels are skipped."""
    D, spans = x.shape[1], len(pairs.order) // _SPAN
    sums = x.new_empty(spans, D)
    if spans:
        span_kernel[spans,](x, slopes, pairs.query, pairs.label, ids, pairs.order, sums, D, SPAN=_SPAN, **span_tiles(D))
    return sums


def bits_of(vectors: torch.Tensor) -> torch.Tensor:
    """View vectors as integers of the same width."""
    return vectors.view(_BITS[vectors.dtype])


def score_tiles(dimension: int) -> dict[str, int]:
    """Return the number of programs per query, the shape of their tiles, and their number of warps."""
    return {"SPLITS": _SPLITS if dimension >= _WIDE else 1, **span_tiles(dimension)}


def span_tiles(dimension: int) -> dict[str, int]:
    """Return the shape of a tile of pairs with one label or one query, and the number of warps for its program."""
    width = triton.next_power_of_2(dimension)
    pairs = max(1, min(_MOST_PAIRS, _TILE // width))
    return {"PAIRS": pairs, "WIDTH": width, "num_warps": max(1, min(4, pairs * width // 256))}


def row_tiles(dimension: int) -> dict[str, int]:
    """Return the shape of a tile of a few rows with a few pairs each, and the number of warps for its program."""
    width = triton.next_power_of_2(dimension)
    pairs = max(1, min(_PAIRS_OF_ROWS, _ROWS_TILE // width))
    rows = max(1, min(_MOST_ROWS, _ROWS_TILE // (pairs * width)))
    warps = max(1, min(8, rows * pairs * width // 128))
    return {"ROWS": rows, "PAIRS": pairs, "WIDTH": width, "num_warps": warps}
