"""Cores that this process may use: its affinity, within a container's quota."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import process


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    process.cores.cache_clear()
    yield
    process.cores.cache_clear()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("max 100000",), 8),
        (("150000 100000",), 2),  # a core and a half keep two threads at work
        (("50000 100000",), 1),
        (("1600000 100000",), 8),
        (("nonsense",), 8),
        (("-1", "100000"), 8),
        (("300000", "100000"), 3),
        ((), 8),
    ],
)
def test_a_quota_is_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], expected: int
) -> None:
    files = [tmp_path / f"{number}" for number in range(len(lines))] or [tmp_path / "absent"]
    for file, line in zip(files, lines, strict=False):
        file.write_text(f"{line}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)}, raising=False)
    monkeypatch.setattr(process, "_QUOTAS", (tuple(map(str, files)),))
    assert process.cores() == expected


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    process.limit_openmp_threads()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
