"""Every function of storage touches exactly the place named, whatever the name is, on every store."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings

from schemas import storage
from schemas.errors import InputError, StorageError
from schemas.storage import join
from tests.faults import Faults, Proxy
from tests.places import ALL, NAMES, Store, decoys, in_bucket, in_memory, on_disk
from tests.s3 import Bucket, reached_through_proxy

BUCKET = "places"
FEW = settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["disk", "file", "memory"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return a local disk or memory."""
    if request.param == "memory":
        return in_memory()
    return on_disk(tmp_path / "places", "file://" if request.param == "file" else "")


@pytest.fixture(scope="module")
def far(server: tuple[str, int], bucket: Bucket) -> Iterator[Store]:
    """Yield a bucket, which is reached without a proxy: it would be the slowest part."""
    with reached_through_proxy(server):
        yield in_bucket(bucket)


def touch(store: Store, name: str) -> None:
    """Call every function of storage on the place `name`, with other places around it; compare with a dictionary."""
    store.clear()
    place, others = join(store.root, name), decoys(name)
    around = {f"{other}/{file}": b"other" for other in others for file in ("x", f"deep/{name}")}
    for file, body in around.items():
        storage.write_bytes(join(store.root, file), body, durable=False)
    here = dict[str, bytes]()

    def expect() -> None:
        assert store.files("") == around | {f"{name}/{file}": body for file, body in here.items()}

    assert storage.list_names(place) == []
    assert storage.list_sizes(place) == {}
    assert not storage.exists(place)
    assert not storage.is_folder(place)
    for read in (storage.read_bytes, storage.size, storage.open_read, lambda url: storage.read_range(url, 0, 1)):
        with pytest.raises(FileNotFoundError):
            read(join(place, "x"))
    storage.write_bytes(join(place, "x"), b"1")
    assert storage.create_bytes(join(place, "deep", name), b"22")
    assert not storage.create_bytes(join(place, "deep", name), b"3")
    with storage.writing(join(place, name)) as path:
        Path(path).write_bytes(b"333")
    storage.write_sealed(join(place, "y"), b"4")
    here |= {"x": b"1", f"deep/{name}": b"22", name: b"333", "y": storage.seal(b"4")}
    expect()
    assert storage.list_names(place) == sorted(["x", "deep", name, "y"])
    assert storage.list_sizes(place) == {file: len(here[file]) for file in sorted(["x", name, "y"])}
    assert storage.list_names(join(place, "x")) == []
    assert storage.list_sizes(join(place, "x")) == {}
    assert storage.exists(join(place, name))
    assert not storage.exists(place)
    assert storage.size(join(place, name)) == 3
    assert storage.read_bytes(join(place, name)) == b"333"
    assert storage.read_range(join(place, name), 1, 3) == b"33"
    with storage.open_read(join(place, name)) as file:
        assert file.read() == b"333"
    assert storage.read_sealed(join(place, "y")) == b"4"
    assert storage.is_within(join(place, "x"), place)
    assert not any(storage.is_within(join(place, "x"), join(store.root, other)) for other in others)
    for other in others:
        assert storage.resolve(join(store.root, other), storage.relative(join(store.root, other), place)) == place
    for absent in ("z", *others):
        storage.remove(join(place, absent))
    storage.remove(join(place, "nothing"), recursive=True)
    expect()
    storage.remove(join(place, "y"))
    del here["y"]
    expect()
    moved = join(store.root, name + "m")
    storage.move_files(place, moved, ["x", name])
    storage.remove(join(place, "x"))
    around |= {f"{name}m/x": here.pop("x"), f"{name}m/{name}": here[name]}
    storage.remove(join(place, name))
    del here[name]
    expect()
    storage.remove(place, recursive=True)
    here.clear()
    expect()
    assert name not in storage.list_names(store.root)


@example(ALL)
@given(NAMES)
@settings(FEW, max_examples=12)
def test_every_function_touches_exactly_the_place(near: Store, name: str) -> None:
    touch(near, name)


@example(ALL)
@given(NAMES)
@FEW
def test_every_function_touches_exactly_the_place_in_a_bucket(far: Store, name: str) -> None:
    touch(far, name)


@pytest.mark.slow
@given(NAMES)
@MANY
def test_many_names_in_a_bucket(far: Store, name: str) -> None:
    touch(far, name)


@pytest.mark.parametrize(
    "name", ["a::b", "simplecache::x", "memory::x", "data:x", "file:x", "local:x", "x?versionId=1", "x#1"]
)
def test_a_path_without_a_scheme_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (join(name, "x"), join(str(tmp_path), name, "y"), join(f"file://{tmp_path}", name, "z")):
        storage.write_bytes(url, b"1")
    assert storage.list_names(name) == sorted(os.listdir(tmp_path / name)) == ["x", "y", "z"]
    storage.remove(name, recursive=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "url",
    [
        *("s3://b/x?versionId=1", "s3://b/x?a=b&versionId=1", "s3a://b/x?versionid=", "memory://x?versionId=1"),
        *("gs://b/x#123", "gcs://b/x?generation=123", "s3://b/a::b", "simplecache::s3://b/x", "zip://x::s3://b/y.zip"),
    ],
)
def test_what_a_driver_would_cut_is_refused_by_name(url: str) -> None:
    for touch in (storage.exists, storage.list_names, lambda url: storage.remove(url, recursive=True)):
        with pytest.raises(
            InputError, match=f"cannot open {re.escape(repr(url))}: .*(chain two URLs|version of an object)"
        ):
            touch(url)


def test_objects_are_removed_in_bulk(store: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BULK", 5)
    for number in range(12):
        bucket.put(f"many/{number}?*", b"1")
    with store.failing(Faults()) as counted:
        storage.remove(f"s3://{BUCKET}/many", recursive=True)
    assert bucket.keys("many/") == []
    assert counted.requests <= 4


def test_an_object_that_stays_is_told(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers a request for many objects with status 200, and lists those that it has not removed."""
    url = f"s3://{BUCKET}/kept"
    fs = storage.filesystem(url)[0]
    error = {"Key": "kept/x", "Code": "AccessDenied", "Message": "not yours"}
    monkeypatch.setattr(type(fs), "call_s3", lambda self, *words, **options: {"Errors": [error]})
    with pytest.raises(
        StorageError, match=r"could not remove s3://places/kept after 1 attempt\(s\): kept/x: not yours"
    ):
        storage.remove(url, recursive=True)


def test_a_name_that_a_server_on_a_disk_cannot_hold(far: Store, request: pytest.FixtureRequest) -> None:
    """versitygw refuses `x/y` beside an object `x`, and a segment of more than 255 bytes; S3 and moto take both."""
    far.clear()
    refuses = "versitygw" in request.node.name
    storage.write_bytes(join(far.root, "x"), b"1")
    for name in (f"x/{ALL}", "n" * 256):
        if refuses:
            with pytest.raises((StorageError, InputError), match=f"could not write {re.escape(join(far.root, name))}"):
                storage.write_bytes(join(far.root, name), b"2")
            continue
        with storage.writing(join(far.root, name)) as path:
            Path(path).write_bytes(b"2")
        assert storage.read_bytes(join(far.root, name)) == b"2"
    storage.remove(join(far.root, "x"), recursive=True)
    assert set(far.stamps()) == (set() if refuses else {"n" * 256})


def test_a_name_of_255_bytes_on_a_disk(near: Store) -> None:
    url = join(near.root, "é" * 127)
    storage.write_bytes(url, b"1")
    with storage.writing(url) as path:
        Path(path).write_bytes(b"2")
    assert storage.read_bytes(url) == b"2"
