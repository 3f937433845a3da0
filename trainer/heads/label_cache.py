"""Label embeddings of a while ago as further negatives (Lindgren et al., NeurIPS 2021, the streaming cache)."""

from typing import NamedTuple

import numpy as np
import torch

from trainer.negatives.random_pool import draw_pool

_STREAM = 2  # of the random pool's generator


class Stale(NamedTuple):
    """Labels `ids` int64 [c], ascending and each once, and their `z` [c, D] as they were when they were drawn."""

    ids: np.ndarray
    z: torch.Tensor


class LabelCache:
    """Up to `size` of `labels` labels and their embeddings, without a graph, the oldest first; on every rank all.

    Each step draws a `steps`-th of the cache anew, uniformly, and as many of the oldest go: no embedding gets older
    than `steps` steps. A label that is drawn again counts by its newest embedding.
    """

    def __init__(self, size: int, steps: int, labels: int, dimension: int, seed: int) -> None:
        self._size, self._share = size, -(-size // steps)
        self._labels, self._seed = labels, seed
        self._ids, self._z = torch.empty(0, dtype=torch.int64), torch.empty(0, dimension)

    def draw(self, epoch: int, step: int) -> np.ndarray:
        """The labels [R] int64 that a step brings, the same on every rank."""
        return draw_pool(self._labels, self._share, seed=self._seed, epoch=epoch, step=step, stream=_STREAM)

    def add(self, ids: np.ndarray, z: torch.Tensor) -> None:
        """Put labels `ids` [R] with their `z` [R, D] in the place of the oldest."""
        self._ids = torch.cat([self._ids, torch.from_numpy(ids)])[-self._size :]
        self._z = torch.cat([self._z, z])[-self._size :]

    def outside(self, pool: np.ndarray | range) -> Stale:
        """What is there of labels that `pool`, ascending, is without."""
        # Reversed, the first of each label is its newest.
        ids, place = np.unique(self._ids.numpy()[::-1], return_index=True)
        kept = ~np.isin(ids, np.asarray(pool), assume_unique=True)
        return Stale(ids[kept], self._z[torch.from_numpy(len(self._ids) - 1 - place[kept])])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of it."""
        return {"ids": self._ids, "z": self._z}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `tensors`."""
        self._ids, self._z = tensors["ids"].clone(), tensors["z"].clone()
