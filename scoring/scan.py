"""Exact search of coded blocks for one query, compiled: products with the codes, and a bound that proves the result.

Numba's cache checks only the file that contains a loop: after a change here, touch the files that import this module.
"""

import os
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from schemas.errors import DivergedError
from search import NOT_A_NUMBER
from search.topk import Block, norms, score

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
kernel: Any = numba.njit(**_OPTIONS)
_LANES, _BLOCK = 16, 64  # numbers of 32 bits, and bytes, of a vector register
_IS_HOST = {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"}.isdisjoint(os.environ)  # else code is for another processor
_HAS_DOT = _IS_HOST and "+avx512vnni" in get_host_cpu_features()
_ROUNDING = 1e-4  # more than bounds are rounded
_SPARE = 256  # values that are collected before the largest are chosen
_TOGETHER = 64  # values that are skipped together if none is large enough


@kernel
def largest(values, k):  # type: ignore[no-untyped-def]
    """Return the `k`-th largest of `values`, and move it and the larger values to the front, by Hoare's quickselect.

    `np.partition` takes five times as long to compile.
    """
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


@intrinsic
def _dot(context, codes, query, blocks):  # type: ignore[no-untyped-def]
    """Return the product of uint8 at address `codes` and int8 at address `query`; 0 if the processor cannot do that."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, number = ir.VectorType(ir.IntType(32), _LANES), ir.IntType(32)
        if not _HAS_DOT:
            return number(0)
        multiply = ir.FunctionType(numbers, [numbers] * 3)
        multiply = cgutils.get_or_insert_function(builder.module, multiply, "llvm.x86.avx512.vpdpbusd.512")
        add = ir.FunctionType(number, [numbers])
        add = cgutils.get_or_insert_function(builder.module, add, "llvm.vector.reduce.add.v16i32")
        total = cgutils.alloca_once_value(builder, numbers([0] * _LANES))
        with cgutils.for_range(builder, arguments[2]) as loop:
            places = [builder.gep(builder.inttoptr(each, numbers.as_pointer()), [loop.index]) for each in arguments[:2]]
            loaded = [builder.load(place, align=1) for place in places]
            builder.store(builder.call(multiply, [builder.load(total), *loaded]), total)
        return builder.call(add, [builder.load(total)])

    return types.int32(types.intp, types.intp, types.intp), generate


@kernel
def multiply(codes, query, unit, widest, factor, fast):  # type: ignore[no-untyped-def]
    """Return products of codes uint8 [n, D] with int8 [D, padded to blocks with 0] in a unit, and of `widest` [n].

    The first `fast` products are computed by `_dot`.
    """
    products, blocks = np.empty(len(codes)), len(query) // _BLOCK
    wide = query.astype(np.int16)  # for which the compiler has better instructions
    for row in range(len(codes)):
        total = np.int32(0)
        if row < fast:
            total = _dot(codes.ctypes.data + row * codes.shape[1], query.ctypes.data, blocks)
        else:
            for column in range(codes.shape[1]):
                total += np.int32(codes[row, column]) * np.int32(wide[column])
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
        if block.index is not None or block.codes is None:
            return None
        widest = np.ascontiguousarray(block.vectors[:, block.codes.widest], np.float32)
        return cls(block, block.codes.view, widest)

    def scan(self, query: np.ndarray) -> "Scan":
        """Multiply `query` [1, D] with all codes. Raises ExtremisError for NaN."""
        codes, others = self.block.codes, query.copy()
        assert codes is not None, "the block has codes"
        noise = 2 * query.shape[1] * np.finfo(np.float32).eps * norms(query) * self.block.longest
        if not np.isfinite(noise).all():
            raise DivergedError(NOT_A_NUMBER)
        others[0, codes.widest] = 0  # in the unit of a bias, the query's other numbers would be rounded to nothing
        (rounded,), ((unit,),), lost = codes.round(others)
        padded = np.zeros(-(-self.codes.shape[1] // _BLOCK) * _BLOCK, np.int8)
        padded[: len(rounded)] = rounded
        # A block after the last column belongs to the next row, or to nothing.
        fast = max(0, len(self.codes) - (len(padded) - 1) // self.codes.shape[1]) if _HAS_DOT else 0
        factor = float(query[0, codes.widest])
        products = multiply(self.codes, padded, float(unit), self.widest, factor, fast)
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
