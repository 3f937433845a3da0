"""The device of a run, its arithmetic, and the transfer of arrays in any record to it and from it."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from schemas.errors import InputError
from schemas.randomness import Purpose, torch_seed

CPU = torch.device("cpu")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # option numbers of glibc's mallopt
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20  # bytes: free memory that the heap keeps; largest block in the heap


@functools.cache
def keep_freed_memory() -> None:
    """Make the process reuse the memory of one batch for the next batch, where it has glibc.

    By default, glibc may return freed blocks of a few megabytes to the system, which then has to clear each page again:
    that doubled the time to plan a batch with own pools.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)


def open_device(name: str) -> torch.device:
    """Return the device `name`: auto, cpu, cuda or cuda:N. Raises InputError if the device does not exist.

    `auto` is a GPU if there is one; `cuda` without a number is the GPU with number LOCAL_RANK, as torchrun sets it.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = name.partition(":")
    if kind == "cpu" or (kind == "auto" and not gpus):
        return CPU
    if not gpus:
        built = "PyTorch finds no GPU here" if torch.version.cuda else "this PyTorch is built for CPUs only"
        expected, remedy = f"'auto' or 'cpu', because {built}", "A recipe sets train.device."
        raise InputError(parameter="device", got=repr(name), expected=expected, remedy=remedy)
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) % gpus
    if index >= gpus:
        numbers = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise InputError(parameter="device", got=repr(name), expected=f"'auto', 'cpu' or {numbers}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def describe_device(device: torch.device) -> str:
    """Return the device and its hardware name."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Return a context that computes matrix products in `dtype`; None keeps the type of the tensors."""
    if device.type not in ("cpu", "cuda"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


@contextlib.contextmanager
def products_with(vectors: torch.Tensor) -> Iterator[None]:
    """Let a GPU multiply float32 by `vectors` of a narrower dtype in TF32, which represents these vectors exactly.

    The float32 factor is rounded to TF32 (10 bits of mantissa), and sums are in float32. On a CPU nothing changes.
    """
    settings = torch.backends.cuda.matmul
    if vectors.device.type != "cuda" or vectors.dtype == torch.float32 or not hasattr(settings, "fp32_precision"):
        yield
        return
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b in float32, for float32 or bfloat16: a CPU widens bfloat16, a GPU multiplies bfloat16 directly."""
    if a.dtype != torch.float32 and a.device.type != "cpu":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@contextlib.contextmanager
def denormals_flushed() -> Iterator[None]:
    """Flush denormals, which Adagrad's sums and Adam's moments become, to zero in this process: they are slow."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def torch_generator(seed: int, purpose: Purpose, *counters: int) -> torch.Generator:
    """Return a torch CPU generator for up to three `counters`, with the same keys as `schemas.randomness.generator`."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *counters))


T = TypeVar("T")
_ALIGNED = 64  # bytes
_to_device: dict[torch.device, torch.cuda.Stream] = {}
_from_device: dict[torch.device, torch.cuda.Stream] = {}


def as_tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the array's memory, or a copy if the memory is read-only (unsupported in torch)."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class PackedArray(NamedTuple):
    """Location of an array in a packed batch: its first byte, dtype and shape."""

    start: int
    dtype: str
    shape: tuple[int, ...]


def map_arrays(value: T, change: Callable[[Any], Any], kinds: tuple[type, ...] = (np.ndarray, torch.Tensor)) -> T:
    """Apply `change` to all parts of `value` with a type in `kinds`, in dataclasses and named tuples at any depth."""
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
    """Return `value` with a `PackedArray` instead of each NumPy array, and the uint8 tensor that contains the arrays.

    The tensor is `pinned`, or, in a DataLoader worker, in shared memory, so that another process needs no copy. Return
    None if there are no arrays, or if there is not enough shared memory.
    """
    arrays: list[np.ndarray] = []
    places: list[PackedArray] = []
    end = 0

    def place(array: np.ndarray) -> PackedArray:
        nonlocal end
        arrays.append(array)
        places.append(PackedArray(end, array.dtype.str, array.shape))
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
    views: Any = unpack(tuple(places), buffer)
    for view, array in zip(views, arrays, strict=True):
        view[...] = array
    return skeleton, buffer


def unpack(skeleton: T, buffer: torch.Tensor) -> T:
    """Undo `pack`; the arrays are views of `buffer`."""
    memory = buffer.numpy().data

    def view(place: PackedArray) -> np.ndarray:
        return np.ndarray(place.shape, place.dtype, memory, place.start)

    return map_arrays(skeleton, view, (PackedArray,))


def send(value: Any, device: torch.device) -> Any:
    """Return `value` with tensors on `device` in place of all arrays; on a CPU, tensors share memory with the arrays.

    For another device, one copy moves the arrays, which must not be unsigned, from pinned memory on a separate stream,
    while the device works on earlier input; tensors that are already on the device stay there.
    """
    if device == CPU:
        return map_arrays(value, as_tensor)
    arrays = map_arrays(value, lambda tensor: tensor if tensor.device == device else tensor.numpy(), (torch.Tensor,))
    packed = pack(arrays, device.type == "cuda")
    if packed is None:
        return value
    skeleton, buffer = packed
    moved = send_tensor(buffer, device)

    def view(place: PackedArray) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, place.dtype)).dtype
        stop = place.start + int(np.prod(place.shape)) * dtype.itemsize
        return moved[place.start : stop].view(dtype).view(place.shape)

    return map_arrays(skeleton, view, (PackedArray,))


class AsyncCopy:
    """A copy of a tensor to the CPU, on a separate stream; the tensor must not change before the copy is complete."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        device = tensor.device
        if device.type != "cuda":
            self._copy = tensor.cpu()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = _stream_of(device, _from_device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        tensor.record_stream(stream)

    def wait(self) -> torch.Tensor:
        """Wait, and return the values as a tensor."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy

    def take(self) -> np.ndarray:
        """Wait, and return the values as an array."""
        return self.wait().numpy()


def copy_before_change(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a tensor to the CPU; return a function that waits for the copy and returns it. Later GPU work also waits."""
    if tensor.device.type != "cuda":
        copied = tensor.to("cpu", copy=True)
        return lambda: copied
    late = AsyncCopy(tensor)
    torch.cuda.current_stream(tensor.device).wait_stream(_stream_of(tensor.device, _from_device))
    return late.wait


def send_tensor(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `buffer` (pinned memory for a GPU) on `device`; the copy runs in parallel with other work."""
    if device.type != "cuda":
        return buffer.to(device)
    with on_copy_stream(device) as hand_over:
        # The memory of the copy is reused when both streams have finished with it.
        return hand_over(buffer.to(device, non_blocking=True))


@contextlib.contextmanager
def on_copy_stream(device: torch.device) -> Iterator[Callable[[T], T]]:
    """Run the block on the stream for incoming arrays, in parallel with the device's current work; on a CPU, at once.

    The block gets a function that hands tensors over to the current stream, so that later work waits for the tensors.
    """
    if device.type != "cuda":
        yield lambda value: value
        return
    at_work, stream = torch.cuda.current_stream(device), _stream_of(device, _to_device)

    def hand_over(value: T) -> T:
        at_work.wait_stream(stream)
        return map_arrays(value, lambda tensor: (tensor.record_stream(at_work), tensor)[1], (torch.Tensor,))

    with torch.cuda.stream(stream):
        yield hand_over


def _stream_of(device: torch.device, streams: "dict[torch.device, torch.cuda.Stream]") -> "torch.cuda.Stream":
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]
