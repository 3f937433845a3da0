"""What is left of a command: right at a steady pace, at most the time of a limit, silent while unknown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extremis import console
from extremis.console import RemainingTime


class Clock:
    """Stands in for the module `time`: seconds pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def seconds(said: str) -> float:
    number, unit = re.fullmatch(r"about (\d+) (s|min) left", said).groups()
    return float(number) * (60 if unit == "min" else 1)


@given(st.floats(20, 80), st.floats(0, 50), st.floats(0.2, 0.9))
def test_a_steady_pace_is_foretold(own: float, after: float, share: float) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "time", clock)
        left = RemainingTime()
        left.begin(0.0, lambda taken: after / own * taken)
        assert left() == ""
        assert left(1e-9) == ""
        clock.now = own * share
        expected = own * (1 - share) + after
        assert seconds(left(share)) == pytest.approx(expected, abs=0.51 if expected < 99 else 31)


def test_a_limit_and_an_overdue_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    left = RemainingTime(limit=60.0)
    left.begin(20.0, lambda own: 600.0)
    assert left() == "about 60 s left"
    clock.now = 19.0
    assert left() == "about 41 s left"
    clock.now = 40.0
    assert left() == "about 20 s left"  # of the limit
    left.begin(0.0, lambda own: 10.0)
    assert left() == ""
    left.begin(50.0, lambda own: 10.0)
    clock.now = 60.0
    assert left() == "about 40 s left"
