"""Compiled loops that make a single pass over rows of a matrix in main memory.

Matrices of vectors are passed as unsigned integers (uint32 for float32, uint16 otherwise), with their `dtype_code`.
Every loop takes rows [start, stop) of `ids`, so that several threads can share the work; the ids are distinct. `block`
contains the current rows as float32 [n, D] and their gradient; row ids[i] is row i - before of the block.

Values narrower than float32 are rounded stochastically, up or down so that the expectation is the exact value. The
random bits are a stateless hash of (key, row, column), so they do not depend on the order of rows, on the number of
threads or ranks, or on resumes. See docs/decisions/0012.

Each helper function (`_inlined`) processes a block of rows and is inlined into the loops that call it, because a row of
64 columns takes less time than a call. A loop over columns does only one thing, because the compiler does not vectorise
loops that do two things.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from trainer.prefetch import prefetch_to_write
from trainer.rows.codes import ADAGRAD, FLOAT32, LOWBIAS, MOMENTUM, SGD


class Pairs(NamedTuple):
    """Pairs in the order of their labels: label number i has pairs [starts[i], starts[i + 1]).

    The weight of a pair in the loss is the absolute value of `weight`; `weight` is negative for a positive label.
    `margin` is added to scores.
    """

    query: np.ndarray  # [n]
    weight: np.ndarray  # [n]
    margin: np.ndarray  # [n], or [0] for none
    starts: np.ndarray  # [C + 1]


class Queries(NamedTuple):
    """x [B, D], the accumulated gradient on x [B, D], and the factor on all gradients."""

    x: np.ndarray
    gradient: np.ndarray
    scale: np.float32


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
# Constants of splitmix64 (Steele, Lea and Flood, 2014).
_S1, _F1, _S2, _F2 = (np.uint64(number) for number in (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB))
(_R1, _M1), (_R2, _M2) = ((np.uint32(shift), np.uint32(factor)) for shift, factor in LOWBIAS[:2])
_BLOCK = 8  # rows processed at a time
_AHEAD = 32  # rows prefetched from memory ahead of use
_LINE = 64  # bytes of a cache line

# The compiler may reorder sums, but the order is the same in every run.
_OPTIONS: dict[str, Any] = {"cache": True, "fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
_loop: Any = numba.njit(nogil=True, **_OPTIONS)
_inlined: Any = numba.njit(forceinline=True, **_OPTIONS)


@_inlined
def _lines(array):  # type: ignore[no-untyped-def]
    """Return (address, bytes per row) of a matrix, or of an array with one number per row; (0, 0) if empty."""
    if len(array) == 0:
        return 0, 0
    return np.intp(array.ctypes.data), array.strides[0]


@_inlined
def _prefetch_row(lines, row):  # type: ignore[no-untyped-def]
    """Prefetch row `row` of a matrix, given its `_lines`."""
    # Rows are far apart in memory: loading a row only when it is needed costs more than all computation on it.
    address, width = lines
    for place in range(address + row * width, address + (row + 1) * width, _LINE):
        prefetch_to_write(place)


@_inlined
def _load(vectors, dtype_code, ids, start, stop, bits, before):  # type: ignore[no-untyped-def]
    """Copy rows ids[start:stop] as float32 into `bits` uint32 [n, D], row ids[i] into row i - before."""
    columns = bits.shape[1]
    for i in range(start, stop):
        row, place = ids[i], i - before
        if dtype_code == FLOAT32:
            for j in range(columns):
                bits[place, j] = vectors[row, j]
        else:
            for j in range(columns):
                bits[place, j] = np.uint32(np.uint32(vectors[row, j]) << np.uint32(16))


@_inlined
def _bfloat16(raw, noise):  # type: ignore[no-untyped-def]
    """Round `raw`, the bits of a float32: up if the 16 bits of `noise` are at least the distance to the next value.

    Infinity and the usual NaN have zeros in the low half, so rounding does not change infinity or NaN.
    """
    return np.uint32(np.uint32(raw + noise) >> np.uint32(16))


@_inlined
def _store(matrix, key, ids, start, stop, held, before):  # type: ignore[no-untyped-def]
    """Write the rows held[0], which `_load` filled, back to the matrix; `_scratch` returns the rest of `held`.

    Label ids[i] + origin, `key` and the column determine the direction of rounding.
    """
    vectors, dtype_code, origin = matrix.vectors, matrix.dtype_code, matrix.origin
    bits, count, words = held
    columns = bits.shape[1]
    if dtype_code == FLOAT32:
        for i in range(start, stop):
            row, place = ids[i], i - before
            for j in range(columns):
                vectors[row, j] = bits[place, j]
        return
    # One random word serves a column of the first half and a column of the second half.
    half = (columns + 1) // 2
    for i in range(start, stop):
        row, place = ids[i], i - before
        mixed = np.uint64(np.uint64(row + origin) * _GOLDEN + np.uint64(key))
        mixed = np.uint64((mixed ^ (mixed >> _S1)) * _F1)
        mixed = np.uint64((mixed ^ (mixed >> _S2)) * _F2)
        mixed = np.uint64(mixed ^ (mixed >> np.uint64(31)))
        first, stride = np.uint32(mixed), np.uint32(np.uint32(mixed >> np.uint64(32)) | np.uint32(1))
        for j in range(half):
            word = np.uint32(first + np.uint32(count[j] * stride))
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _R1)) * _M1)
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _R2)) * _M2)
            words[j] = np.uint32(word ^ np.uint32(word >> np.uint32(16)))
        for j in range(half):
            vectors[row, j] = _bfloat16(bits[place, j], np.uint32(words[j] & np.uint32(0xFFFF)))
        for j in range(columns - half):
            vectors[row, half + j] = _bfloat16(bits[place, half + j], np.uint32(words[j] >> np.uint32(16)))


@_inlined
def _scratch(columns):  # type: ignore[no-untyped-def]
    """Return the rest of `held` for `_store`: column numbers, and room for random bits."""
    half = (columns + 1) // 2
    return np.arange(half).astype(np.uint32), np.empty(half, np.uint32)


@_inlined
def _descend(matrix, rule, ids, start, stop, block, before):  # type: ignore[no-untyped-def]
    """Make one step of the optimizer on the rows of `block`."""
    method, rate, keep, beta1, beta2, eps, _ = rule
    first, second, scalar = matrix.first, matrix.second, matrix.scalar
    w, g = block
    columns, one = w.shape[1], np.float32(1)
    for i in range(start, stop):
        row, place = ids[i], i - before
        if keep != one:
            for j in range(columns):
                w[place, j] *= keep
        if method == SGD:
            for j in range(columns):
                w[place, j] -= rate * g[place, j]
        elif method == MOMENTUM:
            for j in range(columns):
                first[row, j] = beta1 * first[row, j] + g[place, j]
            for j in range(columns):
                w[place, j] -= rate * first[row, j]
        elif method == ADAGRAD:
            square = np.float32(0)
            for j in range(columns):
                square += g[place, j] * g[place, j]
            scalar[row] += square / np.float32(columns)
            slowed = rate / (np.sqrt(scalar[row]) + eps)
            for j in range(columns):
                w[place, j] -= slowed * g[place, j]
        else:
            scalar[row] += one
            correction1 = np.float32(1 - math.pow(beta1, scalar[row]))
            correction2 = np.float32(1 - math.pow(beta2, scalar[row]))
            for j in range(columns):
                first[row, j] += (one - beta1) * (g[place, j] - first[row, j])
            for j in range(columns):
                second[row, j] = beta2 * second[row, j] + (one - beta2) * g[place, j] * g[place, j]
            for j in range(columns):
                w[place, j] -= rate * (first[row, j] / correction1) / (np.sqrt(second[row, j] / correction2) + eps)


@_inlined
def _state_lines(matrix):  # type: ignore[no-untyped-def]
    """Return the `_lines` of the vectors and of each part of their optimizer's state."""
    return _lines(matrix.vectors), _lines(matrix.scalar), _lines(matrix.first), _lines(matrix.second)


@_inlined
def _prefetch_state(lines, row):  # type: ignore[no-untyped-def]
    """Prefetch row `row` of all `_state_lines`."""
    vectors, scalar, first, second = lines
    _prefetch_row(vectors, row)
    _prefetch_row(scalar, row)
    _prefetch_row(first, row)
    _prefetch_row(second, row)


@_loop
def gather(matrix, ids, out, start, stop):  # type: ignore[no-untyped-def]
    """Copy rows `ids` [C] as float32 into `out` [C, D]."""
    bits, rows = out.view(np.uint32), _lines(matrix.vectors)
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        for i in range(low + _AHEAD, min(high + _AHEAD, stop)):
            _prefetch_row(rows, ids[i])
        _load(matrix.vectors, matrix.dtype_code, ids, low, high, bits, 0)


@_loop
def update(matrix, rule, ids, w, g, start, stop):  # type: ignore[no-untyped-def]
    """Make one step on rows `ids` [C], given the gathered rows w [C, D] and their gradient g; w is overwritten."""
    bits, lines = w.view(np.uint32), _state_lines(matrix)
    count, words = _scratch(w.shape[1])
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        for i in range(low + _AHEAD, min(high + _AHEAD, stop)):
            _prefetch_state(lines, ids[i])
        _descend(matrix, rule, ids, low, high, (w, g), 0)
        _store(matrix, rule.key, ids, low, high, (bits, count, words), 0)


@_inlined
def _score(pairs, queries, ids, span, block, lines):  # type: ignore[no-untyped-def]
    """Return the loss of the pairs of labels [start, stop); add to the gradients on the labels and on x.

    The loop also prefetches the next block of rows of `lines`, up to number `last`.
    """
    query, weight, margins, starts = pairs
    x, on_x, scale = queries
    start, stop, last = span
    w, g = block
    columns = w.shape[1]
    loss = 0.0
    for i in range(start, stop):
        if i + _AHEAD < last:
            _prefetch_state(lines, ids[i + _AHEAD])
        place = i - start
        for pair in range(starts[i], starts[i + 1]):
            q, signed_weight = query[pair], weight[pair]
            score = np.float32(0)
            for j in range(columns):
                score += w[place, j] * x[q, j]
            if len(margins) > 0:
                score += margins[pair]
            # softplus(m) = max(m, 0) + log(1 + e), sigmoid(m) = 1 or e over 1 + e, e = exp(-|m|)
            margin = np.float64(score if signed_weight > 0 else -score)
            small = math.exp(-abs(margin))
            loss += abs(signed_weight) * (max(margin, 0.0) + math.log(1.0 + small))
            slope = np.float32(scale * signed_weight * ((1.0 if margin > 0 else small) / (1.0 + small)))
            for j in range(columns):
                g[place, j] += slope * x[q, j]
            for j in range(columns):
                on_x[q, j] += slope * w[place, j]
    return loss


@_loop
def binary_step(matrix, rule, ids, pairs, queries, pool, span):  # type: ignore[no-untyped-def]
    """Make a step of binary cross-entropy on rows [start, stop) = `span` of `ids` [C].

    Each row is read and written once. `pool` [R, D] is an additional gradient on the first R rows. Returns the loss
    as float64, without the factor `queries.scale`.
    """
    start, stop = span
    columns = matrix.vectors.shape[1]
    bits, g = np.empty((_BLOCK, columns), np.uint32), np.empty((_BLOCK, columns), np.float32)
    block, lines = (bits.view(np.float32), g), _state_lines(matrix)
    count, words = _scratch(columns)
    loss = 0.0
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        _load(matrix.vectors, matrix.dtype_code, ids, low, high, bits, low)
        g[:] = np.float32(0)
        for i in range(low, min(high, len(pool))):
            for j in range(columns):
                g[i - low, j] = pool[i, j]
        loss += _score(pairs, queries, ids, (low, high, stop), block, lines)
        _descend(matrix, rule, ids, low, high, block, low)
        _store(matrix, rule.key, ids, low, high, (bits, count, words), low)
    return loss


@_loop
def by_row(row, column, value, rows):  # type: ignore[no-untyped-def]
    """Sort entries (row, column, value) [n] by row; return columns, values, and row starts [rows + 1] int64.

    Entries of one row keep their order.
    """
    ends = np.zeros(rows + 2, np.int64)
    for i in range(len(row)):
        ends[row[i] + 2] += 1
    for i in range(2, rows + 2):
        ends[i] += ends[i - 1]
    columns, values = np.empty(len(row), column.dtype), np.empty(len(row), value.dtype)
    for i in range(len(row)):
        place = ends[row[i] + 1]
        ends[row[i] + 1] = place + 1
        columns[place], values[place] = column[i], value[i]
    return columns, values, ends[: rows + 1]
