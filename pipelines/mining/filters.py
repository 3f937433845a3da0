"""False-negative filters, applied once all blocks are merged: the rank window and the margin to the weakest positive.

NV-Retriever (arXiv:2407.15831) calls them Top-k shifted by N, TopK-MarginPos and TopK-PercPos.

Ranks [skip_top, window) are counted over all labels that are neither positive nor filtered, best first. With a margin
a negative is kept where its score < p - margin - relative_margin · |p|, p the lowest score among the row's positives.
Rows without positives keep theirs.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipelines.options import MineOptions
from search.candidates import EMPTY, best, unpack


def has_margin(options: MineOptions) -> bool:
    """Tell whether the scores of positives matter."""
    return options.margin is not None or options.relative_margin is not None


def fetched(options: MineOptions, width: int) -> int:
    """Return how many candidates of each label range let a row keep `width`, unless a margin drops more."""
    return options.window or options.skip_top + width * (2 if has_margin(options) else 1)


def limits(options: MineOptions, weakest: np.ndarray) -> np.ndarray:
    """Bound scores float32 [B] by the weakest positive's score [B], which is infinity where there is none."""
    some = np.isfinite(weakest)
    positive = np.where(some, weakest, np.float32(0)).astype(np.float64)
    highest = positive - (options.margin or 0.0) - (options.relative_margin or 0.0) * np.abs(positive)
    return np.where(some, highest, np.inf).astype(np.float32)


def select(
    ranges: Sequence[np.ndarray],
    weakest: np.ndarray,
    options: MineOptions,
    width: int,
    counts: Counter[str] | None = None,
) -> np.ndarray:
    """Return the best `width` keys of each label range that pass: G times [B, F] sorted, weakest [B] -> [B, G · width].

    Each range's columns are best first, with EMPTY behind. `counts` gets each candidate under the first rule that drops
    it, and those that are kept.
    """
    counts = Counter() if counts is None else counts
    ranges = list(ranges)
    ranked = ranges[0] if len(ranges) == 1 else np.sort(np.concatenate(ranges, axis=1), axis=1)
    if options.skip_top:
        last = _key_at(ranked, options.skip_top - 1)
        ranges = [_drop(keys, keys <= last[:, None], counts, "skipped_top") for keys in ranges]
    if options.window is not None:
        last = _key_at(ranked, options.window - 1)
        ranges = [_drop(keys, keys > last[:, None], counts, "beyond_window") for keys in ranges]
    if has_margin(options):
        highest = limits(options, weakest)
        ranges = [_drop(keys, unpack(keys)[1] >= highest[:, None], counts, "above_margin") for keys in ranges]
    kept = np.concatenate([best(keys, width) for keys in ranges], axis=1)
    counts["kept"] += int((kept != EMPTY).sum())
    return kept


def _key_at(ranked: np.ndarray, rank: int) -> np.ndarray:
    """Return the key of that rank [B], or the last one below EMPTY where a row has fewer."""
    if rank >= ranked.shape[1]:
        return np.full(len(ranked), EMPTY - np.uint64(1))
    return np.minimum(ranked[:, rank], EMPTY - np.uint64(1))


def _drop(keys: np.ndarray, gone: np.ndarray, counts: Counter[str], rule: str) -> np.ndarray:
    gone &= keys != EMPTY
    counts[rule] += int(gone.sum())
    return np.where(gone, EMPTY, keys)
