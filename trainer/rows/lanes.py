"""Operations on sixteen numbers at a time, by address: what a compiled loop over columns does for every row.

Of a loop over the columns of an array, the compiler makes vector instructions, and tests before each row that arrays do
not overlap and that there are columns enough. For rows of 64 columns that costs as much as the work. Here vectors are
what is asked for; a machine that has only narrower ones takes several. The first `LANES * tiles` columns are done, the
rest is the caller's. Numba's cache knows only the file of a loop: after a change here, touch those that use it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
LOWBIAS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None))  # shifts and factors of lowbias32 (Wellons, 2018)
_SHORT, _INT, _PLACE, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FIRST = _PLACE(0)  # column
_BYTES = {_SHORT: 2, _INT: 4, _FLOAT: 4}


@intrinsic
def widen_bfloat16(context, source, target, tiles):  # type: ignore[no-untyped-def]
    """Copy bfloat16 at `source` as float32 to `target`."""

    def tile(builder: Any, index: Any, source: Any, target: Any) -> None:
        half = _load(builder, source, index, _SHORT)
        _store(builder, target, index, builder.shl(builder.zext(half, _vector(_INT)), _same(16)))

    return types.void(types.intp, types.intp, types.intp), _tiles(tile)


@intrinsic
def subtract_scaled(context, target, source, factor, tiles):  # type: ignore[no-untyped-def]
    """Subtract `factor` times the float32 at `source` from those at `target`."""

    def tile(builder: Any, index: Any, target: Any, source: Any, factor: Any) -> None:
        scaled = builder.fmul(_spread(builder, factor), _load(builder, source, index, _FLOAT), flags=("contract",))
        before = _load(builder, target, index, _FLOAT)
        _store(builder, target, index, builder.fsub(before, scaled, flags=("contract",)))

    return types.void(types.intp, types.intp, types.float32, types.intp), _tiles(tile)


@intrinsic
def round_bfloat16(context, source, target, first, stride, half, tiles):  # type: ignore[no-untyped-def]
    """Round float32 at `source` to bfloat16 at `target`, a tile of columns from 0 on and the same from `half` on.

    Column j takes the low 16 bits of the hash of first + j * stride for its noise, column half + j the high ones.
    """

    def tile(builder: Any, index: Any, source: Any, target: Any, first: Any, stride: Any, half: Any) -> None:
        counted = ir.Constant(_vector(_INT), list(range(LANES)))
        begun = _spread(builder, builder.mul(builder.trunc(index, _INT), _INT(LANES)))
        word = builder.mul(builder.add(counted, begun), _spread(builder, stride))
        word = builder.add(word, _spread(builder, first))
        for shift, factor in LOWBIAS:
            word = builder.xor(word, builder.lshr(word, _same(shift)))
            word = word if factor is None else builder.mul(word, _same(factor))
        for noise, column in (
            (builder.and_(word, _same(0xFFFF)), _FIRST),
            (builder.lshr(word, _same(16)), half),
        ):
            raw = _load(builder, source, index, _INT, column)
            rounded = builder.lshr(builder.add(raw, noise), _same(16))
            _store(builder, target, index, builder.trunc(rounded, _vector(_SHORT)), column)

    places = types.intp, types.intp, types.uint32, types.uint32, types.intp, types.intp
    return types.void(*places), _tiles(tile)


def _tiles(tile: Callable[..., None]) -> Callable[..., Any]:
    """Return the code of a loop of `tile` over its number of tiles, which is the last argument."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *others, count = arguments
        with cgutils.for_range(builder, count) as loop:
            tile(builder, loop.index, *others)
        return context.get_dummy_value()

    return generate


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, LANES)


def _same(number: int) -> Any:
    return ir.Constant(_vector(_INT), [number] * LANES)


def _spread(builder: Any, number: Any) -> Any:
    """Return a vector of one number."""
    empty = ir.Constant(_vector(number.type), ir.Undefined)
    alone = builder.insert_element(empty, number, _INT(0))
    return builder.shuffle_vector(alone, empty, ir.Constant(_vector(_INT), [0] * LANES))


def _pointer(builder: Any, address: Any, index: Any, kind: Any, column: Any) -> Any:
    element = builder.add(builder.mul(index, _PLACE(LANES)), column)
    place = builder.add(address, builder.mul(element, _PLACE(_BYTES[kind])))
    return builder.inttoptr(place, _vector(kind).as_pointer())


def _load(builder: Any, address: Any, index: Any, kind: Any, column: Any = _FIRST) -> Any:
    return builder.load(_pointer(builder, address, index, kind, column), align=_BYTES[kind])


def _store(builder: Any, address: Any, index: Any, value: Any, column: Any = _FIRST) -> None:
    kind = value.type.element
    builder.store(value, _pointer(builder, address, index, kind, column), align=_BYTES[kind])
