"""Progress: what workers count is what the launching process shows, however they work; every row once in the end."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import progress as progress_of_steps
from pipelines.flow import Flow
from pipelines.progress import Count, Meter, StepProgress, Watch, say_seconds
from pipelines.runners.local import choose_runner
from schemas.states import state
from tests.command import PROCESSES

COUNTS = st.builds(Count, st.integers(0, 9), st.integers(0, 9), st.floats(0, 9), st.floats(0, 9))


def work(number: int, meter: Meter, seconds: float) -> int:
    meter.start("work")
    time.sleep(seconds)
    packets = dict(meter.count_bytes("work", [(number, ("url", 0, 5, 0))]))
    meter.count("work", number)
    return len(packets)


class Shown:
    """Receiver of lines that shows steps, too."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.looks: list[Sequence[StepProgress]] = []
        self.states: list[dict[str, Any]] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def display(self) -> Iterator:
        def show(steps: Sequence[StepProgress]) -> bool:
            self.looks.append(steps)
            self.states.append(state())
            return True

        yield show


@given(COUNTS, COUNTS, COUNTS)
def test_counts_add_up_in_any_order(a: Count, b: Count, c: Count) -> None:
    assert a.add(b) == b.add(a)
    assert a.add(b).add(c) == a.add(b.add(c))
    assert a.add(Count()) == a


@pytest.mark.parametrize(("flags", "seconds"), [((), 0.2), (PROCESSES, 0.7)])
def test_every_row_and_byte_is_counted_once_whoever_works(
    flags: Sequence[str], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_of_steps, "_LOCAL_SECONDS", seconds / 2)
    watch, numbers = Watch(str(tmp_path), progress := Shown()), [1, 2, 3, 4, 5, 6]
    with choose_runner(flags) as runner:
        for some in (numbers[:4], numbers[4:]):  # flows that go on with a step
            watch.expect({"work": sum(numbers), "never begun": 7})
            flow = Flow()
            flow.create("Numbers", some).map("Work", work, watch.meter, seconds)
            runner.run(flow, watch)
    (step,) = watch.steps()
    assert (step.name, step.rows, step.total, step.bytes, step.is_finished) == ("work", 21, 21, 30, True)
    assert seconds <= step.seconds < 600
    watch.summarize()
    (line,) = progress.lines  # others are shown
    assert line.startswith("steps: work 21 rows in ")
    assert line.endswith(" s (30 B)")
    seen = [look[0].rows for look in progress.looks if look]
    assert seen == sorted(seen)
    assert any(0 < rows < 21 for rows in seen)
    shown = [each for each in progress.states if each.get("rows")]  # as heartbeats show it
    assert {(each["stage"], each["rows_total"]) for each in shown} == {("work", 21)}
    assert [each["rows"] for each in shown] == [rows for rows in seen if 0 < rows < 21]
    assert "stage" not in state()


def test_a_receiver_of_lines_alone_gets_one_soon(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = Watch(str(tmp_path), lines.append)
    watch.expect({"work": None})
    flow = Flow()
    flow.create("Numbers", [3]).map("Work", work, watch.meter, 1.2)
    choose_runner().run(flow, watch)
    assert lines[0].startswith(("work: 0 rows, 1 worker", "the workers are starting, "))


def test_work_that_is_done_again_does_not_exceed_the_total(tmp_path: Path) -> None:
    """A worker that was killed has told of rows that another did again."""
    watch = Watch(str(tmp_path), Shown())
    watch.expect({"work": 10})
    (tmp_path / "progress").mkdir()
    for name in ("killed", "second"):
        (tmp_path / "progress" / f"{name}.json").write_text(json.dumps({"work": Count(8, 1, 0.0, 1.0)}))
    (tmp_path / "progress" / "torn.json").write_text('{"work": [8')
    (step,) = watch.steps()
    assert (step.rows, step.total, step.workers, step.is_finished) == (10, 10, 2, True)


def test_a_step_says_what_is_left() -> None:
    step = StepProgress("tokenize", 2000, 10_000, 0, 4.0, 2, 4.0)
    assert str(step) == "tokenize: 2,000 of 10,000 rows, 500 rows/s, 16 s left, 2 workers"
    assert str(StepProgress("read", 2000, None, 0, 4.0, 1, 4.0)) == "read: 2,000 rows, 500 rows/s, 1 worker"
    assert [say_seconds(each) for each in (7.6, 65, 7800)] == ["8 s", "1:05 min", "2:10 h"]
