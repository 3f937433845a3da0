"""Zeros for large matrices: in memory, where unused pages take no space; in a file; or on a GPU."""

import contextlib
import math
import mmap

import torch

from schemas.errors import InputError, StorageError
from schemas.mapped import ScratchFile
from schemas.sizes import say_bytes
from trainer.device import CPU

IN_MEMORY, ON_HOST = "memory", "host"


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, storage: str = IN_MEMORY, device: torch.device = CPU
) -> torch.Tensor:
    """Return zeros of `shape` on `device`; on a CPU in memory, or in a new file in the directory `storage`.

    The file has no name, so it disappears however the process ends. Its space is reserved in advance, because a disk
    that fills up later would kill the process. Raises InputError if the directory does not exist, or if the matrix does
    not fit.
    """
    if device != CPU:
        return _on_device(shape, dtype, device)
    count = math.prod(shape)
    size = count * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    memory = _anonymous(size) if storage in (IN_MEMORY, ON_HOST) else _file(size, storage)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _on_device(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info(device)
        raise InputError(
            f"{device}: {shape[0]:,} rows need {say_bytes(math.prod(shape) * dtype.itemsize)}, and {say_bytes(free)} "
            "are free. Keep the classifier in main memory (classifier.storage = 'host'), or use a narrower "
            "classifier.dtype, a smaller encoder.dimension, or more GPUs (torchrun)."
        ) from None


def _anonymous(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Rows are far apart in memory: with pages of 4 KiB, each row costs a page table walk that no cache can serve.
        with contextlib.suppress(OSError):  # for kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _file(size: int, directory: str) -> mmap.mmap:
    try:
        memory = ScratchFile("rows of labels", directory).reserve(size)
    except StorageError as error:
        raise InputError(f"classifier.storage = {error} Or use 'memory', 'host', or a narrower dtype.") from error
    if hasattr(mmap, "MADV_RANDOM"):
        memory.madvise(mmap.MADV_RANDOM)  # do not read the pages around a row
    return memory
