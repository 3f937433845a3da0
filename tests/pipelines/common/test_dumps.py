"""Beside a trainer that is not there yet, or no longer: the watcher says for what it waits, and misses nothing."""

import functools
import shutil
from pathlib import Path

import pytest

from pipelines import dumps as watched
from pipelines.dumps import RETRIES, watch_dumps
from schemas import waits
from schemas.errors import LASTING_STATUSES, AccessError, ExtremisError, InputError, PlanError, RoomError, StorageError


def test_a_run_that_comes_goes_and_comes_again_is_waited_for_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is made anew may have the very dumps of the one before; its tables are gone with that one."""
    monkeypatch.setattr(waits, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watched, "_POLL_LOCAL", 0.05)
    run, lines, made = tmp_path / "run", list[str](), list[int]()

    def dumps() -> dict[int, str]:
        return {int(path.name): path.read_text() for path in run.glob("[0-9]")}

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) in (1, 4):
            run.mkdir()
            (run / "config.toml").touch()
        elif len(lines) in (2, 5):
            (run / "3").write_text("digest")
        elif len(lines) == 3:
            shutil.rmtree(run)

    def make(epoch: int) -> bool:
        made.append(epoch)
        if len(made) == 2:
            (run / "finished.json").touch()
        return True

    assert watch_dumps(str(run), dumps, make, say) == 2
    assert made == [3, 3]
    waited = ["dump" if line.startswith("waiting for the next dump of ") else "run" for line in lines]
    assert waited == ["run", "dump", "dump", "run", "dump"]


@pytest.mark.parametrize(
    ("error", "failures", "status"),
    [
        *((PlanError("full"), failures, status) for failures, status in ((2, 0), (RETRIES + 1, 6))),
        *((StorageError("away"), failures, status) for failures, status in ((2, 0), (RETRIES + 1, 3))),
        (RoomError("full"), RETRIES + 1, 6),
        (InputError("wrong"), 1, 2),
        (AccessError("closed"), 1, 4),
    ],
)
def test_what_may_pass_is_tried_again_some_times_and_what_lasts_is_not(
    error: ExtremisError, failures: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_POLL_LOCAL", 0.001)
    made = list[int]()

    def make(epoch: int) -> bool:
        made.append(epoch)
        if len(made) <= failures:
            raise error
        (tmp_path / "finished.json").touch()
        return True

    dumps, lines = {2: "digest"}, list[str]()
    watch = functools.partial(watch_dumps, str(tmp_path), lambda: dumps, make, lines.append)
    if status:
        with pytest.raises(ExtremisError, match=str(error)) as raised:
            watch()
        assert raised.value.exit_status == status
    else:
        assert watch() == 1
    tried = 0 if status in LASTING_STATUSES else min(failures, RETRIES)
    assert lines == [f"{error} Retry {number + 1} of 5." for number in range(tried)]
