"""Settings of torch: denormals, and generators of random numbers."""

import contextlib
from collections.abc import Iterator

import torch

from schemas.randomness import Purpose, torch_seed


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


def torch_generator(seed: int, purpose: Purpose, *counters: int) -> torch.Generator:
    """Return a torch CPU generator for up to three `counters`, as `schemas.randomness.generator` is keyed."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *counters))
