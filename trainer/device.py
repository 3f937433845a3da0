"""The device that a run computes on, settings of torch and of the process, and generators of random numbers."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

import torch

from schemas.errors import InputError
from schemas.randomness import Purpose, torch_seed

CPU = torch.device("cpu")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20  # bytes: of free memory in a heap, and of a piece of it


@functools.cache
def keep_freed_memory() -> None:
    """Have the process keep memory that a batch frees for the next one.

    By default glibc returns blocks of some megabytes to the system, which clears them page by page for the next batch.
    This depends on earlier frees of the process; planning a batch with own pools then took twice as long. Elsewhere
    nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)


def open_device(name: str) -> torch.device:
    """Return the device `name`: auto, cpu, cuda or cuda:N. Raises InputError if it is not there.

    `auto` is a GPU if there is one, else the CPU. Without a number it is the GPU of LOCAL_RANK, which torchrun sets.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = name.partition(":")
    if kind == "cpu" or (kind == "auto" and not gpus):
        return CPU
    if not gpus:
        built = "PyTorch finds no GPU here" if torch.version.cuda else "this PyTorch is built for CPUs alone"
        raise InputError(f"device {name!r}: {built}. Choose 'auto' or 'cpu' (--device, train.device).")
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) % gpus
    if index >= gpus:
        numbers = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise InputError(f"device {name!r}: this machine has {numbers}. Choose one of these, or 'auto'.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def describe_device(device: torch.device) -> str:
    """Return the device with its maker's name for it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Return a context in which products have the type `dtype`; None: the type of the tensors."""
    if device.type not in ("cpu", "cuda"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


@contextlib.contextmanager
def products_with(vectors: torch.Tensor) -> Iterator[None]:
    """Multiply float32 by narrow `vectors`, widened, in TF32 on a GPU: its 10 bits of a fraction hold all of theirs.

    The other side is rounded to them; sums are float32. Nothing changes for float32 vectors, and on a CPU.
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
    """Return a @ b in float32, of float32 or bfloat16: a CPU widens these, a GPU multiplies them as such."""
    if a.dtype != torch.float32 and a.device.type != "cpu":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@contextlib.contextmanager
def denormals_flushed() -> Iterator[None]:
    """Adagrad's sums and Adam's moments fade into denormals, which are slow on most processors.

    The setting belongs to the process, so it is restored after the block.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def torch_generator(seed: int, purpose: Purpose, *counters: int) -> torch.Generator:
    """Return a torch CPU generator for up to three `counters`, as `schemas.randomness.generator` is keyed."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *counters))
