"""What a process leaves behind that is killed right after it has published."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from schemas import owners, storage
from schemas.layout import staging
from schemas.manifest import Manifest, is_published, write_file
from schemas.owners import building, claimed, clean_up
from schemas.storage import join


def publish_and_die(out: str) -> None:
    with building(out, "mined") as build:
        build.publish(Manifest(kind="negatives", shards=(write_file(build.url, "a", b"b"),)))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("times", [1, 2])
def test_its_claim_and_its_attempt_go(tmp_path: Path, times: int) -> None:
    out = str(tmp_path / "out")
    for _ in range(times):
        process = multiprocessing.get_context("fork").Process(target=publish_and_die, args=(out,))
        process.start()
        process.join()
    assert (tmp_path / "out" / owners.CLAIM_FILE).exists()
    clean_up(out, "mined")
    assert is_published(out)
    assert sorted(path.name for path in Path(out).iterdir()) == ["_manifest.json", "a"]


def test_of_one_that_is_at_work_nothing_goes(tmp_path: Path) -> None:
    out = str(tmp_path)
    with claimed(out, "mined"):
        storage.write_bytes(join(staging(out), "attempt"), b"content")
        process = multiprocessing.get_context("spawn").Process(target=clean_up, args=(out, "mined"))
        process.start()
        process.join()
        assert (tmp_path / owners.CLAIM_FILE).exists()
        assert storage.list_names(staging(out)) == ["attempt"]
