"""Pipelines against an object store whose network fails: they get through, or say why and leave nothing to be read."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas import storage
from schemas.errors import AccessError, InputError, StorageError
from schemas.layout import MANIFEST, MINING_COST
from tests.command import call, refused, sets
from tests.faults import Faults, Proxy
from tests.pipelines.mining.world import World, random_world
from tests.pipelines.raw import write_tate
from tests.s3 import Bucket

s3fs = pytest.importorskip("s3fs")

BUCKET = "faulty"


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stays away is given up soon."""
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


def stored(bucket: Bucket, prefix: str) -> dict[str, bytes]:
    """Return the content of the store, but for what a clock measured."""
    return {name: body for name, body in bucket.objects(prefix).items() if not name.endswith(MINING_COST)}


def files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MINING_COST]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Step:
    """One command: what it needs in the store, its arguments for a root, and where its tables lie below it."""

    def __init__(self, inputs: dict[str, Path], arguments: Callable[[str, str], list[str]], out: str) -> None:
        self.inputs, self.arguments, self.out = inputs, arguments, out


SHARD = ("--tokenizer", "train:500", "--shards", "3", "--row-group-rows", "64")


@pytest.fixture(scope="module")
def steps(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    folder = tmp_path_factory.mktemp("inputs")
    raw = write_tate(folder / "raw", 400, 60)
    world: World = random_world(str(folder / "world"), 60, 80, 8, shards=2, row_group_rows=32, with_labels=True)
    world.write_dump()
    run = folder / "run"
    assert call("train", "random", data, run, *sets("train.epochs=1", "logging.tensorboard=false")).status == 0
    return {
        "shard": Step({"raw": raw}, lambda root, out: ["shard", f"{root}/raw", f"{out}/data", *SHARD], "data/"),
        "mine": Step(
            {"data": Path(world.data), "run": Path(world.run)},
            lambda root, out: ["mine", f"{root}/data", f"{out}/run", "--block-rows", "50"],
            "run/negatives/",
        ),
        "embed": Step(
            {"data": data, "run": run},
            lambda root, out: ["embed", f"{root}/data", f"{root}/run", f"{out}/vectors"],
            "vectors/",
        ),
    }


@pytest.mark.parametrize("name", ["shard", "mine", pytest.param("embed", marks=pytest.mark.slow)])
def test_faults_that_pass_change_nothing(
    name: str, steps: dict[str, Step], bucket: Bucket, store: Proxy, tmp_path: Path
) -> None:
    """Refused, lost, slow and reset: the store ends up with the bytes that a local disk gets."""
    step = steps[name]
    for place, folder in step.inputs.items():
        bucket.put_folder(folder, f"{name}/{place}/")
        os.symlink(folder, tmp_path / place) if name != "mine" else storage_copy(folder, tmp_path / place)
    assert call(*step.arguments(str(tmp_path), str(tmp_path))).status == 0
    root = f"s3://{BUCKET}/{name}"
    with store.failing(Faults(share=0.08, seed=len(name), slow_seconds=0.1)) as faults:
        done = call(*step.arguments(root, root))
    assert done.status == 0, done.err
    assert sum(faults.done.values()) >= 5, faults
    assert stored(bucket, f"{name}/{step.out}") == files(tmp_path / step.out)


def storage_copy(folder: Path, to: Path) -> None:
    for name, content in files(folder).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)


@pytest.mark.parametrize("name", [pytest.param("shard", marks=pytest.mark.slow), "mine", "embed"])
def test_a_store_that_stays_away_is_named_and_nothing_is_visible(
    name: str, steps: dict[str, Step], bucket: Bucket, store: Proxy, quick_retries: None
) -> None:
    step = steps[name]
    for place, folder in step.inputs.items():
        bucket.put_folder(folder, f"away-{name}/{place}/")
    root = f"s3://{BUCKET}/away-{name}"
    arguments = step.arguments(root, f"{root}/whole") if name != "mine" else step.arguments(root, root)
    with store.failing(Faults()) as faults:
        assert call(*arguments).status == 0
    with store.failing(Faults()) as finished:
        assert call(*arguments).status == 0
    # A command that finds its output finished asks for all that follows the manifest, and for more.
    draw = random.Random(len(name))
    for down_after in sorted(draw.sample(range(1, faults.requests - finished.requests), 2)):
        for key in stored(bucket, f"away-{name}/{step.out}"):
            bucket.remove(f"away-{name}/{step.out}{key}")
        with store.failing(Faults(down_after=down_after)):
            done = call(*step.arguments(root, root))
        refused(done, f"s3://{BUCKET}/away-{name}/", "could not", "2 attempt(s)", "run again", status=3)
        left = stored(bucket, f"away-{name}/{step.out}")
        top = {"shard": MANIFEST, "mine": f"epoch-0005/queries/{MANIFEST}", "embed": MANIFEST}[name]
        assert top not in left, f"down after {down_after} of {faults.requests}"


def test_whether_a_file_is_there_is_not_guessed(store: Proxy, quick_retries: None) -> None:
    """fsspec's isfile() answers no when it cannot know; a finished table would be made again, or cleared."""
    storage.write_bytes(f"s3://{BUCKET}/here", b"1")
    with store.failing(Faults(down_after=0)):
        for read in (storage.exists, storage.size, storage.list_names, storage.read_bytes):
            with pytest.raises(StorageError, match=r"s3://faulty/here after 2 attempt\(s\)"):
                read(f"s3://{BUCKET}/here")
    assert storage.exists(f"s3://{BUCKET}/here")
    assert not storage.exists(f"s3://{BUCKET}/nowhere")


@pytest.mark.parametrize("kind", ["refused", "slow", "reset", "dropped"])
def test_a_streaming_pass_goes_on_where_it_was(store: Proxy, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    content = random.Random(0).randbytes(300_000)
    storage.write_bytes(f"s3://{BUCKET}/long", content)
    monkeypatch.setattr(storage, "READ_BYTES", 20_000)
    with (
        store.failing(Faults(share=0.3, seed=1, kinds=(kind,), slow_seconds=0.02)) as faults,
        storage.open_read(f"s3://{BUCKET}/long") as file,
    ):
        assert file.read(7) + file.read() == content
    assert faults.done[kind] >= 3


def test_a_missing_bucket_and_missing_credentials_are_named_at_once(
    store: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = storage.list_names, storage.read_bytes, lambda url: storage.write_bytes(url, b"1")
    for url in ("s3://nosuchbucket/x", "s3://b/x"):  # no bucket may have a name of one letter
        for request in requests:
            with (
                store.failing(Faults()) as faults,
                pytest.raises(InputError, match=f"{url}: the bucket does not exist"),
            ):
                request(url)
            assert faults.requests <= 4  # none is tried again
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(storage.filesystem(url)[0]).clear_instance_cache()
    with pytest.raises(AccessError, match=r"after 1 attempt.*AWS_ACCESS_KEY_ID"):
        storage.list_names(url)
    type(storage.filesystem(url)[0]).clear_instance_cache()
