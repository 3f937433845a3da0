"""Contiguous ranges of labels for the ranks, with about equal work even if popular labels come first.

A label's work in a step is its number of positives, hard negatives and random negatives. Positives, and roughly hard
negatives, are proportional to the label's frequency. Random negatives are mostly independent of frequency.
"""

from collections.abc import Iterable

import numpy as np

from schemas.layout import DataLayout
from schemas.table import Table
from trainer.methods.recipe import ClassifierRecipe, Recipe

MOST_LABELS = 1.25  # maximum number of a rank's labels, as a multiple of L/G; bounds the rank's memory
_EVEN = 1.05  # ranges have equal numbers of labels up to this ratio of the maximum work to the mean work
_STRIDE = 18  # log2 of the number of places with exact work, without frequent labels; work in between is interpolated
_FREQUENT = 14  # labels with more than 2 ** -_FREQUENT of the points are frequent


def label_bounds(data: DataLayout, recipe: Recipe, ranks: int) -> list[int] | None:
    """Return bounds [G + 1] of ranges with about equal work; None means ranges with equal numbers of labels.

    Memory does not grow with L. Raises TableError.
    """
    labels = Table.open(data.labels, "labels")
    points = labels.parameters.get("training_points")
    if ranks == 1 or not points or not isinstance(recipe, ClassifierRecipe) or recipe.negatives.all_labels:
        return None
    groups = (group.column("frequency").to_numpy() for group in labels.batches(["frequency"]))
    ends, sums = cumulated(groups, labels.rows)
    negatives, batch, positives = recipe.negatives, recipe.order.batch, sums[-1] / points
    drawn = negatives.pool_size(batch, positives, labels.rows) or negatives.draws(batch) / batch
    popular = positives + negatives.max_hard + negatives.by_frequency * drawn
    uniform = max((1 - negatives.by_frequency) * drawn, 1e-3 * popular)  # every label has some work
    return balanced_bounds(ends, popular * sums / max(1, sums[-1]) + uniform * ends / max(1, labels.rows), ranks)


def cumulated(groups: Iterable[np.ndarray], labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ascending label ends [K], including 0 and L, and the sum of frequencies [K] before each end.

    `groups` yields frequencies [n] in label order. Ends are evenly spaced, with additional ends before and after
    frequent labels.
    """
    stride, first, total = max(1, labels >> _STRIDE), 0, 0
    ends, sums = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    for group in groups:
        if not len(group):
            continue
        within = total + np.cumsum(group, dtype=np.int64)
        steps = np.flatnonzero(np.diff(within // max(1, within[-1] >> _FREQUENT)))
        chosen = np.unique(np.concatenate([[0, len(group) - 1], steps, steps + 1, np.arange(0, len(group), stride)]))
        ends.append(first + chosen + 1)
        sums.append(within[chosen])
        first, total = first + len(group), int(within[-1])
    return np.concatenate(ends), np.concatenate(sums)


def balanced_bounds(ends: np.ndarray, work: np.ndarray, ranks: int) -> list[int] | None:
    """Return bounds [G + 1] of ranges that minimise the maximum work, with at most MOST_LABELS * L/G labels each.

    `work` [K] is the work of all labels before each of `ends` [K]. Returns None if there are fewer labels than ranks,
    or if ranges with equal numbers of labels are about as good.
    """
    labels = int(ends[-1])
    most_labels = -(-int(MOST_LABELS * labels) // ranks)
    equal = np.interp(np.arange(ranks + 1) * labels // ranks, ends, work)
    mean = work[-1] / ranks
    if labels < ranks or np.diff(equal).max() <= _EVEN * mean:
        return None

    def cut(most: float) -> list[int]:
        """Cut ranges with work `most` each, starting at the first label; the last range may end before L."""
        bounds = [0]
        for left in range(ranks - 1, -1, -1):
            low = bounds[-1]
            reached = int(np.interp(np.interp(low, ends, work) + most, work, ends) + 1e-6)
            bounds.append(min(max(reached, low + 1), low + most_labels, labels - left))
        return bounds

    low, high = mean, float(work[-1])
    while high - low > 1e-4 * mean:
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1] == labels else (middle, high)
    return cut(high)
