"""The whole loop with DATA and RUN on an object store: a local server that speaks S3, real processes, real requests."""

import hashlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import ROOT, command, environment, refused, sets
from tests.forks import extremis
from tests.loop.test_two_writers import World, race
from tests.pipelines.raw import write_tate
from tests.s3 import Bucket

pytestmark = pytest.mark.slow  # the loop over a store that fails is in test_faults.py

BUCKET = "loop"
CHOICES = sets("order.batch=128", "train.epochs=4", "refresh.stale=wait", "checkpoint.every_steps=3")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tate(tmp_path_factory.mktemp("raw") / "tate", 600, 100)


@pytest.fixture(scope="module")
def data(env: dict[str, str], bucket: Bucket, raw: Path) -> str:
    """DATA, sharded from raw files on the same store."""
    bucket.put_folder(raw, "raw/")
    extremis(
        *("shard", f"s3://{BUCKET}/raw", f"s3://{BUCKET}/data", "--tokenizer", "train:1000"),
        *("--row-group-rows", "64", "--shards", "2", "--propensity", "0.55,1.5"),
        env=env,
    )
    return f"s3://{BUCKET}/data"


@pytest.fixture(scope="module")
def run(env: dict[str, str], data: str) -> str:
    run = f"s3://{BUCKET}/run"
    report = extremis("run", "astra", data, run, *CHOICES, "--json", env=env).json
    assert report["table_versions"] == {"0": None, "1": None, "2": 2, "3": 2}
    return run


@pytest.fixture(scope="module")
def disk(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a disk with the same data and run."""
    folder = tmp_path_factory.mktemp("disk")
    extremis(
        *("shard", raw, folder / "data", "--tokenizer", "train:1000"),
        *("--row-group-rows", "64", "--shards", "2", "--propensity", "0.55,1.5"),
    )
    extremis("run", "astra", folder / "data", folder / "run", *CHOICES)
    return folder


def test_the_loop_leaves_what_it_leaves_on_a_disk(bucket: Bucket, run: str, disk: Path) -> None:
    for name in ("data", "run"):
        folder = disk / name
        local = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        stored = set(bucket.keys(f"{name}/"))
        varying = re.compile(r"tensorboard/|metrics\.jsonl|config\.toml|commands\.json|run\.log|.*/spent\.json$")
        assert {key for key in stored if not varying.match(key)} == {key for key in local if not varying.match(key)}
        for key in sorted(stored & local):
            if not varying.match(key):
                assert bucket.read(f"{name}/{key}") == (folder / key).read_bytes(), key
    assert b"miner: epoch 0: mined" in bucket.read("run/run.log")
    assert any(key.startswith("tensorboard/events") for key in bucket.keys("run/"))
    losses = [_losses(text) for text in (bucket.read("run/metrics.jsonl"), (disk / "run/metrics.jsonl").read_bytes())]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 20


def _losses(metrics: bytes) -> list[float]:
    return [record["loss"] for record in map(json.loads, metrics.splitlines()) if record["kind"] == "train"]


def test_what_is_made_of_it_is_what_is_made_on_a_disk(
    env: dict[str, str], bucket: Bucket, data: str, run: str, disk: Path
) -> None:
    texts = disk / "texts.txt"
    texts.write_text("a landscape\na man\n")
    metrics = []
    for root, more in ((f"s3://{BUCKET}", env), (str(disk), None)):
        metrics.append(extremis("evaluate", f"{root}/data", f"{root}/run", "--json", env=more).json["metrics"])
        extremis("embed", f"{root}/data", f"{root}/run", f"{root}/embeddings", env=more)
        extremis("export", f"{root}/data", f"{root}/run", f"{root}/export", env=more)
        extremis("predict", f"{root}/export", texts, f"{root}/predicted.jsonl", env=more)
    assert metrics[0] == metrics[1]
    for name in ("embeddings", "export", "predicted.jsonl"):
        places = [disk / name] if (disk / name).is_file() else list((disk / name).rglob("*.*"))
        local = {str(path.relative_to(disk)): path.read_bytes() for path in places if path.is_file()}
        assert {f"{name}{key}": body for key, body in bucket.objects(name).items()} == local
    facts = extremis("inspect", f"{run}/negatives/epoch-0002/queries", "--verify", "--json", env=env).json
    assert (facts["kind"], facts["verified"], facts["rows"]) == ("negatives", True, 600)


@pytest.mark.parametrize("kind", ["shard", "mine"])
def test_of_two_writers_one_has_it(
    env: dict[str, str], bucket: Bucket, raw: Path, disk: Path, tmp_path: Path, kind: str
) -> None:
    """Inputs are on a disk; the output is in the bucket, and is copied to be checked."""
    world = World(tmp_path)
    world.raw, world.data, world.run = raw, disk / "data", disk / "run"  # type: ignore[misc]
    fetch = lambda: bucket.get_folder(f"two-{kind}/", tmp_path / "out")  # noqa: E731
    race(kind, world, tmp_path, (0, 1), 0.0, f"s3://{BUCKET}/two-{kind}", env, fetch)


def test_killed_and_resumed(env: dict[str, str], bucket: Bucket, data: str, run: str) -> None:
    """Object stores cannot append: no record of metrics may be lost with the process."""
    again = f"s3://{BUCKET}/again"
    trainer = subprocess.Popen(
        command("run", "astra", data, again, *CHOICES),
        env=environment(env),
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    limit = time.monotonic() + 120
    saved = ("step-00000012/_manifest", "step-00000015/_manifest")
    while not any(name in key for key in bucket.keys("again/") for name in saved):
        assert time.monotonic() < limit
        assert trainer.poll() is None
        time.sleep(0.02)
    os.killpg(trainer.pid, 9)
    assert trainer.wait() == -9
    keys = bucket.keys("again/")
    assert "finished.json" not in keys
    visible = [key.removesuffix("_manifest.json") for key in keys if key.endswith("_manifest.json")]
    assert any(url.startswith("checkpoints/") for url in visible)
    for url in visible:
        for shard in json.loads(bucket.read(f"again/{url}_manifest.json"))["shards"]:
            assert hashlib.sha256(bucket.read(f"again/{url}{shard['path']}")).hexdigest() == shard["sha256"]
    extremis("run", "astra", data, again, *CHOICES, "--resume", env=env)
    assert _losses(bucket.read("again/metrics.jsonl")) == _losses(bucket.read("run/metrics.jsonl"))
    for name in ("negatives/epoch-0002/queries", "dumps/epoch-0000/vectors", _newest(bucket, "run/")):
        assert bucket.read(f"again/{name}/_manifest.json") == bucket.read(f"run/{name}/_manifest.json")


def _newest(bucket: Bucket, prefix: str) -> str:
    return max(key for key in bucket.keys(prefix) if key.startswith("checkpoints/")).rpartition("/")[0]


def test_a_refused_input_leaves_nothing(env: dict[str, str], bucket: Bucket, raw: Path) -> None:
    for file in raw.iterdir():
        bucket.put(f"bad/{file.name}", file.read_bytes() if file.name != "trn.json.gz" else file.read_bytes()[:-90])
    done = extremis("shard", f"s3://{BUCKET}/bad", f"s3://{BUCKET}/never", env=env, check=False)
    refused(done, f"s3://{BUCKET}/bad/trn.json.gz: incomplete", "Copy the file again")
    assert bucket.keys("never/") == []


def test_a_store_that_refuses_is_named(env: dict[str, str], raw: Path, data: str) -> None:
    nowhere = extremis("shard", raw, "s3://no-such-bucket/data", "--tokenizer", "train:1000", env=env, check=False)
    refused(nowhere, "s3://no-such-bucket/data", "the bucket does not exist")
    away = {**env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    refused(extremis("inspect", data, env=away, check=False), data, "attempt(s)", status=3)
