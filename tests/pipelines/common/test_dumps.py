"""Beside a trainer that is not there yet, or no longer: the watcher says for what it waits, and misses nothing."""

import functools
import shutil
from pathlib import Path

import pytest

from pipelines import dumps as watched
from pipelines.dumps import RETRIES, watch_dumps
from schemas import waits
from schemas.errors import ExtremisError, InputError, RoomError, StorageError


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
    ("error", "failures"),
    [(RoomError("full"), 2), (StorageError("full"), 2), (StorageError("full"), RETRIES + 1), (InputError("wrong"), 1)],
)
def test_what_may_pass_is_tried_again_some_times_and_wrong_input_is_not(
    error: ExtremisError, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    if type(error) is InputError or failures > RETRIES:
        with pytest.raises(type(error), match=str(error)):
            watch()
    else:
        assert watch() == 1
    tried = 0 if type(error) is InputError else min(failures, RETRIES)
    assert lines == [f"full Retry {number + 1} of 5." for number in range(tried)]
