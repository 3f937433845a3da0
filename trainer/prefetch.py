"""Processor instructions that Numba does not offer, for compiled loops.

Numba's cache checks only the file that contains a loop: after a change here, touch the files that import this module.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


@intrinsic
def prefetch(context, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at `address` for reading, without waiting; any address is allowed."""
    return types.void(types.intp), _prefetch(0)


@intrinsic
def prefetch_to_write(context, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at `address` for writing, without waiting; any address is allowed."""
    return types.void(types.intp), _prefetch(1)


def _prefetch(writes: int) -> Callable[..., Any]:
    """Return the code that prefetches a line into all caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(ask, [builder.inttoptr(arguments[0], byte), number(writes), number(3), number(1)])
        return context.get_dummy_value()

    return generate
