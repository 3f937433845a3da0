"""RUN/run.log: all lines of a run, on a disk and in a store, and nothing where a command fails early."""

from pathlib import Path

import pytest

from extremis.console import output, say
from extremis.supervisor import logged
from schemas import code_version, commit, storage
from schemas.layout import RunLayout


@pytest.mark.parametrize("place", ["local", "memory"])
def test_every_line_is_kept_once_it_has_begun(tmp_path: Path, place: str) -> None:
    run = str(tmp_path / "run") if place == "local" else f"memory://logged{tmp_path}/run"
    (tmp_path / "run").mkdir()
    heard: list[str] = []
    with output(listener=lambda event: heard.append(str(event))):
        with logged(run):
            say("lost: it never begins")
        assert not storage.exists(RunLayout(run).log)
        for number in range(2):  # a run, and what goes on with it
            with logged(run) as log:
                say(f"first {number}")
                with logged(run) as inner, output(log_only=True):
                    assert inner is log
                    inner.begin()
                    say(f"aside {number}")
                say(f"last {number}")
    lines = storage.read_bytes(RunLayout(run).log).decode().splitlines()
    by = f"Extremis {code_version()}, commit {commit()}"
    assert [line.split("  ", 1)[1] for line in lines] == [
        word if word == by else f"{word} {number}" for number in range(2) for word in (by, "first", "aside", "last")
    ]
    assert [line for line in heard if line.startswith("aside")] == []
    assert len(heard) == 5
