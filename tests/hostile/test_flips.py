"""Bits that flip on their way from a store whose checksums nobody sends: what is read is read again, or refused.

A command reads through a proxy that changes bits of what it gets, and has to end up with the bytes of an undisturbed
run. Raw input is left alone: it is the user's, and nothing says what it was.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.command import Done, call
from tests.faults import Faults, Proxy
from tests.hostile.loop import COMMANDS, UNSTABLE, arguments
from tests.s3 import Bucket

BUCKET = "flips"


class World:
    """The results of an undisturbed loop, in a store behind a proxy."""

    def __init__(self, local: Path, said: dict[str, Any], bucket: Bucket, store: Proxy) -> None:
        self.said, self.bucket, self.store = said, bucket, store
        bucket.put_folder(local, "")

    def run(self, name: str, out: str, faults: Faults) -> Done:
        """Run a command with inputs from the store and outputs below `out` there, through `faults`."""
        _, of_run, _ = COMMANDS[name]
        if of_run:  # it writes into a run, which has to be there
            for key, content in self.objects("run/").items():
                if not key.startswith(of_run):
                    self.bucket.put(f"{out}/run/{key}", content)
        with self.store.failing(faults):
            return call(*arguments(name, f"s3://{BUCKET}", f"s3://{BUCKET}/{out}"))

    def objects(self, prefix: str) -> dict[str, bytes]:
        return {name: body for name, body in self.bucket.objects(prefix).items() if not name.endswith(UNSTABLE)}


QUICK = ("shard", "mine", "evaluate", "predict")  # what reads most of the rest
# What is flipped: everything but raw input and texts to predict.
OURS = rf"/{BUCKET}/(?!raw/|texts)"


@pytest.fixture(scope="module")
def world(loop: tuple[Path, dict[str, Any]], bucket: Bucket, store: Proxy) -> World:
    return World(*loop, bucket, store)


def require_same(world: World, name: str, out: str, done: Done, faults: Faults) -> None:
    """The command has the result of the undisturbed one, or failed with nothing published."""
    made, true = (world.objects(of) for of in (f"{out}/{COMMANDS[name][2]}", COMMANDS[name][2]))
    if done.status == 0:
        if name == "evaluate":
            assert done.json["metrics"] == world.said["metrics"]
        else:
            assert made == true, faults.about
        return
    assert "Traceback" not in done.err
    assert "bug in Extremis" not in done.err
    assert f"s3://{BUCKET}/" in done.err
    assert "damaged" in done.err or "checksum" in done.err, done.err
    published = [key for key in made if key.endswith("_manifest.json") and "/" not in key]
    assert not published or made == true


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "flipped") for name in QUICK),
        *(pytest.param(name, "flipped", marks=pytest.mark.slow) for name in COMMANDS if name not in QUICK),
        pytest.param("mine", "shortened", marks=pytest.mark.slow),
        ("predict", "shortened"),
    ],
)
def test_two_lies_on_the_way_change_nothing(name: str, kind: str, world: World) -> None:
    faults = Faults(share=1, seed=len(name), kinds=(kind,), lies_about=OURS, lies_after=2, lies=2)
    done = world.run(name, f"{kind}/{name}", faults)
    assert faults.done[kind] == 2, faults
    assert done.status == 0, done.err
    require_same(world, name, f"{kind}/{name}", done, faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_five_hundred_flips(name: str, world: World) -> None:
    """No artifact that was met damaged is trained on, published or exported."""
    flips = number = 0
    while flips < 500 / len(COMMANDS):
        share = (0.05, 0.2, 0.5)[number % 3]
        faults = Faults(share=share, seed=number, kinds=("flipped",), lies_about=OURS)
        done = world.run(name, f"many/{name}-{number}", faults)
        require_same(world, name, f"many/{name}-{number}", done, faults)
        flips += len(faults.about)
        number += 1
