"""An outage of 20 minutes in the midst of training or mining, with 30 minutes of patience, changes no byte."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas import storage
from schemas.layout import MINING_COST
from tests.command import call, refused, sets
from tests.pipelines.mining.world import World, random_world
from tests.schemas.flaky import AwayFileSystem, Clock, clocked

AWAY = 20 * 60.0
CHOICES = sets("train.epochs=1", "negatives.hard=0", "data.share=0.2", "logging.tensorboard=false")
MEASURED = "metrics.jsonl", "run.log", "commands.json", MINING_COST


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with clocked(monkeypatch, "0", 60.0) as made:  # `call` sets the patience, for this process
        yield made


def outages(clock: Clock, every: int) -> Callable[[], Exception | None]:
    """The store is away for 20 minutes after each `every` requests that it has answered."""
    answered, until = 0, 0.0

    def error() -> Exception | None:
        nonlocal answered, until
        if clock() < until:
            return ConnectionRefusedError(111, "Connection refused")
        answered += 1
        if answered % every == 0:
            until = clock() + AWAY
        return None

    return error


def stored(root: str) -> dict[str, bytes]:
    """Return the content of the store below `root`, but for what a clock measured."""
    files = {name.partition(f"/{root}/")[2]: file.getvalue() for name, file in AwayFileSystem.store.items()}
    return {name: body for name, body in files.items() if name and name.rpartition("/")[2] not in MEASURED}


def test_training(data: Path, clock: Clock) -> None:
    assert call("train", "random", data, "away://bucket/calm", *CHOICES).status == 0
    AwayFileSystem.error = staticmethod(outages(clock, 20))
    began, before = clock(), storage.retries
    done = call("train", "random", data, "away://bucket/storm", *CHOICES, "--patience", "30m")
    assert done.status == 0, done.err
    assert clock() - began > 2 * AWAY
    assert storage.retries - before > 60
    AwayFileSystem.error = staticmethod(lambda: None)
    assert stored("storm") == stored("calm")
    assert any(name.endswith("encoder.safetensors") for name in stored("calm"))


def test_without_patience_training_ends_and_says_what_it_could_not_do(data: Path, clock: Clock) -> None:
    AwayFileSystem.error = staticmethod(outages(clock, 20))
    done = call("train", "random", data, "away://bucket/brief", *CHOICES)
    refused(done, "after 5 attempt(s): Connection refused; fix the cause and run again", status=3)


@pytest.mark.parametrize("text", ["soon", "30 minutes", "-1m", ""])
def test_what_is_no_time_is_refused_before_anything_is_read(text: str, data: Path) -> None:
    done = call("train", "random", data, "away://bucket/none", f"--patience={text}")
    refused(done, "--patience", "expected a number with a unit, for example 90s, 30m or 7d")
    assert stored("none") == {}


def test_mining(tmp_path: Path, clock: Clock) -> None:
    world: World = random_world(str(tmp_path / "world"), 60, 80, 8, shards=2, row_group_rows=32, with_labels=True)
    world.write_dump()
    for root in ("calm", "storm"):
        for path in Path(world.run).rglob("*"):
            if path.is_file():
                storage.write_bytes(f"away://bucket/{root}/{path.relative_to(world.run)}", path.read_bytes())
    assert call("mine", world.data, "away://bucket/calm", "--block-rows", "50").status == 0
    AwayFileSystem.error = staticmethod(outages(clock, 20))
    began = clock()
    done = call("mine", world.data, "away://bucket/storm", "--block-rows", "50", "--patience", "30m")
    assert done.status == 0, done.err
    assert clock() - began > 2 * AWAY
    AwayFileSystem.error = staticmethod(lambda: None)
    assert stored("storm") == stored("calm")
    assert any(name.startswith("negatives/") for name in stored("calm"))
