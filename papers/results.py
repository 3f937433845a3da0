"""Results of runs as JSON in the repository, and the statistics of a comparison: paired, over queries and seeds."""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from papers.claims import Paper, RunKey
from trainer.evaluation.metrics import Contributions

LEVELS = 240  # levels of a contribution: 1/2, 1/3, 1/4, 1/5, 1/6, 1/8 and 1/10 are exact
RESAMPLES = 1000

PackedContributions: TypeAlias = list[list[Any]]  # (greatest value, text) of `achieved`, and for ratios of `achievable`


class Interval(NamedTuple):
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """Measurements of one run. `made_from`: all stated facts that determine them. `raw_digest`: digest of the raw data.

    `cut`: the run was interrupted once.
    """

    made_from: dict[str, Any]
    commit: str
    seconds: float
    cut: bool
    queries: int
    metrics: dict[str, float]
    figures: dict[str, float]
    contributions: dict[str, PackedContributions] = field(default_factory=dict)
    raw_digest: str = ""

    def write(self, place: Path) -> None:
        """Write the result in one step, so that an interrupted command leaves no partial file."""
        rounded = {name: {k: round(v, 4) for k, v in getattr(self, name).items()} for name in ("metrics", "figures")}
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_suffix(".part")
        half.write_text(json.dumps({**asdict(self), **rounded}, indent=1, sort_keys=True) + "\n")
        half.replace(place)

    @property
    def is_trained(self) -> bool:
        """Whether P@1 is above that of always predicting the most frequent label; True for the result of a module."""
        return not self.metrics or self.metrics["P@1"] > self.figures.get("most_frequent", 0.0)

    @classmethod
    def find(cls, paper: Paper, key: RunKey) -> "Result | None":
        """Read the result of a run; None if it is missing, or made from other facts or other raw data."""
        place = place_of(paper, key)
        if not place.exists():
            return None
        result = cls(**json.loads(place.read_text()))
        is_current = result.made_from == paper.made_from(key) and paper.raw_digest(key.data) in ("", result.raw_digest)
        return result if is_current else None

    def unpack(self, metric: str) -> tuple[np.ndarray, ...]:
        """Return `achieved`, and `achievable` if present, [N] int64 each, in LEVELS of the greatest value."""
        parts = self.contributions[metric]
        levels = tuple(np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8) for _, text in parts)
        return tuple(each.astype(np.int64) for each in levels)


def place_of(paper: Paper, key: RunKey) -> Path:
    """Return the path of the JSON of a run."""
    return paper.folder / "runs" / f"{key}.json"


def pack(part: Contributions) -> PackedContributions:
    """Pack contributions into one byte per query, compressed: P@k for k <= 6 exactly, others in LEVELS steps."""
    columns = [column for column in part if column is not None]
    kept = []
    for column in columns:
        most = max(1.0, float(column.max(initial=0)))
        levels = np.rint(column.astype(np.float64) * (LEVELS / most)).astype(np.uint8)
        kept.append([round(most, 6), base64.b85encode(zlib.compress(levels.tobytes(), 9)).decode()])
    return kept


def difference(metric: str, a: Sequence[Result], b: Sequence[Result] = ()) -> Interval:
    """Return the metric x 100 of `a` (one result per seed) minus that of `b`, and the 95 % interval.

    The value is exact: packed contributions decide only the width of the interval. Percentile bootstrap over queries
    and seeds together: a resample draws both anew, and takes the same queries and seeds on both sides. Sums are of
    integers, so that the ends are the same on any machine.
    """
    sides = [_values(metric, side) for side in (a, b) if side]
    draw = np.random.default_rng(1)
    seeds = np.stack([np.bincount(draw.integers(len(a), size=len(a)), minlength=len(a)) for _ in range(RESAMPLES)])
    resampled = [(each[1:] * seeds).sum(1) / len(a) for each in sides]
    value, values = sides[0][0].mean(), resampled[0]
    if b:
        value, values = value - sides[1][0].mean(), values - resampled[1]
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def _values(metric: str, results: Sequence[Result]) -> np.ndarray:
    """Return the metric x 100 of each seed, for all queries and then for each resample, [1 + RESAMPLES, S].

    Each seed's column is shifted by the rounding of the packed contributions, so that its first value is exact.
    """
    columns = []
    for result in results:
        parts = result.unpack(metric)
        sums = [np.concatenate([[each.sum()], _resampled_sums(each)]).astype(np.float64) for each in parts]
        most = [float(greatest) for greatest, _ in result.contributions[metric]]
        below = sums[1] * most[1] if len(parts) > 1 else np.full(len(sums[0]), float(len(parts[0]) * LEVELS))
        column = 100 * sums[0] * most[0] / np.maximum(below, 1e-12)
        columns.append(column + (result.metrics[metric] - column[0]))
    return np.stack(columns, axis=1)


def _resampled_sums(levels: np.ndarray) -> np.ndarray:
    """Return the sum of `levels` [N] over each resample, [RESAMPLES]."""
    return np.array([int(levels @ counts) for counts in _resamples(len(levels))])


@lru_cache(maxsize=2)
def _resamples(points: int) -> np.ndarray:
    """Return how often each resample took each point, [RESAMPLES, N] uint8."""
    draw = np.random.default_rng(0)
    counts = (np.bincount(draw.integers(points, size=points), minlength=points) for _ in range(RESAMPLES))
    return np.stack([each.astype(np.uint8) for each in counts])


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean over seeds, and their standard deviation; 0 for one seed."""
    listed = list(values)
    return float(np.mean(listed)), float(np.std(listed, ddof=1)) if len(listed) > 1 else 0.0
