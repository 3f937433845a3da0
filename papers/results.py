"""Results of runs as JSON in the repository, and the statistics of a comparison: paired, over texts and seeds."""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.common.imported_code import changed, to_json
from papers.claims import Paper, RunKey
from schemas.errors import InputError
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

    `cut`: the run was interrupted once. `code`: digests of the modules that it imported; empty if unknown.
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
    code: dict[str, str] = field(default_factory=dict)

    def write(self, place: Path) -> None:
        """Write the result in one step, so that an interrupted command leaves no partial file."""
        rounded = {name: {k: round(v, 4) for k, v in getattr(self, name).items()} for name in ("metrics", "figures")}
        _write(place, to_json({**asdict(self), **rounded}))

    @property
    def is_older(self) -> bool:
        """Whether code that the run imported has changed since, or is unknown."""
        return not self.code or bool(changed(self.code))

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
        """Return `achieved`, and `achievable` if present, [N] uint8 each, in LEVELS of the greatest value."""
        return tuple(_unpack(text, "u1") for _, text in self.contributions[metric])

    def place_of_texts(self, folder: Path) -> Path:
        """Return the path of the texts of the test queries: results of the same raw data and labels share them."""
        data = self.made_from["data"]
        return folder / "runs" / f"{data['raw']}-{data.get('every', 1)}-{self.raw_digest}.texts"

    def write_texts(self, folder: Path, texts: np.ndarray) -> None:
        """Write which test queries have the same of `texts` [N], if it is not known."""
        if not (place := self.place_of_texts(folder)).exists():
            _, first, text_of = np.unique(texts, return_index=True, return_inverse=True)
            _write(place, _pack((np.arange(len(texts)) - first[text_of]).astype("<i4")))

    def texts(self, folder: Path) -> np.ndarray:
        """Return the first query with each query's text, [N] int64. Raises InputError if N does not fit the result."""
        place = self.place_of_texts(folder)
        back = _unpack(place.read_text(), "<i4") if place.exists() else np.zeros(0, int)
        if len(back) != self.queries:
            raise InputError(
                f"{place} has the texts of {len(back)} queries, but a result has {self.queries}. Remove this file and "
                "the JSON of a run on these data, and repeat the run: it writes the texts."
            )
        return np.arange(len(back)) - back


def place_of(paper: Paper, key: RunKey) -> Path:
    """Return the path of the JSON of a run."""
    return paper.folder / "runs" / f"{key}.json"


def minutes_of(paper: Paper, key: RunKey) -> float:
    """Return the mean processor minutes of a run with any seed, or else its stated minutes."""
    found = [Result.find(paper, key._replace(seed=seed)) for seed in range(10)]
    taken = [result.figures["processor_seconds"] / 60 for result in found if result and not result.cut]
    return sum(taken) / len(taken) if taken else paper.runs[key.run].expected(key.data)


def pack(part: Contributions) -> PackedContributions:
    """Pack contributions into one byte per query, compressed: P@k for k <= 6 exactly, others in LEVELS steps."""
    kept = []
    for column in (column for column in part if column is not None):
        most = max(1.0, float(column.max(initial=0)))
        kept.append([round(most, 6), _pack(np.rint(column.astype(np.float64) * (LEVELS / most)).astype(np.uint8))])
    return kept


def _pack(numbers: np.ndarray) -> str:
    return base64.b85encode(zlib.compress(numbers.tobytes(), 9)).decode()


def _unpack(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), kind)


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_name(f"{place.name}.{os.getpid()}.part")  # two runs may write the same texts
    half.write_text(text)
    half.replace(place)


def difference(metric: str, texts: np.ndarray, a: Sequence[Result], b: Sequence[Result] = ()) -> Interval:
    """Return the metric x 100 of `a` (one result per seed) minus that of `b`, and the 95 % interval.

    The value is exact: packed contributions decide only the width of the interval. Percentile bootstrap over distinct
    texts and seeds together: a resample draws both anew, each text with all its queries, and the same on both sides;
    `texts` [N]: a number of each query's text. Sums are of integers, so that the ends are the same on any machine.
    """
    draw = np.random.default_rng(1)
    seeds = np.stack([np.bincount(draw.integers(len(a), size=len(a)), minlength=len(a)) for _ in range(RESAMPLES)])
    gains = _values(metric, texts, a) - (_values(metric, texts, b) if b else 0)
    low, high = np.quantile((gains[1:] * seeds).sum(1) / len(a), (0.025, 0.975))
    return Interval(float(gains[0].mean()), float(low), float(high))


def _values(metric: str, texts: np.ndarray, results: Sequence[Result]) -> np.ndarray:
    """Return the metric x 100 of each seed, for all queries and then for each resample, [1 + RESAMPLES, S].

    Each seed's column is shifted by the rounding of the packed contributions, so that its first value is exact.
    """
    columns, text_of = [], np.unique(texts, return_inverse=True)[1]
    for result in results:
        parts = [*result.unpack(metric), np.full(len(texts), LEVELS)]  # the last, if nothing limits what is achieved
        by_text = [np.bincount(text_of, part).astype(np.int64) for part in parts[:2]]
        achieved, below = (np.array([each @ times for times in _resamples(len(each))], float) for each in by_text)
        most = [*(greatest for greatest, _ in result.contributions[metric]), 1.0]
        column = 100 * achieved * most[0] / np.maximum(below * most[1], 1e-12)
        columns.append(column + (result.metrics[metric] - column[0]))
    return np.stack(columns, axis=1)


@lru_cache(maxsize=2)
def _resamples(texts: int) -> np.ndarray:
    """Return how often all queries together, and then each resample, have each text, [1 + RESAMPLES, texts] uint8."""
    draw = np.random.default_rng(0)
    counts = (np.bincount(draw.integers(texts, size=texts), minlength=texts) for _ in range(RESAMPLES))
    return np.stack([np.ones(texts, np.uint8), *(each.astype(np.uint8) for each in counts)])


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean over seeds, and their standard deviation; 0 for one seed."""
    listed = list(values)
    return float(np.mean(listed)), float(np.std(listed, ddof=1)) if len(listed) > 1 else 0.0
