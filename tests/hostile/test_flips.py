"""Bits that flip on their way from a store whose checksums nobody sends: what is read is read again, or refused.

A command reads through a proxy that changes bits of what it gets, and has to end up with the bytes of an undisturbed
run. Raw input is left alone: it is the user's, and nothing says what it was.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas import storage
from tests.command import Done, call
from tests.faults import Faults, Proxy
from tests.hostile.loop import COMMANDS, UNSTABLE, arguments
from tests.s3 import client, put, reached_through_proxy, serve

pytest.importorskip("moto")
pytest.importorskip("s3fs")

BUCKET = "flips"


class World:
    """The results of an undisturbed loop, in a store behind a proxy."""

    def __init__(self, local: Path, said: dict[str, Any], server: tuple[str, int], store: Proxy) -> None:
        self.said, self.server, self.store = said, server, store
        put(server, BUCKET, local, "")

    def run(self, name: str, out: str, faults: Faults) -> Done:
        """Run a command with inputs from the store and outputs below `out` there, through `faults`."""
        _, of_run, _ = COMMANDS[name]
        if of_run:  # it writes into a run, which has to be there
            for key, content in self.objects("run/").items():
                if not key.startswith(of_run):
                    client(self.server).put_object(Bucket=BUCKET, Key=f"{out}/run/{key}", Body=content)
        self.store.faults = faults
        try:
            return call(*arguments(name, f"s3://{BUCKET}", f"s3://{BUCKET}/{out}"))
        finally:
            self.store.faults = Faults()

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Return what the store has below a prefix, past the proxy."""
        s3 = client(self.server)
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        bodies = {key.removeprefix(prefix): s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
        return {name: body for name, body in bodies.items() if not name.endswith(UNSTABLE)}


# What is flipped: everything but raw input and texts to predict.
OURS = rf"/{BUCKET}/(?!raw/|texts)"


@pytest.fixture(scope="module")
def world(loop: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        serve(tmp_path_factory.mktemp("flips") / "log") as port,
        reached_through_proxy(("127.0.0.1", port)) as store,
    ):
        client(("127.0.0.1", port)).create_bucket(Bucket=BUCKET)
        yield World(*loop, ("127.0.0.1", port), store)


def require_same(world: World, name: str, out: str, done: Done, faults: Faults) -> None:
    """The command has the result of the undisturbed one, or failed with nothing published."""
    made, true = world.objects(f"{out}/{COMMANDS[name][2]}"), world.objects(COMMANDS[name][2])
    if done.status == 0:
        if name == "evaluate":
            assert done.json["metrics"] == world.said["metrics"]
        else:
            assert made == true, faults.about
        return
    assert "Traceback" not in done.err
    assert "fault of Extremis" not in done.err
    assert f"s3://{BUCKET}/" in done.err
    assert "damaged" in done.err or "checksum" in done.err, done.err
    published = [key for key in made if key.endswith("_manifest.json") and "/" not in key]
    assert not published or made == true


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "flipped") for name in COMMANDS),
        pytest.param("mine", "shortened", marks=pytest.mark.slow),
        ("predict", "shortened"),
    ],
)
def test_two_lies_on_the_way_change_nothing(
    name: str, kind: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SLOWEST_SECONDS", 0.01)
    faults = Faults(share=1, seed=len(name), kinds=(kind,), lies_about=OURS, lies_after=2, lies=2)
    done = world.run(name, f"{kind}/{name}", faults)
    assert faults.done[kind] == 2, faults
    assert done.status == 0, done.err
    require_same(world, name, f"{kind}/{name}", done, faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_five_hundred_flips(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted by artifact: none is trained on, published or exported."""
    monkeypatch.setattr(storage, "SLOWEST_SECONDS", 0.01)
    counts, statuses, number = Counter[str](), Counter[int](), 0
    while counts.total() < 500 / len(COMMANDS):
        share = (0.05, 0.2, 0.5)[number % 3]
        faults = Faults(share=share, seed=number, kinds=("flipped",), lies_about=OURS)
        done = world.run(name, f"many/{name}-{number}", faults)
        require_same(world, name, f"many/{name}-{number}", done, faults)
        counts.update(artifact(path) for path in faults.about)
        statuses[done.status] += 1
        number += 1
    with capsys.disabled():
        print(f"\n{name}: flips {dict(sorted(counts.items()))}, commands by status {dict(statuses)}")


def artifact(path: str) -> str:
    """Name the artifact that an object belongs to."""
    parts = [part for part in path.partition("?")[0].split("/") if part]
    kinds = (".staging", ".scratch", "queries", "labels", "tokenizer", "checkpoints", "dumps", "negatives", "adoptions")
    known = [kind for kind in (*kinds, "fusions", "export", "config.toml") if kind in parts]
    return known[0] if known else parts[-1]
