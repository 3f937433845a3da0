"""Judgement of paired costs: the median of their ratios with an interval, and accepted prices."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from math import comb
from pathlib import Path

SLOWER = 1.05  # ratio of now to then above which a figure counts as slower
COVERAGE = 0.95


@dataclass(frozen=True)
class Compared:
    """Medians of a figure then and now, and the median of the ratios per round with its interval."""

    then: float
    now: float
    ratio: float
    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        return self.low > SLOWER


@dataclass(frozen=True)
class Price:
    """A figure (a pattern) that a commit made more expensive, with the largest accepted ratio and the gain."""

    commit: str
    figure: str
    most: float
    gain: str


def compare(then: Sequence[float], now: Sequence[float]) -> Compared:
    """Compare costs round by round. Raises ValueError unless both sides have equally many values, all above 0."""
    ratios = sorted(after / before for before, after in zip(then, now, strict=True))
    skipped = _skipped(len(ratios))
    return Compared(
        statistics.median(then),
        statistics.median(now),
        statistics.median(ratios),
        ratios[skipped],
        ratios[-1 - skipped],
    )


def _skipped(rounds: int) -> int:
    """Count the values at each end of `rounds` sorted values that lie outside of the median's interval.

    The median lies between order statistics k and n - 1 - k with a probability of 1 - 2 P[Binomial(n, 1/2) <= k]. With
    fewer than 6 rounds even the whole range covers less than COVERAGE.
    """
    outside, skipped = 1.0, 0
    while 1 - 2 * (outside + comb(rounds, skipped + 1)) / 2**rounds >= COVERAGE:
        skipped += 1
        outside += comb(rounds, skipped)
    return skipped


def read_prices(file: Path) -> list[Price]:
    """Read the table in `file`: commit, figure, largest ratio, gain. Raises ValueError, which names the row."""
    prices = []
    for line in file.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "commit" or set(cells[0]) <= set("-: "):
            continue
        try:
            commit, figure, most, gain = cells
            prices.append(Price(commit, figure, float(most), gain))
        except ValueError:
            raise ValueError(f"{file}: {line}: expected | commit | figure | at most | for what |") from None
    return prices


def find_price(figure: str, ratio: float, prices: Sequence[Price], is_between: Callable[[str], bool]) -> Price | None:
    """Return the price that covers `figure` at `ratio`, from the commits between the compared commit and now."""
    for price in prices:
        if fnmatch(figure, price.figure) and ratio <= price.most and is_between(price.commit):
            return price
    return None
