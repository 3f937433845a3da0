"""False-negative filters, applied once all blocks are merged: the rank window and the margin to the weakest positive.

NV-Retriever (arXiv:2407.15831) calls them Top-k shifted by N, TopK-MarginPos and TopK-PercPos.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.candidates import EMPTY, best, unpack


@dataclass(frozen=True)
class Filters:
    """Ranks [skip_top, window) are counted over all labels that are no positives and not struck, best first.

    With a margin a negative is kept where its score < p - margin - relative_margin · |p|, p the lowest score among the
    row's positives. Rows without positives keep theirs.
    """

    skip_top: int = 0
    window: int | None = None
    margin: float | None = None
    relative_margin: float | None = None

    @property
    def has_margin(self) -> bool:
        return self.margin is not None or self.relative_margin is not None

    def fetch(self, width: int) -> int:
        """Candidates a row needs of each label range, so that `width` are left: at best, where there is a margin."""
        return self.window or self.skip_top + width * (2 if self.has_margin else 1)

    def limits(self, weakest: np.ndarray) -> np.ndarray:
        """Scores have to be below: float32 [B] of the weakest positive's score [B], infinity where there is none."""
        if not self.has_margin:
            return np.full(len(weakest), np.inf, np.float32)
        some = np.isfinite(weakest)
        positive = np.where(some, weakest, np.float32(0)).astype(np.float64)
        limits = positive - (self.margin or 0.0) - (self.relative_margin or 0.0) * np.abs(positive)
        return np.where(some, limits, np.inf).astype(np.float32)


@dataclass
class Funnel:
    """What became of the candidates that were merged, by rule."""

    skipped_top: int = 0
    beyond_window: int = 0
    above_margin: int = 0
    kept: int = 0

    def add(self, other: "Funnel") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def select(
    ranges: Sequence[np.ndarray], weakest: np.ndarray, filters: Filters, width: int
) -> tuple[np.ndarray, Funnel]:
    """The best `width` keys of each label range that pass: G times [B, F] sorted, weakest [B] -> [B, G · width].

    Each range's columns are best first, with EMPTY behind. A candidate counts under the first rule that drops it.
    """
    found, funnel = list(ranges), Funnel()
    ranked = found[0] if len(found) == 1 else np.sort(np.concatenate(found, axis=1), axis=1)
    if filters.skip_top:
        last = _key_at(ranked, filters.skip_top - 1)
        found = [_drop(keys, keys <= last[:, None], funnel, "skipped_top") for keys in found]
    if filters.window is not None:
        last = _key_at(ranked, filters.window - 1)
        found = [_drop(keys, keys > last[:, None], funnel, "beyond_window") for keys in found]
    if filters.has_margin:
        limits = filters.limits(weakest)
        found = [_drop(keys, unpack(keys)[1] >= limits[:, None], funnel, "above_margin") for keys in found]
    kept = np.concatenate([best(keys, width) for keys in found], axis=1)
    funnel.kept = int((kept != EMPTY).sum())
    return kept, funnel


def _key_at(ranked: np.ndarray, rank: int) -> np.ndarray:
    """[B]: the key of that rank, or the last one below EMPTY where a row has fewer."""
    if rank >= ranked.shape[1]:
        return np.full(len(ranked), EMPTY - np.uint64(1))
    return np.minimum(ranked[:, rank], EMPTY - np.uint64(1))


def _drop(keys: np.ndarray, gone: np.ndarray, funnel: Funnel, rule: str) -> np.ndarray:
    gone &= keys != EMPTY
    setattr(funnel, rule, getattr(funnel, rule) + int(gone.sum()))
    return np.where(gone, EMPTY, keys)
