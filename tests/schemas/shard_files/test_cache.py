"""The local cache: what comes out went in; its limit holds; what is not its own stays; kills and sharing do no harm."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.shard_files.ranges import MARKER, LocalCache
from schemas.storage import TEMPORARY, _temporary_file
from tests.command import ROOT

FILES = [f"{number:x}" * 64 for number in range(4)]
OVERHEAD = 4


def content(sha256: str, start: int, stop: int) -> bytes:
    return random.Random(f"{sha256}{start}").randbytes(stop - start)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??/*") if not path.name.startswith(TEMPORARY)]


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in entries(folder))


lists_of_requests = st.lists(st.tuples(st.sampled_from(FILES), st.integers(0, 5), st.integers(0, 60)), max_size=40)


@given(lists_of_requests, st.integers(1, 300))
def test_what_is_there_is_what_was_put_and_the_limit_holds(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[str, int, int]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = LocalCache(str(folder), limit)
    for sha256, start, size in requests:
        data = cache.get(sha256, start, start + size)
        assert data in (None, content(sha256, start, start + size))
        if data is None:
            cache.put(sha256, start, start + size, content(sha256, start, start + size))
            cached = cache.get(sha256, start, start + size)
            assert cached == (content(sha256, start, start + size) if size + OVERHEAD <= limit else None)
        assert held(folder) <= limit
    assert LocalCache(str(folder), limit).limit == limit  # taken up again


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), 10 * (100 + OVERHEAD))
    for start in range(10):
        cache.put(FILES[0], start, start + 100, bytes(100))
        os.utime(entries_of(tmp_path, start), ns=(start, start))
    assert cache.get(FILES[0], 0, 100) is not None  # used just now
    cache.put(FILES[0], 50, 150, bytes(100))
    left = sorted(int(path.name.split("-")[1]) for path in entries(tmp_path))
    assert left == [0, 2, 3, 4, 5, 6, 7, 8, 9, 50]
    assert LocalCache(str(tmp_path), 3 * (100 + OVERHEAD)).get(FILES[0], 9, 109) is not None
    assert len(entries(tmp_path)) == 3


def entries_of(folder: Path, start: int) -> Path:
    return next(path for path in entries(folder) if path.name.split("-")[1] == str(start))


@pytest.mark.parametrize("spoil", ["flip", "cut", "longer", "empty"])
def test_a_damaged_entry_is_forgotten(tmp_path: Path, spoil: str) -> None:
    cache = LocalCache(str(tmp_path), 1000)
    cache.put(FILES[1], 7, 57, content(FILES[1], 7, 57))
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(
        {"flip": bytes([whole[0] ^ 1]) + whole[1:], "cut": whole[:-1], "longer": whole + b"\0", "empty": b""}[spoil]
    )
    assert cache.get(FILES[1], 7, 57) is None
    assert entries(tmp_path) == []


def test_what_is_not_its_own_stays(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), 500)
    cache.put(FILES[0], 0, 90, bytes(90))
    mine = [
        tmp_path / "notes.txt",
        tmp_path / "00" / "notes.txt",
        tmp_path / "00" / f"{TEMPORARY}mine",
        tmp_path / "zz",
    ]
    outside = tmp_path.parent / "outside"
    outside.write_bytes(bytes(90))
    for path in mine:
        path.write_text("mine")
    (tmp_path / "00" / f"{FILES[0]}-1-91").symlink_to(outside)
    for start in range(100, 130):
        cache.put(FILES[0], start, start + 90, bytes(90))
    LocalCache(str(tmp_path), 10)
    assert entries_like(tmp_path) == []
    assert [path.read_text() for path in mine] == ["mine"] * 4
    assert outside.exists()


def entries_like(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.name[:64] in FILES and not path.is_symlink()]


def test_a_directory_of_others_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        InputError, match=re.escape(f"{str(tmp_path)!r}: the directory contains other files ('thesis.tex'")
    ):
        LocalCache(str(tmp_path), 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="Name a writable directory"):
        LocalCache(str(tmp_path / "thesis.tex"), 1000)


def test_limits_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not fit on the disk"):
        LocalCache(str(tmp_path), shutil.disk_usage(tmp_path).total + 1)
    cache = LocalCache(str(tmp_path), 1000)
    cache.require(1000, "two readers")
    with pytest.raises(InputError, match="1,000 bytes are too few: two readers take 1,001"):
        cache.require(1001, "two readers")


def test_discarded_everything_of_a_file_is_gone_and_nothing_else(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), 1000)
    for sha256 in (FILES[0], FILES[1], "0" * 63 + "1"):
        for start in (0, 5):
            cache.put(sha256, start, start + 5, bytes(5))
    cache.discard(FILES[0])
    cache.discard("f" * 64)
    assert {path.name[:64] for path in entries(tmp_path)} == {FILES[1], "0" * 63 + "1"}


def test_a_cache_that_cannot_write_costs_time_only(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), 1000)
    shutil.rmtree(tmp_path)
    cache.put(FILES[0], 0, 5, bytes(5))
    assert cache.get(FILES[0], 0, 5) is None
    cache.discard(FILES[0])


def test_what_a_killed_process_wrote_goes(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), 1000)
    cache.put(FILES[1], 10, 20, b"x" * 10)
    (entry,) = entries(tmp_path)
    with _temporary_file(str(entry)) as left:
        pass
    Path(left).write_bytes(b"half")
    assert LocalCache(str(tmp_path), 1000).get(FILES[1], 10, 20) == b"x" * 10
    assert not Path(left).exists()


WORKER = """
import random, sys, time
from schemas.shard_files.ranges import LocalCache
FILES = [f"{number:x}" * 64 for number in range(4)]
def content(sha256, start, stop):
    return random.Random(f"{sha256}{start}").randbytes(stop - start)
cache, draw = LocalCache(sys.argv[1], int(sys.argv[2])), random.Random(sys.argv[3])
print("ready", flush=True)
while True:
    sha256, start = draw.choice(FILES), draw.randrange(40)
    stop = start + 2000
    data = cache.get(sha256, start, stop)
    if data is None:
        cache.put(sha256, start, stop, content(sha256, start, stop))
    elif data != content(sha256, start, stop):
        print("WRONG", flush=True)
    time.sleep(0.001)
"""


def test_processes_share_it_and_are_killed(tmp_path: Path) -> None:
    folder, limit = tmp_path / "cache", 40_000
    for trial in range(2):
        command = [sys.executable, "-c", WORKER, str(folder), str(limit)]
        workers = [
            subprocess.Popen([*command, f"{trial}{n}"], cwd=ROOT, stdout=subprocess.PIPE, text=True) for n in range(3)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            watched = LocalCache(str(folder), limit)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                with watched._locked():  # a sum over files that come and go is none
                    assert held(folder) <= limit
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
        for worker in workers:
            assert worker.communicate()[0] == ""
        cache = LocalCache(str(folder), limit)
        assert list(folder.glob(f"??/{TEMPORARY}*")) == []
        assert 0 < held(folder) <= limit
        for path in entries(folder):
            sha256, start, stop = path.name.split("-")
            assert cache.get(sha256, int(start), int(stop)) == content(sha256, int(start), int(stop))


def test_threads_share_it(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path), 20_000)

    def use(number: int) -> None:
        start = number % 17
        data = cache.get(FILES[0], start, start + 1500)
        assert data in (None, content(FILES[0], start, start + 1500))
        cache.put(FILES[0], start, start + 1500, content(FILES[0], start, start + 1500))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(400)))
    assert held(tmp_path) <= 20_000
    assert (tmp_path / MARKER).exists()
