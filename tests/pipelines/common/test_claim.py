"""One miner a dump: told to the others, given up at the end, taken over from the dead."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines.common import claim
from pipelines.common.claim import ClaimedError, claimed
from tests.command import ROOT

HOLD = """
import sys, time
from pipelines.common.claim import claimed
with claimed(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(claim, "BEAT_SECONDS", 0.1)


def test_one_at_a_time(tmp_path: Path) -> None:
    root = str(tmp_path)
    with claimed(root):
        with pytest.raises(ClaimedError, match=r"being mined by process \d+ on .*Let it finish"), claimed(root):
            pass
        time.sleep(0.3)
        with pytest.raises(ClaimedError), claimed(root):
            pass
    assert list(tmp_path.iterdir()) == []
    with claimed(root):
        pass
    with pytest.raises(KeyError), claimed(root):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_s_is_taken_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE_SECONDS", 600.0)
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(ClaimedError, match=f"process {owner.pid}"), claimed(str(tmp_path)):
        pass
    owner.kill()
    owner.wait()
    with claimed(str(tmp_path)):
        assert json.loads((tmp_path / claim.FILE).read_text())["pid"] != owner.pid


@pytest.mark.parametrize("beating", [True, False])
def test_one_on_another_machine_is_watched(tmp_path: Path, beating: bool) -> None:
    place, stop = tmp_path / claim.FILE, threading.Event()
    place.write_text(json.dumps({"id": "x", "host": f"not {socket.gethostname()}", "pid": 1, "beat": 0}))

    def beat() -> None:
        count = 0
        while not stop.wait(0.2):
            count += 1
            place.write_text(json.dumps({"id": "x", "host": "there", "pid": 1, "beat": count}))

    other = threading.Thread(target=beat, daemon=True)
    if beating:
        other.start()
        with pytest.raises(ClaimedError, match="on not "), claimed(str(tmp_path)):
            pass
        stop.set()
        other.join()
    with claimed(str(tmp_path)):
        pass


def test_of_many_at_once_one_has_it(tmp_path: Path) -> None:
    ready, winners = threading.Barrier(8), []

    def ask() -> None:
        ready.wait()
        try:
            with claimed(str(tmp_path)):
                winners.append("had")
                time.sleep(3)
        except ClaimedError:
            winners.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(winners) == ["had", *["refused"] * 7]


def test_what_is_no_claim_is_none(tmp_path: Path) -> None:
    (tmp_path / claim.FILE).write_text("{")
    with claimed(str(tmp_path)):
        pass
