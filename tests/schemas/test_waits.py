"""Every wait says for what it waits, since when and until when: not at once, and not too often."""

import contextlib
import re
import threading
import time

import pytest

from schemas import waits
from schemas.states import showing, state
from schemas.waits import Wait, waiting

CLOCK = r"\d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say after a tenth of a second what is said after 5, and again after half a second in place of a minute."""
    monkeypatch.setattr(waits, "SAY_SECONDS", 0.5)
    monkeypatch.setattr(waits, "SILENT_SECONDS", 0.1)


def test_a_wait_is_said_once_it_lasts_and_again_after_a_while() -> None:
    lines: list[str] = []
    with Wait("the moon", lines.append):
        pass
    with Wait("", lines.append):
        time.sleep(0.3)
    assert lines == []
    began = time.monotonic()
    for _ in waiting(
        "s3://user:secret@host/run", lines.append, seconds=0.9, every=0.02, until="(refresh.wait_seconds)"
    ):
        pass
    assert time.monotonic() - began == pytest.approx(0.9, abs=0.3)
    assert len(lines) == 2
    said = rf"waiting for s3://\*\*\*@host/run since {CLOCK}, until {CLOCK} at the latest \(refresh.wait_seconds\)"
    assert all(re.fullmatch(said, line) for line in lines), lines


def test_what_has_nobody_else_to_tell_tells_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(waits, "_listeners", [lines.append])
    with Wait("the others", until="they come"):
        time.sleep(0.35)
    assert [re.sub(CLOCK, "NOW", line) for line in lines] == ["waiting for the others since NOW, until they come"]


def test_another_thing_is_waited_for_anew_and_a_signal_ends_it() -> None:
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        raise ValueError("whoever is told must not end what waits")

    stop = threading.Event()
    for number, wait in enumerate(waiting("a run", tell, every=0.05, stop=stop)):
        wait.change("a run" if number < 10 else "a dump")
        if len(lines) == 2:
            stop.set()
    assert [re.sub(CLOCK, "NOW", line) for line in lines] == [
        "waiting for a run since NOW, until the process is stopped",
        "waiting for a dump since NOW, until the process is stopped",
    ]


def test_of_the_waits_of_a_group_one_is_told_at_a_time_with_its_cause() -> None:
    lines: list[str] = []
    waiting_for = [Wait(f"file {number}", lines.append, group="store", until="it answers") for number in range(20)]
    with contextlib.ExitStack() as stack:
        for wait in waiting_for:
            wait.cause = "Connection refused"
            stack.enter_context(wait)
        time.sleep(1.4)
    assert 2 <= len(lines) <= 3, lines
    said = rf"waiting for file \d+ \(Connection refused\) since {CLOCK}, until it answers"
    assert all(re.fullmatch(said, line) for line in lines), lines


def test_a_state_has_the_longest_wait_and_what_is_shown_in_this_order() -> None:
    assert state() == {}
    with showing({"step": 1, "epoch": 2}.copy), showing({"step": 3, "none": None}.copy), showing(lambda: 1 / 0):
        assert state() == {"step": 3, "epoch": 2}
        with Wait("the first") as first, Wait("s3://key:secret@bucket/x"):
            first._since -= 1
            assert state() == {"step": 3, "epoch": 2, "waits_for": "the first", "waits_since": first._since}
        with Wait("https://user:secret@host/x"):
            assert "secret" not in str(state())
    assert state() == {}
