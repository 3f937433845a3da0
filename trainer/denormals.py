"""Numbers too small to be told from nothing, which are slow."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def denormals_flushed() -> Iterator[None]:
    """Adagrad's sums and Adam's moments fade into denormals, which are slow on most processors.

    The setting is the whole process's: whoever has the turn between two epochs finds it as it was.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
