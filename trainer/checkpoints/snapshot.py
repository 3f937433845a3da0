"""Rows as they were at one moment, while a training goes on to change them: copied when they are, and not before."""

import threading
from collections.abc import Mapping

import numpy as np
import torch


class RowSnapshot:
    """Rows [0, n) of `tensors` [n, ...] as they are now.

    The thread that changes rows calls `keep` first; another reads ranges of rows, each once. Memory: a byte a row, the
    range that is being read, and the rows changed before the range that they are in was read.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        # Whether a row may be changed: it is kept, or has been read.
        self._free = np.zeros(len(next(iter(tensors.values()), ())), bool)
        self._kept: list[tuple[np.ndarray, dict[str, torch.Tensor]]] = []
        self._lock = threading.Lock()

    def keep(self, ids: np.ndarray) -> None:
        """Keep rows `ids` [C], which are about to change."""
        with self._lock:
            fresh = ids[~self._free[ids]]
            if not len(fresh):
                return
            self._free[fresh] = True
            rows = torch.from_numpy(fresh)
            kept = {name: value.index_select(0, rows.to(value.device)) for name, value in self._tensors.items()}
            self._kept.append((fresh, kept))

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Copy rows [start, stop) as they were; ranges are read in ascending order."""
        # Without the lock: a row that changes meanwhile has been kept before, and is put right below.
        copies = {name: value[start:stop].clone() for name, value in self._tensors.items()}
        with self._lock:
            left = []
            for ids, kept in self._kept:
                inside = np.flatnonzero((ids >= start) & (ids < stop))
                for name, rows in kept.items():
                    places = torch.from_numpy(ids[inside] - start).to(rows.device)
                    copies[name].index_copy_(0, places, rows[torch.from_numpy(inside).to(rows.device)])
                if (ids >= stop).any():
                    left.append((ids, kept))
            self._kept = left
            self._free[start:stop] = True
        return copies
