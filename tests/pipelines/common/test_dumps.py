"""Beside a trainer that is not there yet, or no longer: the watcher says for what it waits, and misses nothing."""

import functools
import shutil
import threading
import time
from pathlib import Path

import pytest

from pipelines import dumps as watched
from pipelines.dumps import RETRIES, watch_dumps
from schemas import owners, waits
from schemas.errors import LASTING_STATUSES, AccessError, ExtremisError, InputError, PlanError, RoomError, StorageError
from schemas.manifest import Manifest
from schemas.owners import find_signs
from schemas.states import state

TABLES = {"queries": Manifest(kind="negatives", quality={"recall_at_k": 0.97})}


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

    def make(epoch: int) -> dict[str, Manifest]:
        made.append(epoch)
        if len(made) == 2:
            (run / "finished.json").touch()
        return TABLES

    assert watch_dumps(str(run), "mined", dumps, make, say) == 2
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

    def make(epoch: int) -> dict[str, Manifest]:
        made.append(epoch)
        if len(made) <= failures:
            raise error
        (tmp_path / "finished.json").touch()
        return TABLES

    dumps, lines = {2: "digest"}, list[str]()
    watch = functools.partial(watch_dumps, str(tmp_path), "mined", lambda: dumps, make, lines.append)
    if status:
        with pytest.raises(ExtremisError, match=str(error)) as raised:
            watch()
        assert raised.value.exit_status == status
    else:
        assert watch() == 1
    tried = 0 if status in LASTING_STATUSES else min(failures, RETRIES)
    assert lines == [f"{error} Retry {number + 1} of 5." for number in range(tried)]


def test_others_see_what_it_does_and_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watched, "_POLL_LOCAL", 0.05)
    (tmp_path / "config.toml").touch()
    seen, dumps = list[dict[str, object]](), {2: "digest"}

    def look(*_: object) -> dict[int, str]:
        time.sleep(0.1)
        for sign in find_signs(str(tmp_path)):
            assert (sign.owner.doing, sign.claims) == ("mined", False)
            assert abs(sign.beat["at"] - time.time()) < 60
            seen.append(sign.beat["state"])
        if seen and "waits_for" in seen[-1]:
            (tmp_path / "finished.json").touch()
        return dumps

    def make(epoch: int) -> dict[str, Manifest]:
        look()
        return TABLES

    threading.Thread(target=lambda: [look() for _ in range(20)], daemon=True).start()  # another process
    assert watch_dumps(str(tmp_path), "mined", lambda: dumps, make, lambda line: None) == 1
    working = next(each for each in seen if "waits_for" not in each)
    assert working == {"tables": 0, "retries": 0, "epoch": 2}
    waiting = next(each for each in seen if "waits_for" in each)
    assert waiting["waits_for"] == f"the next dump of {tmp_path} after epoch 2"
    assert (waiting["tables"], waiting["recall"]) == (1, 0.97)
    assert find_signs(str(tmp_path)) == []
    assert state() == {}
