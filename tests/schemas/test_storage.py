"""Writes that are whole or not there, on a local disk and in a bucket, and errors that say what storage did."""

import errno
import os
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas import storage
from schemas.errors import InputError, StorageError
from schemas.owners import claimed
from schemas.storage import RangeReader, join
from tests.schemas.flaky import FlakyFileSystem


@pytest.fixture(params=["local", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"local": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{tmp_path.name}"}[request.param]


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer attempts, so that waiting between them stays short."""
    monkeypatch.setattr(storage, "ATTEMPTS", 2)


@pytest.mark.parametrize(
    ("url", "parts", "expected"),
    [
        ("/data", ["labels"], "/data/labels"),
        ("/data/", ["/labels/", "part"], "/data/labels/part"),
        ("/", ["data"], "/data"),
        (".", ["data"], "./data"),
        ("", ["data"], "data"),
        ("s3://bucket", ["a", "b"], "s3://bucket/a/b"),
        ("s3://bucket/a/", ["b"], "s3://bucket/a/b"),
        ("memory://", ["a"], "memory://a"),
        ("file:///tmp/x", ["a"], "file:///tmp/x/a"),
        ("file:///", ["a"], "file:///a"),
        ("simplecache::s3://b/", ["a"], "simplecache::s3://b/a"),
    ],
)
def test_join(url: str, parts: list[str], expected: str) -> None:
    assert join(url, *parts) == expected


def test_what_was_written_is_read_listed_measured_and_removed(root: str) -> None:
    folder = join(root, "a", "b")
    assert storage.list_names(folder) == []
    assert not storage.exists(join(folder, "x"))
    storage.write_bytes(join(folder, "y"), b"22")
    storage.write_bytes(join(folder, "x"), memoryview(b"1"))
    storage.write_bytes(join(folder, "deep", "z"), b"")
    assert storage.list_names(folder) == ["deep", "x", "y"]
    assert storage.read_bytes(join(folder, "y")) == b"22"
    assert storage.size(join(folder, "y")) == 2
    with storage.open_read(join(folder, "y")) as stream:
        assert stream.read() == b"22"
    assert storage.exists(join(folder, "x"))
    assert not storage.exists(folder)  # a folder is no file
    storage.write_bytes(join(folder, "x"), b"new")
    assert storage.read_bytes(join(folder, "x")) == b"new"
    below = storage.list_below(join(root, "a"))
    assert {name: found.size for name, found in below.items()} == {"b/deep/z": 0, "b/x": 3, "b/y": 2}
    assert all(abs(found.written - time.time()) < 60 for found in below.values())
    assert storage.list_below(join(root, "nothing")) == {}
    storage.remove(join(folder, "x"))
    storage.remove(join(folder, "x"))
    assert storage.list_names(folder) == ["deep", "y"]
    storage.remove(folder, recursive=True)
    assert storage.list_names(folder) == []


def test_a_file_url_is_that_file(tmp_path: Path) -> None:
    storage.write_bytes(join(f"file://{tmp_path}", "x"), b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_what_is_not_there_is_not_found(root: str) -> None:
    for read in (storage.read_bytes, storage.size, storage.open_read):
        with pytest.raises(FileNotFoundError):
            read(join(root, "nothing"))


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(InputError, match=r"nosuch://.*spelling"):
        storage.read_bytes("nosuch://bucket/x")


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_process_killed_before_the_rename_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    (tmp_path / "x").write_bytes(b"old")
    program = f"""
        import os
        from schemas import storage
        {moment} = lambda *arguments: os._exit(9)
        storage.write_bytes({str(tmp_path / "x")!r}, b"new")
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False).returncode == 9
    assert (tmp_path / "x").read_bytes() == b"old"
    assert storage.list_names(str(tmp_path)) == ["x"]  # what it left behind is not listed
    storage.write_bytes(str(tmp_path / "x"), b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_parallel_writers_leave_one_of_their_contents_whole(tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    contents = [bytes([number]) * 50_000 for number in range(8)]
    seen = []
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(storage.write_bytes, url, content) for content in contents * 3]
        while not all(write.done() for write in writes):
            if storage.exists(url):
                seen.append(storage.read_bytes(url))
        for write in writes:
            write.result()
    assert storage.read_bytes(url) in contents
    assert all(content in contents for content in seen)
    assert os.listdir(tmp_path) == ["x"]


FULL = """
    import resource, sys
    from schemas import storage
    from schemas.errors import StorageError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        storage.write_bytes(sys.argv[1], bytes(5000))
    except StorageError as error:
        print(error)
        sys.exit(error.exit_status)
"""


def test_a_full_disk_is_said_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 6, done.stderr
    assert f"could not write {url} after 1 attempt(s)" in done.stdout
    assert "free some space" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="expected a file, got a path below a file"):
        storage.write_bytes(str(tmp_path / "file" / "x"), b"1")


def test_a_fault_that_passes_is_retried() -> None:
    storage.write_bytes("flaky://bucket/x", b"0123456789")
    FlakyFileSystem.fail(1)
    assert storage.read_bytes("flaky://bucket/x") == b"0123456789"
    assert FlakyFileSystem.attempts == 2
    FlakyFileSystem.fail(1)
    storage.write_bytes("flaky://bucket/x", b"9876543210")
    assert FlakyFileSystem.attempts == 2
    reader = RangeReader("flaky://bucket/x", 10)
    FlakyFileSystem.fail(1)
    assert reader.read(4) == b"9876"


def test_a_fault_that_stays_names_the_url_the_attempts_and_the_cause(quick_retries: None) -> None:
    FlakyFileSystem.fail(99)
    with pytest.raises(StorageError) as failure:
        storage.write_bytes("flaky://bucket/y", b"1")
    FlakyFileSystem.fail(0)
    message = "could not write flaky://bucket/y after 2 attempt(s): Connection reset by peer"
    assert re.match(re.escape(message), str(failure.value))
    assert not storage.exists("flaky://bucket/y")


def test_after_a_failure_of_storage_the_cleanup_is_brief_and_the_first_error_stays(quick_retries: None) -> None:
    @claimed("flaky://bucket/run", "trained")
    def write() -> None:
        FlakyFileSystem.fail(99)
        storage.write_bytes("flaky://bucket/y", b"1")

    with pytest.raises(StorageError, match="could not write flaky://bucket/y after 2 attempt"):
        write()
    assert FlakyFileSystem.attempts <= 2 + 4  # each request of the cleanup is tried once
    assert not storage.thread_state.cleaning_up
    FlakyFileSystem.fail(0)


def test_a_range_reader_reads_anywhere(root: str) -> None:
    content = bytes(range(100))
    url = join(root, "x")
    storage.write_bytes(url, content)
    reader = RangeReader(url, len(content))
    assert reader.readable()
    assert reader.seekable()
    assert reader.seek(90) == 90
    assert reader.read(5) == content[90:95]
    assert reader.tell() == 95
    assert reader.read() == content[95:]
    assert reader.read(3) == b""
    assert reader.seek(-4, os.SEEK_END) == 96
    assert reader.seek(-6, os.SEEK_CUR) == 90
    assert reader.read(None) == content[90:]


def test_a_file_is_published_when_its_block_ends_and_only_then(root: str) -> None:
    url = join(root, "folder", "x")
    with storage.writing(url) as path:
        Path(path).write_bytes(b"1" * 5000)
        assert storage.list_names(join(root, "folder")) == []
    assert storage.read_bytes(url) == b"1" * 5000
    with pytest.raises(ZeroDivisionError), storage.writing(url) as path:
        Path(path).write_bytes(b"2" * (1 // 0))
    assert storage.read_bytes(url) == b"1" * 5000
    assert storage.list_names(join(root, "folder")) == ["x"]
    assert not os.path.exists(path)


def test_a_full_disk_while_a_file_is_written_is_named(tmp_path: Path) -> None:
    message = "could not write .*x: No space left on device; free some space"
    with pytest.raises(StorageError, match=message), storage.writing(str(tmp_path / "x")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []
