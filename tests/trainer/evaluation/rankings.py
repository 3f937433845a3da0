"""Random rankings and positives in the two forms that the tests need: lists for the peers, arrays for us."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st


class Case(NamedTuple):
    """Points of a small evaluation: lists of positives and of predictions (best first), and label frequencies."""

    positives: list[list[int]]
    predicted: list[list[int]]
    frequency: np.ndarray
    points: int

    @property
    def top(self) -> np.ndarray:
        width = max(map(len, self.predicted), default=0)
        return np.array([row + [-1] * (width - len(row)) for row in self.predicted], dtype=np.int64).reshape(
            len(self.predicted), width
        )

    @property
    def values(self) -> np.ndarray:
        return np.array([label for row in self.positives for label in row], dtype=np.int32)

    @property
    def offsets(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.positives)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few labels, so that hits are common; points without positives, and with few or no predictions, come up."""
    labels = draw(st.integers(1, 25))
    points = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, labels - 1), unique=True, max_size=15)
    rows = st.lists(row, min_size=points, max_size=points)
    train = draw(st.integers(3, 1000))
    # Equal frequencies are common, and with them equal propensities.
    frequency = draw(st.lists(st.sampled_from([0, 1, 2, train // 2, train]), min_size=labels, max_size=labels))
    return Case(draw(rows), draw(rows), np.array(frequency, dtype=np.int64), train)
