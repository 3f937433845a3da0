"""Two writers of one output, of the same or of other inputs: exactly one output, whole, of its own maker's inputs."""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import pytest

from schemas.manifest import open_manifest
from schemas.table import Table
from tests.command import ROOT, command, environment, sets
from tests.forks import extremis
from tests.pipelines.raw import write_tate

PAIRS = 200
KINDS = ("shard", "mine", "cluster", "embed", "train", "export", "fuse")
SMALL = ("--tokenizer", "train:500", "--row-group-rows", "64")
RECIPE = sets("train.epochs=2", "checkpoint.every_steps=3", "logging.tensorboard=false", "validation.every_epochs=9")


class World:
    """Raw data, and for the commands that need them DATA and a finished run with a dump, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def raw(self) -> Path:
        return write_tate(self.folder / "raw", 300, 50)

    @cached_property
    def data(self) -> Path:
        extremis("shard", self.raw, self.folder / "data", *SMALL, "--validation", "0.2")
        return self.folder / "data"

    @cached_property
    def run(self) -> Path:
        mined = sets("train.epochs=3", "refresh.source=table")
        extremis("run", "astra", self.data, self.folder / "run", *RECIPE, *mined)
        return self.folder / "run"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def writer(kind: str, world: World, out: Path | str, choice: int) -> list[str]:
    """A command that writes `out`; of another `choice` it makes something else of it."""
    words: list[object]
    match kind:
        case "shard":
            words = [world.raw, out, *SMALL, "--seed", choice]
        case "mine":
            words = [world.data, world.run, "--out", out, "--width", 3 + choice]
        case "cluster":
            queries = world.run / "dumps/epoch-0000/queries"
            words = [world.data, world.run, "--queries", queries, "--out", out, "--size", 8 * (1 + choice)]
        case "embed":
            words = [world.data, world.run, out, "--split", ("train", "test")[choice]]
        case "train":
            words = ["astra", world.data, out, *RECIPE, "--set", f"train.seed={choice}"]
        case "export":
            words = [world.data, world.run, out, "--dtype", ("float32", "float16")[choice]]
        case _:
            words = [world.data, out, "--shortlist", 10 + choice]
    return command(kind, *map(str, words))


def check_made(kind: str, out: Path, by_choice: list[tuple[int, str]]) -> None:
    """`out` is whole, and it is what one of the writers, (choice, last line), said that it made."""
    tables = [path.parent for path in out.rglob("_manifest.json")]
    assert tables
    for table in tables:
        manifest = open_manifest(str(table))
        Table(str(table), manifest).verify()
    if kind == "train":
        ((choice, _),) = by_choice
        config = (out / "config.toml").read_text()
        assert f"seed = {choice}\n" in config
        newest = open_manifest(str(max((out / "checkpoints").iterdir())), "checkpoint")
        assert newest.parameters["seed"] == choice
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        trained = [line["step"] for line in steps if line["kind"] == "train"]
        assert trained == list(range(1, len(trained) + 1))
        assert newest.parameters["progress"]["global_step"] == trained[-1]
        return
    place = {"mine": out / "queries", "fuse": out / "fusion"}.get(kind, out)
    if kind == "fuse":
        place = next(place.iterdir())
    manifest = open_manifest(str(place))
    said = [(choice, json.loads(line)) for choice, line in by_choice]
    digests = [(choice, (body["tables"]["queries"] if kind == "mine" else body)["digest"]) for choice, body in said]
    choices = [choice for choice, digest in digests if digest == manifest.digest]
    assert choices, f"{manifest.digest} is none of {digests}"
    choice, parameters = choices[0], manifest.parameters
    expected = {
        "shard": lambda: parameters["options"]["seed"] == choice,
        "mine": lambda: parameters["width"] == 3 + choice,
        "cluster": lambda: parameters["clusters"]["size"] == 8 * (1 + choice),
        "embed": lambda: parameters["split"] == ("train", "test")[choice],
        "export": lambda: parameters["options"]["dtype"] == ("float32", "float16")[choice],
        "fuse": lambda: parameters["shortlist"] == 10 + choice,
    }
    assert expected[kind]()


def race(
    kind: str,
    world: World,
    folder: Path,
    choices: tuple[int, int],
    apart: float,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    fetch: Callable[[], object] = lambda: None,
) -> list[int]:
    """Run two writers of one output, the second `apart` seconds later; their exit statuses.

    The output is `folder`/out, or is at `url` in a store, which `env` reaches, from where `fetch` copies it there.
    """
    out = folder / "out"
    if kind == "fuse":  # its output is in a run
        shutil.copytree(world.run, out)
    options = {"env": environment(env), "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([*writer(kind, world, url or out, choices[0]), "--json"], **options)
    time.sleep(apart)
    second = subprocess.Popen([*writer(kind, world, url or out, choices[1]), "--json"], **options)
    done = [writer.communicate(timeout=300) for writer in (first, second)]
    statuses = [first.returncode, second.returncode]
    fetch()
    context = f"{kind} {choices} {apart:.2f} s apart: {statuses}\n" + "\n--\n".join(err for _, err in done)
    assert "Traceback" not in context, context
    assert sorted(statuses) in ([0, 0], [0, 2], [0, 5]), context
    winners = [number for number in (0, 1) if statuses[number] == 0]
    # Two that ended well wrote one after the other, or one found it finished.
    check_made(kind, out, [(choices[number], done[number][0].splitlines()[-1]) for number in winners])
    for number in {0, 1} - {*winners}:
        said = [line for line in done[number][1].splitlines() if line.startswith("error: ")]
        assert len(said) == 1, context
        refusals = (
            "Wait until that process has finished",
            "a run exists here already",
            "made with other options",
            "contains a finished",
        )
        assert any(words in said[0] for words in refusals), context
    if kind != "fuse" and choices[0] != choices[1]:
        assert len(winners) == 1, context
    left = [path for path in out.rglob("*") if path.name.startswith((".claim", ".staging", ".tmp-"))]
    assert not left, context
    return statuses


@pytest.mark.slow  # two days to one output, in test_day_kill.py, are two writers
@pytest.mark.parametrize("kind", KINDS)
def test_of_two_writers_one_has_it(world: World, tmp_path: Path, kind: str) -> None:
    race(kind, world, tmp_path, (0, 1), 0.0)


@pytest.mark.slow
def test_of_two_that_make_the_same_one_may_find_it_finished(world: World, tmp_path: Path) -> None:
    race("embed", world, tmp_path, (0, 0), 1.0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_pairs_of_writers(world: World, tmp_path: Path) -> None:
    race_many(world, tmp_path, PAIRS, random.Random(1), lambda line: None)


def race_many(world: World, folder: Path, pairs: int, draw: random.Random, say: Callable[[str], None]) -> None:
    """Race `pairs` of writers of all kinds, of the same and of other inputs, 0 to 2 s apart."""
    counts: dict[tuple[str, bool, tuple[int, ...]], int] = {}
    for number in range(pairs):
        kind, same = KINDS[number % len(KINDS)], draw.random() < 0.5
        place = folder / str(number)
        place.mkdir()
        statuses = race(kind, world, place, (0, 0) if same else (0, 1), draw.uniform(0, 2))
        shutil.rmtree(place)
        key = kind, same, tuple(statuses)
        counts[key] = counts.get(key, 0) + 1
        say(f"{number + 1} {key}")
    assert sum(counts.values()) == pairs
