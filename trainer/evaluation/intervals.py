"""Confidence intervals of metrics by the percentile bootstrap over points (Efron, 1979)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from schemas.errors import InputError
from schemas.randomness import Purpose, generator
from trainer.evaluation.metrics import Contributions, Metrics

_WEIGHTS = 1 << 22  # entries of one chunk of weights [S, N], 32 MiB


def with_intervals(metrics: Metrics, resamples: int = 1000) -> dict[str, Any]:
    """Return metrics x 100, and the ends of the 95 % interval of each. Raises InputError where no point was counted."""
    ends = bootstrap(metrics.contributions(), resamples)
    return {"metrics": metrics.result(), "intervals": {name: list(pair) for name, pair in ends.items()}}


def bootstrap(
    contributions: Mapping[str, Contributions], resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return metric -> ends x 100: its (1 - level)/2 and (1 + level)/2 quantiles over resamples of the N points.

    `contributions`: [N] each, as `Metrics.contributions()` gives them. All metrics see the same resamples, a ratio of
    sums is taken anew in each, and the same seed gives the same intervals on any machine.
    Raises InputError for a level outside (0, 1), no resamples or no points.
    """
    if not 0 < level < 1 or resamples < 1:
        raise InputError(
            f"a bootstrap needs 0 < level < 1 and resamples >= 1; got level {level}, {resamples} resamples."
        )
    achieved = np.stack([part.achieved for part in contributions.values()], axis=1).astype(np.float64)
    ratios = [part.achievable for part in contributions.values() if part.achievable is not None]
    is_ratio = np.array([part.achievable is not None for part in contributions.values()])
    achievable = np.stack(ratios, axis=1).astype(np.float64) if ratios else np.empty((len(achieved), 0))
    if not len(achieved):
        raise InputError("there is nothing to resample: no point was evaluated. Is the split empty?")

    values = np.empty((resamples, len(is_ratio)))
    for start, weights in _weights(len(achieved), resamples, seed):
        below = np.full((len(weights), len(is_ratio)), float(len(achieved)))
        below[:, is_ratio] = weights @ achievable
        # A resample where nothing could be achieved counts as 0, as in the metric itself.
        np.divide(weights @ achieved, below, out=(chunk := np.zeros_like(below)), where=below > 0)
        values[start : start + len(weights)] = 100 * chunk
    ends = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(contributions, *ends, strict=True)}


def _weights(points: int, resamples: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first resample, weights [S, N]) chunk by chunk: how often each resample of N draws took each point.

    Resample r has a counter-based generator of its own, so that the size of the chunks changes nothing.
    """
    rows = max(1, _WEIGHTS // points)
    for start in range(0, resamples, rows):
        chunk = np.empty((min(rows, resamples - start), points))
        for row in range(len(chunk)):
            draw = generator(seed, Purpose.SAMPLE, 0, 0, start + row)
            chunk[row] = np.bincount(draw.integers(points, size=points), minlength=points)
        yield start, chunk
