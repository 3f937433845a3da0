"""The stream over an object store whose network fails, or is far away: the same batches, or an error that says why."""

import gc
import multiprocessing
import socket
from pathlib import Path

import pytest

from schemas import storage
from schemas.errors import StorageError
from schemas.shard_files.shards import Sink
from schemas.table import Table
from tests.builders import build_data, build_negatives
from tests.faults import Faults, Proxy
from tests.laws import assert_equal
from tests.processes import threads_named
from tests.s3 import Bucket
from trainer.stream import Batch, JoinedStream, ReadOptions, Source, open_sources

s3fs = pytest.importorskip("s3fs")

BUCKET = "stream"
SINKS: list[Sink] = ["parquet", "webdataset"]
LABELS = 30


@pytest.fixture(scope="module")
def clean(bucket: Bucket, store: Proxy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Batch]]:
    """Batches read from a local disk, by sink; the same files are in the store."""
    batches = {}
    for sink in SINKS:
        root = tmp_path_factory.mktemp(sink)
        data = build_data(str(root / "data"), sink=sink, labels=LABELS)
        (queries,) = open_sources(data.layout, "train", label_texts=False)
        build_negatives(str(root / "negatives"), queries.table.manifest, data.points["train"].positives, LABELS, 4)
        batches[sink] = list(stream([queries.with_negatives(str(root / "negatives"))]))
        bucket.put_folder(root, f"{sink}/")
    return batches


def stream(sources: list[Source], **options: object) -> JoinedStream:
    return JoinedStream(sources, LABELS, batch=16, streams=4, window_groups=1, **options)  # type: ignore[arg-type]


def remote(sink: Sink) -> list[Source]:
    source = Source("queries", Table.open(f"s3://{BUCKET}/{sink}/data/queries/train", "queries"))
    return [source.with_negatives(f"s3://{BUCKET}/{sink}/negatives")]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("threads", [0, 2])
def test_faults_that_pass_change_nothing(sink: Sink, threads: int, store: Proxy, clean: dict[str, list[Batch]]) -> None:
    with store.failing(Faults(share=0.4, seed=threads, slow_seconds=0.02)) as faults:
        got = list(stream(remote(sink), threads=threads, reading=ReadOptions(threads=4)))
    assert sum(faults.done.values()) >= 5, faults
    assert_equal(tuple(got), tuple(clean[sink]))
    assert threads_named("extremis-") == []


def test_requests_wait_for_a_distant_store_together(store: Proxy, clean: dict[str, list[Batch]]) -> None:
    with store.failing(Faults(delay_seconds=0.05)) as faults:
        assert_equal(tuple(stream(remote("parquet"), threads=1)), tuple(clean["parquet"]))
    assert faults.most_at_once > 4


@pytest.mark.parametrize("sink", SINKS)
def test_what_is_cached_is_not_asked_for_again(
    sink: Sink, store: Proxy, clean: dict[str, list[Batch]], tmp_path: Path
) -> None:
    sources = remote(sink)
    reading = ReadOptions(cache=str(tmp_path), cache_bytes=10 << 20)
    assert_equal(tuple(stream(sources, reading=reading)), tuple(clean[sink]))
    with store.failing(Faults(down_after=0)) as faults:
        assert_equal(tuple(stream(sources, reading=reading)), tuple(clean[sink]))
    assert faults.requests == 0


def test_what_was_cached_damaged_is_fetched_again(
    store: Proxy, clean: dict[str, list[Batch]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network changed bytes on their way: the entry is sound, its content is not."""
    reading = ReadOptions(cache=str(tmp_path), cache_bytes=10 << 20)
    read_range = storage.read_range

    def spoilt(*arguments: object) -> bytes:
        data = read_range(*arguments)  # type: ignore[arg-type]
        flip = "part-00001" in str(arguments[0]) and arguments[1]  # the end of a small file begins at 0
        return bytes([data[0] ^ 1]) + data[1:] if flip else data

    sources = remote("parquet")
    monkeypatch.setattr(storage, "read_range", spoilt)
    damaged = stream(sources, reading=ReadOptions(cache=str(tmp_path), cache_bytes=10 << 20), damaged="skip")
    assert sum(len(batch) for batch in damaged) == damaged.rows - damaged.skipped_rows
    assert damaged.skipped_rows > 10
    unverified = ReadOptions(verify=False, cache=str(tmp_path), cache_bytes=10 << 20)
    list(stream(sources, reading=unverified, damaged="skip"))  # leaves what is damaged in the cache
    monkeypatch.setattr(storage, "read_range", read_range)
    assert_equal(tuple(stream(sources, reading=reading)), tuple(clean["parquet"]))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_store_that_stays_away_is_named(
    threads: int, store: Proxy, clean: dict[str, list[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    sources = remote("parquet")
    words = rf"could not read s3://{BUCKET}/.*part-.* after 2 attempt\(s\)"
    with store.failing(Faults(down_after=6)), pytest.raises(StorageError, match=words):
        list(stream(sources, threads=threads))
    assert threads_named("extremis-") == []


def test_a_server_that_accepts_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        s3fs.S3FileSystem.clear_instance_cache()
        for ask in (
            lambda: storage.read_range("s3://b/part", 0, 5),
            lambda: storage.size("s3://b/part"),
            lambda: storage.exists("s3://b/part"),
            lambda: storage.list_names("s3://b/prefix"),
            lambda: storage.write_bytes("s3://b/part", b""),
            lambda: storage.remove("s3://b/part"),
        ):
            with pytest.raises(
                StorageError, match=r"could not .* s3://b/.* after 2 attempt\(s\): no answer within 0.1 seconds; fix"
            ):
                ask()
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_child_that_was_forked_does_not_take_the_connections_of_its_parent(
    store: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 10.0)
    url = f"s3://{BUCKET}/shared"
    storage.write_bytes(url, b"before")
    child = multiprocessing.get_context("fork").Process(target=_read_and_forget, args=(url,))
    child.start()
    child.join()
    assert child.exitcode == 0
    for content in (b"after", b"and again"):
        storage.write_bytes(url, content)
        assert storage.read_bytes(url) == content


def _read_and_forget(url: str) -> None:
    assert storage.read_bytes(url) == b"before"
    s3fs.S3FileSystem.clear_instance_cache()
    gc.collect()
