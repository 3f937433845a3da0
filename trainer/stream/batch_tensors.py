"""Batches as one piece of memory shared between processes, and changes of all their arrays."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

T = TypeVar("T")
_ALIGNED = 64  # bytes


class Place(NamedTuple):
    """Place of an array in a packed batch: its first byte, dtype and shape."""

    start: int
    dtype: str
    shape: tuple[int, ...]


def map_arrays(value: T, change: Callable[[Any], Any], kinds: tuple[type, ...] = (np.ndarray, torch.Tensor)) -> T:
    """Return `value` with all that is of `kinds` changed, in dataclasses and named tuples at any depth."""
    if isinstance(value, kinds):
        return change(value)  # type: ignore[no-any-return]
    if isinstance(value, tuple):
        parts = (map_arrays(part, change, kinds) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: map_arrays(getattr(value, field.name), change, kinds) for field in fields(value)}
        return type(value)(**changed)  # type: ignore[return-value]
    return value


def pack(value: T, pinned: bool = False) -> tuple[T, torch.Tensor] | None:
    """Return `value` with places instead of its NumPy arrays, and the uint8 tensor that holds them.

    None without any, and where shared memory has no room.

    In a DataLoader worker the tensor lies in shared memory, so another process gets the arrays without a copy.
    `pinned`: in memory that a device copies from by itself.
    """
    arrays: list[np.ndarray] = []
    places: list[Place] = []
    end = 0

    def place(array: np.ndarray) -> Place:
        nonlocal end
        arrays.append(array)
        places.append(Place(end, array.dtype.str, array.shape))
        end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        return places[-1]

    skeleton = map_arrays(value, place, (np.ndarray,))
    if not arrays:
        return None
    if get_worker_info() is None:
        buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    else:
        try:
            storage = torch.UntypedStorage._new_shared(max(end, 1), device="cpu")
        except RuntimeError:  # /dev/shm is full, or cannot be written
            return None
        buffer = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    memory = buffer.numpy()
    for position, array in zip(places, arrays, strict=True):
        _view(memory, position)[...] = array
    return skeleton, buffer


def unpack(skeleton: T, buffer: torch.Tensor) -> T:
    """Undo `pack`; the arrays lie in `buffer` and keep it."""
    memory = buffer.numpy()
    return map_arrays(skeleton, lambda position: _view(memory, position), (Place,))


def _view(memory: np.ndarray, place: Place) -> np.ndarray:
    return np.ndarray(place.shape, place.dtype, memory.data, place.start)
