"""Beside a trainer that is not there yet, or no longer: the watcher says for what it waits, and misses nothing."""

import shutil
from pathlib import Path

import pytest

from pipelines.common.watch import watch_dumps
from schemas import waits


def test_a_run_that_comes_goes_and_comes_again_is_waited_for_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is made anew may have the very dumps of the one before; its tables are gone with that one."""
    monkeypatch.setattr(waits, "SILENT_SECONDS", 0.1)
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

    assert watch_dumps(str(run), dumps, make, say, poll_seconds=0.05) == 2
    assert made == [3, 3]
    waited = [line.removeprefix("waiting for a ").partition(" ")[0] for line in lines]
    assert waited == ["run", "dump", "dump", "run", "dump"]
