"""One owner for each output: told to the others, given up at the end, taken over from the dead and the paused."""

import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from schemas import owners, storage
from schemas.errors import ClaimedError
from schemas.owners import Owner, claimed
from tests.command import ROOT
from tests.owners import ask_at_once, held_elsewhere

HOLD = """
import sys, time
from schemas import owners as claim
claim.BEAT_SECONDS, claim.LEASE_SECONDS = 0.1, float(sys.argv[2])
try:
    with claim.claimed(sys.argv[1], "mined") as held:
        print("held", flush=True)
        if sys.stdin.readline() == "fail\\n":
            open("what the other one has removed")
        held.require()
        print("kept", flush=True)
except claim.ClaimLostError as error:
    print("lost:", error, flush=True)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.1)


def hold(root: Path, lease: float) -> subprocess.Popen:
    """Start a process that holds the claim on `root` until it gets a line."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), str(lease)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    return owner


def other_machine(**changes: object) -> Owner:
    """An owner that this machine can know nothing of."""
    return replace(Owner.here("mined"), host=f"not {socket.gethostname()}", machine="another", pid=1, **changes)


def test_one_at_a_time(tmp_path: Path) -> None:
    root = str(tmp_path)
    with held_elsewhere(root):
        with (
            pytest.raises(ClaimedError, match=r"being mined by process \d+ on .*Wait until that process has finished"),
            claimed(root, "mined"),
        ):
            pass
        time.sleep(0.3)
        with pytest.raises(ClaimedError), claimed(root, "mined"):
            pass
    assert list(tmp_path.iterdir()) == []
    with claimed(root, "mined"):
        pass
    with pytest.raises(KeyError), claimed(root, "mined"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_thread_holds_it_goes_on_holding(tmp_path: Path) -> None:
    with claimed(str(tmp_path), "trained") as outer:
        with claimed(str(tmp_path), "fitted") as inner:
            assert inner is outer
        inner.require()
        assert (tmp_path / owners.CLAIM_FILE).exists()


def test_a_folder_is_there_for_the_claim_alone_no_longer_than_it(tmp_path: Path) -> None:
    with claimed(str(tmp_path / "deep" / "new"), "mined"):
        assert (tmp_path / "deep" / "new" / owners.CLAIM_FILE).exists()
    assert not (tmp_path / "deep" / "new").exists()


def test_a_killed_owner_s_is_taken_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LEASE_SECONDS", 600.0)
    owner = hold(tmp_path, 600.0)
    with pytest.raises(ClaimedError, match=f"process {owner.pid}"), claimed(str(tmp_path), "mined"):
        pass
    while not list(tmp_path.glob(".claim-beat-*")):  # not killed while it writes its first beat
        time.sleep(0.001)
    owner.kill()
    said: list[str] = []
    with claimed(str(tmp_path), "mined", said.append):  # before anyone has asked for its status
        assert len(list(tmp_path.glob(".claim-after-*"))) == 1
    owner.wait()
    assert said == [f"{tmp_path}: taken over from process {owner.pid} on {socket.gethostname()}, which has ended"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("beating", [True, False])
def test_one_on_another_machine_is_watched(tmp_path: Path, beating: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, stop = other_machine(), threading.Event()
    (tmp_path / owners.CLAIM_FILE).write_text(json.dumps(asdict(owner)))

    def beat() -> None:
        count = 0
        while not stop.wait(0.2):
            count += 1
            storage.write_bytes(owners._beat_url(str(tmp_path), owner), str(count).encode())

    other = threading.Thread(target=beat, daemon=True)
    if beating:
        other.start()
        with pytest.raises(ClaimedError, match="on not "), claimed(str(tmp_path), "mined"):
            pass
        stop.set()
        other.join()
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.3)
    with claimed(str(tmp_path), "mined"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_is_damaged_on_its_way_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its owner would be taken for another process, which nobody knows to be gone."""
    read, reads = storage.read_bytes, 0

    def flip(url: str) -> bytes:
        nonlocal reads
        content, reads = bytearray(read(url)), reads + 1
        if reads % 2:
            content[len(content) // 2] ^= 8
        return bytes(content)

    monkeypatch.setattr(storage, "read_bytes", flip)
    began = time.monotonic()
    with claimed(str(tmp_path), "mined") as held:
        assert owners._chain(str(tmp_path)) == [held.owner]
    assert reads >= 2
    assert time.monotonic() - began < owners.LEASE_SECONDS


@pytest.mark.parametrize("time_zone_of_the_dead", ["1999-01-01 00:00:00 UTC", "2999-01-01 00:00:00 UTC"])
def test_clocks_of_others_do_not_matter(
    tmp_path: Path, time_zone_of_the_dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.3)
    (tmp_path / owners.CLAIM_FILE).write_text(json.dumps(asdict(other_machine(since=time_zone_of_the_dead))))
    began = time.monotonic()
    with claimed(str(tmp_path), "mined"):
        assert time.monotonic() - began >= owners.LEASE_SECONDS


def test_another_process_with_the_number_of_the_dead_is_not_it(tmp_path: Path) -> None:
    (tmp_path / owners.CLAIM_FILE).write_text(json.dumps(asdict(replace(Owner.here("mined"), id="a" * 32, born="1"))))
    assert Owner.read((tmp_path / owners.CLAIM_FILE).read_bytes()).has_ended()
    with claimed(str(tmp_path), "mined"):
        pass


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_of_many_at_once_one_has_it(tmp_path: Path, store: str) -> None:
    root = str(tmp_path) if store == "disk" else f"memory://{tmp_path.name}/out"
    ends = ask_at_once(root, 8, seconds=0.3)
    assert ends["alone"] >= 1
    assert ends["alone"] + ends["refused"] == 8, ends


def test_of_many_at_once_one_takes_over(tmp_path: Path) -> None:
    (tmp_path / owners.CLAIM_FILE).write_text(json.dumps(asdict(replace(Owner.here("mined"), id="b" * 32, born="1"))))
    test_of_many_at_once_one_has_it(tmp_path, "disk")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["go on", "fail"])
def test_a_paused_owner_loses_it_and_knows(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LEASE_SECONDS", 1.0)
    owner = hold(tmp_path, 1.0)
    owner.send_signal(signal.SIGSTOP)
    with claimed(str(tmp_path), "mined") as held:
        owner.send_signal(signal.SIGCONT)
        out, _ = owner.communicate(f"{line}\n", timeout=30)
        assert out.startswith(f"lost: {tmp_path}: taken over by {Owner.here('mined')}"), out
        held.require()
        assert (tmp_path / owners.CLAIM_FILE).exists(), "what is another's stays"
    assert list(tmp_path.iterdir()) == []


def test_a_paused_owner_that_nobody_replaced_goes_on(tmp_path: Path) -> None:
    owner = hold(tmp_path, 1.0)
    owner.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    owner.send_signal(signal.SIGCONT)
    out, _ = owner.communicate("\n", timeout=30)
    assert out == "kept\n"
    assert list(tmp_path.iterdir()) == []


WRITE = """
import os, sys, time
from schemas import owners as claim
claim.BEAT_SECONDS, claim.LEASE_SECONDS = 0.05, 0.5
root, log = sys.argv[1], os.open(sys.argv[2], os.O_APPEND | os.O_WRONLY | os.O_CREAT)
while True:
    try:
        with claim.claimed(root, "written") as held:
            for _ in range(20):
                held.require()
                os.write(log, (held.attempt + chr(10)).encode())
                time.sleep(0.01)
    except (claim.ClaimedError, claim.ClaimLostError):
        pass
"""


@pytest.mark.parametrize(("seed", "pauses"), [(1, 5), pytest.param(2, 12, marks=pytest.mark.slow)])
def test_whoever_was_replaced_never_writes_again(tmp_path: Path, seed: int, pauses: int) -> None:
    """Three processes write in turn, are paused for longer than the lease, killed and started again."""
    draw, log = random.Random(seed), tmp_path / "log"
    start = lambda: subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "out"), str(log)], cwd=ROOT)  # noqa: E731
    writers = [start() for _ in range(3)]
    try:
        while not log.exists():  # on a busy machine Python starts for seconds
            time.sleep(0.01)
        for _ in range(pauses):
            time.sleep(draw.uniform(0, 0.5))
            number = draw.randrange(3)
            writers[number].send_signal(signal.SIGSTOP)
            time.sleep(draw.uniform(0.7, 1.5))
            writers[number].send_signal(signal.SIGCONT)
            if draw.random() < 0.3:
                writers[number].kill()
                writers[number].wait()
                writers[number] = start()
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    turns = [attempt for attempt, _ in itertools.groupby(log.read_text().split())]
    assert len(turns) == len(set(turns)), "an attempt wrote again after another had begun"
    assert len(turns) > 1


def test_what_is_no_claim_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.3)
    for text in ("{", "[]", '{"id": "../../x", "pid": 1}', json.dumps(asdict(other_machine(id="../up")))):
        (tmp_path / owners.CLAIM_FILE).write_text(text)
        with claimed(str(tmp_path), "mined"):
            pass
        assert list(tmp_path.iterdir()) == []
