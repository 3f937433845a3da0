"""Steps on rows of a matrix on a GPU, as Triton kernels: what `on_device.py` does, each row read and written once.

No sum is made by several programs at once, so that the same input gives the same bits at every run. One program has a
query and goes over its pairs; another has a label. Arithmetic is in float32; rows are loaded and stored as the bits of
their dtype.
"""

import math

import torch
import triton
import triton.language as tl

from trainer.rows.kernels import ADAGRAD, BFLOAT16, FLOAT32, MOMENTUM, SGD, Matrix, Rule
from trainer.rows.on_device import DevicePairs, Scored

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_TILE = 2048  # numbers of a tile of pairs' rows: 16 registers a thread of four warps
_MOST_PAIRS = 32
_SGD, _MOMENTUM, _ADAGRAD = tl.constexpr(SGD), tl.constexpr(MOMENTUM), tl.constexpr(ADAGRAD)
_FLOAT32, _BFLOAT16 = tl.constexpr(FLOAT32), tl.constexpr(BFLOAT16)


@triton.jit
def _widened(bits, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 of `bits` in a form."""
    if FORM == _FLOAT32:
        wide = bits.to(tl.float32, bitcast=True)
    elif FORM == _BFLOAT16:
        wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return wide


@triton.jit
def _noise(label, key, column, half):  # type: ignore[no-untyped-def]
    """Return 16 random bits a column, as uint32."""
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
def _narrowed(values, noise, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of float32 `values` rounded to a form by `noise`."""
    raw = values.to(tl.uint32, bitcast=True)
    if FORM == _FLOAT32:
        bits = raw.to(tl.int32, bitcast=True)
    elif FORM == _BFLOAT16:
        bits = ((raw + noise) >> 16).to(tl.int16)
    else:
        magnitude = raw & 0x7FFFFFFF
        noise = noise >> 3
        normal = ((magnitude + noise) >> 13) - (112 << 10)
        normal = tl.where(normal < 0x7BFF, normal, 0x7BFF)
        away = 113 - (magnitude >> 23)
        away = tl.where(away < 31, away, 31)
        even = ((((magnitude & 0x7FFFFF) | 0x800000) >> away) + noise) >> 13
        small = tl.where(magnitude < 0x38800000, even, normal)
        other = tl.where(magnitude > 0x7F800000, 0x7E00, 0x7C00)
        small = tl.where(magnitude < 0x7F800000, small, other)
        bits = (((raw >> 16) & 0x8000) | small).to(tl.int16)
    return bits


@triton.jit
def _one_less(power):  # type: ignore[no-untyped-def]
    """Return 1 - exp(power), exact near 0 too; power <= 0."""
    series = -power * (1.0 + power / 2.0 * (1.0 + power / 3.0 * (1.0 + power / 4.0)))
    return tl.where(power > -0.05, series, 1.0 - tl.exp(power))


@triton.jit
def score_kernel(  # type: ignore[no-untyped-def]
    x, vectors, ids, label, weight, starts, loss, slopes, on_x, scale, D,
    FORM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a query: scores of its pairs, their loss and slopes, and the gradient on x."""
    query = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < D
    own = tl.load(x + query * D + column, mask=inside, other=0.0)
    start, stop = tl.load(starts + query), tl.load(starts + query + 1)
    gradient = tl.zeros([WIDTH], tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    for low in range(start, stop, PAIRS):
        pair = low + tl.arange(0, PAIRS)
        there = pair < stop
        row = tl.load(ids + tl.load(label + pair, mask=there, other=0), mask=there, other=0)
        heavy = tl.load(weight + pair, mask=there, other=0.0)
        places = row[:, None] * D + column[None, :]
        both = (there & (row >= 0))[:, None] & inside[None, :]
        w = _widened(tl.load(vectors + places, mask=both, other=0), FORM)
        score = tl.sum(w * own[None, :], 1)
        margin = tl.where(heavy > 0, score, -score)
        small = tl.exp(-tl.abs(margin))
        total += tl.abs(heavy) * (tl.where(margin > 0, margin, 0.0) + tl.log(1.0 + small))
        slope = scale * heavy * (tl.where(margin > 0, 1.0, small) / (1.0 + small))
        tl.store(slopes + pair, slope, mask=there)
        gradient += tl.sum(slope[:, None] * w, 0)
    tl.store(on_x + query * D + column, gradient, mask=inside)
    tl.store(loss + query, tl.sum(total, 0))


@triton.jit(do_not_specialize=["origin", "key", "rows"])
def update_kernel(  # type: ignore[no-untyped-def]
    vectors, first, second, scalar, ids, dense, rows, x, slopes, query, order, starts,
    origin, key, rate, keep, beta1, beta2, eps, log1, log2, D,
    HAS_PAIRS: tl.constexpr, METHOD: tl.constexpr, FORM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a row, none of a pad: its gradient, of `dense` [rows, D] and its pairs, and the optimizer's step."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    row = tl.load(ids + number)
    there_is = row >= 0
    inside = (column < D) & there_is
    g = tl.load(dense + number * D + column, mask=inside & (number < rows), other=0.0)
    if HAS_PAIRS:
        start, stop = tl.load(starts + number), tl.load(starts + number + 1)
        for low in range(start, stop, PAIRS):
            rank = low + tl.arange(0, PAIRS)
            there = rank < stop
            pair = tl.load(order + rank, mask=there, other=0)
            slope = tl.load(slopes + pair, mask=there, other=0.0)
            asked = tl.load(query + pair, mask=there, other=0).to(tl.int64)
            both = there[:, None] & inside[None, :]
            g += tl.sum(slope[:, None] * tl.load(x + asked[:, None] * D + column[None, :], mask=both, other=0.0), 0)
    place = row * D + column
    w = _widened(tl.load(vectors + place, mask=inside, other=0), FORM) * keep
    if METHOD == _SGD:
        w -= rate * g
    elif METHOD == _MOMENTUM:
        moved = beta1 * tl.load(first + place, mask=inside, other=0.0) + g
        tl.store(first + place, moved, mask=inside)
        w -= rate * moved
    elif METHOD == _ADAGRAD:
        square = tl.load(scalar + row, mask=there_is, other=0.0) + tl.sum(g * g, 0) / D
        tl.store(scalar + row, square, mask=there_is)
        w -= (rate / (tl.sqrt(square) + eps)) * g
    else:
        count = tl.load(scalar + row, mask=there_is, other=0.0) + 1.0
        tl.store(scalar + row, count, mask=there_is)
        moved = tl.load(first + place, mask=inside, other=0.0)
        moved += (1.0 - beta1) * (g - moved)
        spread = beta2 * tl.load(second + place, mask=inside, other=0.0) + (1.0 - beta2) * g * g
        tl.store(first + place, moved, mask=inside)
        tl.store(second + place, spread, mask=inside)
        short, long = _one_less(count * log1), _one_less(count * log2)
        w -= rate * (moved / short) / (tl.sqrt(spread / long) + eps)
    noise = _noise(row + origin, key, column, (D + 1) // 2)
    tl.store(vectors + place, _narrowed(w, noise, FORM), mask=inside)


def score_pairs(
    x: torch.Tensor, matrix: Matrix, ids: torch.Tensor, pairs: DevicePairs, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do as `on_device.score_pairs`."""
    loss, slopes, on_x = x.new_empty(len(x)), x.new_empty(len(pairs.label)), torch.empty_like(x)
    if len(x):
        shape = tiles(x.shape[1])
        score_kernel[len(x),](
            x, bits_of(matrix.vectors), ids, pairs.label, pairs.weight, pairs.query_starts, loss, slopes, on_x,
            scale, x.shape[1], FORM=matrix.form, **shape,
        )  # fmt: skip
    return loss, slopes, on_x


def update_rows(
    matrix: Matrix, rule: Rule, ids: torch.Tensor, gradient: torch.Tensor, scored: Scored | None = None
) -> None:
    """Do as `on_device.update_rows`."""
    if not len(ids):
        return
    D = matrix.vectors.shape[1]
    unused = gradient  # a pointer that is not followed
    pairs, slopes, x = scored or (None, unused, unused)
    numbers = [float(number) for number in (rule.rate, rule.keep, rule.beta1, rule.beta2, rule.eps)]
    numbers += [math.log(beta) if beta else -math.inf for beta in (float(rule.beta1), float(rule.beta2))]
    update_kernel[len(ids),](
        bits_of(matrix.vectors),
        *(unused if state is None else state for state in (matrix.first, matrix.second, matrix.scalar)),
        ids, gradient, len(gradient),
        x, slopes, *((unused,) * 3 if pairs is None else (pairs.query, pairs.order, pairs.label_starts)),
        matrix.origin, rule.key, *numbers, D,
        HAS_PAIRS=pairs is not None, METHOD=rule.method, FORM=matrix.form, **tiles(D, rows=True),
    )  # fmt: skip


def bits_of(vectors: torch.Tensor) -> torch.Tensor:
    """View vectors as integers of their width."""
    return vectors.view(_BITS[vectors.dtype])


def tiles(dimension: int, rows: bool = False) -> dict[str, int]:
    """Return the shape of a tile and the warps of a program: one of a query, or of a row, which has few pairs."""
    width = triton.next_power_of_2(dimension)
    most = 4 if rows else _MOST_PAIRS
    pairs = max(1, min(most, _TILE // width))
    return {"PAIRS": pairs, "WIDTH": width, "num_warps": max(1, min(4, pairs * width // 256))}
