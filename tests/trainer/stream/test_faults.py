"""The stream over an object store whose network fails, or is far away: the same batches, or an error that says why."""

import gc
import multiprocessing
import socket
from collections.abc import Iterator
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
from tests.s3 import client, put, reached_through_proxy, serve
from trainer.stream import Batch, JoinedStream, Reading, Source, open_sources

s3fs = pytest.importorskip("s3fs")

BUCKET = "stream"
SINKS: list[Sink] = ["parquet", "webdataset"]
LABELS = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with serve(tmp_path_factory.mktemp("moto") / "log") as port:
        yield "127.0.0.1", port


@pytest.fixture(scope="module")
def store(server: tuple[str, int]) -> Iterator[Proxy]:
    with reached_through_proxy(server) as between:
        client(server).create_bucket(Bucket=BUCKET)
        yield between


@pytest.fixture(scope="module")
def clean(server: tuple[str, int], store: Proxy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Batch]]:
    """Batches read from a local disk, by sink; the same files are in the store."""
    batches = {}
    for sink in SINKS:
        root = tmp_path_factory.mktemp(sink)
        data = build_data(str(root / "data"), sink=sink, labels=LABELS)
        (queries,) = open_sources(data.layout, "train", label_texts=False)
        build_negatives(str(root / "negatives"), queries.table.manifest, data.points["train"].positives, LABELS, 4)
        batches[sink] = list(stream([queries.with_negatives(str(root / "negatives"))]))
        put(server, BUCKET, root, f"{sink}/")
    return batches


def stream(sources: list[Source], **options: object) -> JoinedStream:
    return JoinedStream(sources, LABELS, batch=16, streams=4, window_groups=1, **options)  # type: ignore[arg-type]


def remote(sink: Sink) -> list[Source]:
    source = Source("queries", Table.open(f"s3://{BUCKET}/{sink}/data/queries/train", "queries"))
    return [source.with_negatives(f"s3://{BUCKET}/{sink}/negatives")]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("threads", [0, 2])
def test_faults_that_pass_change_nothing(sink: Sink, threads: int, store: Proxy, clean: dict[str, list[Batch]]) -> None:
    store.faults = faults = Faults(share=0.4, seed=threads, slow_seconds=0.02)
    try:
        got = list(stream(remote(sink), threads=threads, reading=Reading(threads=4)))
    finally:
        store.faults = Faults()
    assert sum(faults.done.values()) >= 5, faults
    assert_equal(tuple(got), tuple(clean[sink]))
    assert threads_named("extremis-") == []


def test_requests_wait_for_a_distant_store_together(store: Proxy, clean: dict[str, list[Batch]]) -> None:
    store.faults = faults = Faults(delay_seconds=0.05)
    try:
        assert_equal(tuple(stream(remote("parquet"), threads=1)), tuple(clean["parquet"]))
    finally:
        store.faults = Faults()
    assert faults.most_at_once > 4


@pytest.mark.parametrize("sink", SINKS)
def test_what_is_cached_is_not_asked_for_again(
    sink: Sink, store: Proxy, clean: dict[str, list[Batch]], tmp_path: Path
) -> None:
    sources = remote(sink)
    reading = Reading(cache=str(tmp_path), cache_bytes=10 << 20)
    assert_equal(tuple(stream(sources, reading=reading)), tuple(clean[sink]))
    store.faults = faults = Faults(down_after=0)
    try:
        assert_equal(tuple(stream(sources, reading=reading)), tuple(clean[sink]))
    finally:
        store.faults = Faults()
    assert faults.requests == 0


def test_what_was_cached_damaged_is_fetched_again(
    store: Proxy, clean: dict[str, list[Batch]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network changed bytes on their way: the entry is sound, its content is not."""
    reading = Reading(cache=str(tmp_path), cache_bytes=10 << 20)
    read_range = storage.read_range

    def spoilt(*arguments: object) -> bytes:
        data = read_range(*arguments)  # type: ignore[arg-type]
        flip = "part-00001" in str(arguments[0]) and arguments[1]  # the end of a small file begins at 0
        return bytes([data[0] ^ 1]) + data[1:] if flip else data

    sources = remote("parquet")
    monkeypatch.setattr(storage, "read_range", spoilt)
    damaged = stream(sources, reading=Reading(cache=str(tmp_path), cache_bytes=10 << 20), damaged="skip")
    assert sum(len(batch) for batch in damaged) == damaged.rows - damaged.skipped_rows
    assert damaged.skipped_rows > 10
    unverified = Reading(verify=False, cache=str(tmp_path), cache_bytes=10 << 20)
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
    store.faults = Faults(down_after=6)
    try:
        with pytest.raises(StorageError, match=rf"could not read s3://{BUCKET}/.*part-.* after 2 attempt\(s\)"):
            list(stream(sources, threads=threads))
    finally:
        store.faults = Faults()
    assert threads_named("extremis-") == []


def test_a_server_that_accepts_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.3)
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
                StorageError, match=r"could not .* s3://b/.* after 2 attempt\(s\): no answer within 0.3 seconds; fix"
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
