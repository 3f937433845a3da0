"""Exact search of coded blocks for one query, compiled: products with the codes, and a bound that proves the result.

Numba's cache checks only the file that contains a loop: after a change here, touch the files that import this module.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from schemas.errors import DivergedError
from search import NOT_A_NUMBER
from search.topk import Block, norms, score

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
kernel: Any = numba.njit(**_OPTIONS)
_ROUNDING = 1e-4  # more than bounds are rounded
_SPARE = 256  # values that are collected before the largest are chosen
_TOGETHER = 64  # values that are skipped together if none is large enough


@kernel
def largest(values, k):  # type: ignore[no-untyped-def]
    """Return the `k`-th largest of `values`, and move it and the larger values to the front."""
    low, high = 0, len(values) - 1
    while low < high:
        pivot, left, right = values[(low + high) // 2], low, high
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left, right = left + 1, right - 1
        if right < k - 1 < left:
            break
        low, high = (low, right) if k - 1 <= right else (left, high)
    return values[k - 1]


@kernel
def multiply(codes, query, unit, widest, factor):  # type: ignore[no-untyped-def]
    """Return the products of codes uint8 [n, D or more] with int16 [D] in a unit, plus those of `widest` [n]."""
    products = np.empty(len(codes))
    for row in range(len(codes)):
        total = np.int32(0)
        for column in range(len(query)):
            total += np.int32(codes[row, column]) * np.int32(query[column])
        products[row] = total * unit + widest[row] * factor
    return products


@numba.njit(**_OPTIONS, fastmath={"nnan", "nsz"})
def find_largest(values, left_out, k, slack, least):  # type: ignore[no-untyped-def]
    """Return positions of values at most `slack` below the `k`-th largest, and that limit, which is `least` or more.

    `left_out` bool: positions that do not count; empty for none.
    """
    few, found, count, limit = np.empty(k + _SPARE, values.dtype), np.empty(4 * k, np.int64), 0, least
    for finds in (False, True):  # the limit, then the positions
        for start in range(0, len(values), _TOGETHER):
            some, most = values[start : start + _TOGETHER], values[start]
            for place in range(len(some)):
                most = max(most, some[place])
            if most < limit:
                continue
            for place in range(len(some)):
                if some[place] < limit or (len(left_out) and left_out[start + place]):
                    continue
                if finds and count == len(found):
                    found = np.append(found, found)
                elif not finds and count == len(few):
                    limit, count = max(limit, largest(few, k)), k
                if finds:
                    found[count] = start + place
                else:
                    few[count] = some[place]
                count += 1
        if not finds:
            limit = max(least, largest(few[:count], k) - slack) if count >= k else least
            count = 0
    return found[:count], limit


class CodedBlock(NamedTuple):
    """A block that is searched by its codes, uint8 [n, D], but for the values of its widest column, float32 [n]."""

    block: Block
    codes: np.ndarray
    widest: np.ndarray

    @classmethod
    def of(cls, block: Block) -> "CodedBlock | None":
        """Return the block with a view of its codes; None for a block that is searched in another way."""
        import faiss

        if block.index is not None or block.codes is None:
            return None
        quantizer = block.codes.quantizer
        flat = faiss.rev_swig_ptr(quantizer.codes.data(), quantizer.ntotal * quantizer.d)  # type: ignore[attr-defined]
        widest = np.ascontiguousarray(block.vectors[:, block.codes.widest], np.float32)
        return cls(block, np.asarray(flat).reshape(quantizer.ntotal, quantizer.d), widest)

    def scan(self, query: np.ndarray) -> "Scan":
        """Multiply `query` [1, D] with all codes. Raises ExtremisError for NaN."""
        codes, others = self.block.codes, query.copy()
        assert codes is not None, "the block has codes"
        noise = 2 * query.shape[1] * np.finfo(np.float32).eps * norms(query) * self.block.longest
        if not np.isfinite(noise).all():
            raise DivergedError(NOT_A_NUMBER)
        others[0, codes.widest] = 0  # in the unit of a bias, the query's other numbers would be rounded to nothing
        (rounded,), ((unit,),), lost = codes.round(others)
        factor = float(query[0, codes.widest])
        products = multiply(self.codes, rounded.astype(np.int16), float(unit), self.widest, factor)
        error = codes.error_of_others * norms(others) + lost + noise
        return Scan(self.block, query, products, 2 * (1 + _ROUNDING) * float(error[0]))


class Scan(NamedTuple):
    """Products of one query with a block's codes; exact scores are in the same order if products differ by `slack`."""

    block: Block
    query: np.ndarray
    products: np.ndarray
    slack: float

    def best(self, width: int, left_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and ids [1, width or less] of the best labels, as `search_exactly`; without `left_out` [n]."""
        found, _ = find_largest(self.products, left_out, width, self.slack, -np.inf)
        scores = score(self.query, self.block.vectors, found[None])[0] + np.float32(0)  # -0 is 0
        order = np.lexsort((found, -scores))[:width]
        return scores[None, order], found[None, order] + self.block.start
