"""Exact nearest vectors on a GPU, by PyTorch, which is imported where there is a GPU, or one is asked for.

Products are computed in float32. What comes out is what a CPU finds up to rounding, which `search.block` settles.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import InputError

CPU = "cpu"
_SCORES = 1 << 28  # held at once, 1 GiB
_DRIVER = Path("/dev/nvidiactl")


def find_device(name: str) -> str:
    """Return `cpu` or `cuda:N` for auto, cpu, cuda or cuda:N. Raises InputError where it is not there."""
    if name == CPU or (name == "auto" and not _DRIVER.exists()):
        return CPU
    try:
        import torch
    except ImportError:
        gpus = 0
    else:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not gpus:
        return CPU
    number = name.partition(":")[2]
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) % max(1, gpus)
    if index >= gpus:
        raise InputError(f"device {name!r}: PyTorch finds {gpus} GPUs here. Give --device auto or cpu.")
    return f"cuda:{index}"


class DeviceVectors:
    """`vectors` float32 [n, D] on a device."""

    def __init__(self, vectors: np.ndarray, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._vectors = torch.from_numpy(np.ascontiguousarray(vectors)).to(device)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Do as `search.nearest.nearest`."""
        torch, vectors = self._torch, self._vectors
        x = torch.from_numpy(np.ascontiguousarray(queries)).to(vectors.device)
        scores = x.new_empty(len(x), 0)
        positions = torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
        step = max(count, _SCORES // max(1, len(x)))
        for start in range(0, len(vectors), step):
            block = x @ vectors[start : start + step].T
            best, places = block.topk(min(count, block.shape[1]), dim=1)
            # [B, count] of what came before, beside those of the block
            scores, positions = torch.cat([scores, best], 1), torch.cat([positions, places + start], 1)
            scores, order = scores.topk(min(count, scores.shape[1]), dim=1)
            positions = positions.gather(1, order)
        return scores.cpu().numpy(), positions.cpu().numpy()
