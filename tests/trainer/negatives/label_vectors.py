"""Vectors of labels in an array, as sources of negatives read them."""

import numpy as np
import torch


class LabelVectors:
    """Vectors of the labels [start, stop) of `weight` [L, D], as it is at each call."""

    def __init__(self, weight: np.ndarray, start: int = 0, stop: int | None = None) -> None:
        self.start, self.stop = start, len(weight) if stop is None else stop
        self._weight = weight[start:stop]

    @property
    def vectors(self) -> torch.Tensor:
        return torch.from_numpy(self._weight)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self._weight[rows]
