"""The device of a run, settings of torch and of the process, and random number generators."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

import torch

from schemas.errors import InputError
from schemas.randomness import Purpose, torch_seed

CPU = torch.device("cpu")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # option numbers of glibc's mallopt
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20  # bytes: free memory that the heap keeps; largest block in the heap


@functools.cache
def keep_freed_memory() -> None:
    """Make the process reuse the memory of one batch for the next batch.

    By default, glibc may return freed blocks of a few megabytes to the system, depending on earlier frees. The system
    then has to clear each page before the next batch gets the memory, which doubled the time to plan a batch with own
    pools. On systems without glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)


def open_device(name: str) -> torch.device:
    """Return the device `name`: auto, cpu, cuda or cuda:N. Raises InputError if the device does not exist.

    `auto` is a GPU if there is one, else the CPU. Without a number, `cuda` is the GPU with number LOCAL_RANK, which
    torchrun sets.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = name.partition(":")
    if kind == "cpu" or (kind == "auto" and not gpus):
        return CPU
    if not gpus:
        built = "PyTorch finds no GPU here" if torch.version.cuda else "this PyTorch is built for CPUs only"
        raise InputError(f"device {name!r}: {built}. Choose 'auto' or 'cpu' (--device, train.device).")
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) % gpus
    if index >= gpus:
        numbers = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise InputError(f"device {name!r}: this machine has only {numbers}. Choose a GPU that exists, or 'auto'.")
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

    TF32 has a 10-bit mantissa. The float32 factor is rounded to TF32, and sums are in float32. For float32 `vectors`,
    and on a CPU, nothing changes.
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
    """Flush denormals to zero: Adagrad's sums and Adam's moments become denormal, which slows down most processors.

    The setting applies to the whole process, so the block turns it off at the end.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def torch_generator(seed: int, purpose: Purpose, *counters: int) -> torch.Generator:
    """Return a torch CPU generator for up to three `counters`, with the same keys as `schemas.randomness.generator`."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *counters))
