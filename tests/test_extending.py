"""docs/extending.md: every example works through the real commands, once it is where the page says, with its entry."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from tests.builders import build_data
from tests.command import ROOT, Done, extremis
from tests.pages import DOCS, FENCE
from tests.pipelines.raw import write_tiny
from trainer.config import load_config

PAGE = (DOCS / "extending.md").read_text()
PACKAGES = ("schemas", "search", "trainer", "pipelines", "extremis", "recipes")
FILES = {"recipe": 1, "metric": 2, "sink": 2, "loss": 2, "input form": 2, "source of negatives": 2, "encoder": 2}
LINES = 40
TINY = (
    "encoder.dimension=8",
    "order.batch=16",
    "order.streams=2",
    "train.epochs=2",
    "train.threads=1",
    "logging.tensorboard=false",
)
TINY_BAG = ("encoder.buckets=512", "encoder.hidden=16")
ONE_WORKER = ("--", "--direct_num_workers=1", "--direct_running_mode=in_memory")


@dataclass(frozen=True)
class Addition:
    """A section of the page: an example, its place in the project, its entries in other files, and commands."""

    example: Path
    place: str
    shown: str
    entries: Mapping[str, Sequence[str]]  # lines of the diff, by file
    commands: Sequence[str]

    @classmethod
    def of(cls, section: str) -> "Addition":
        """Read a section of the page."""
        paths = re.search(r"`(examples/extending/\S+)`, to be copied to `(\S+)`:", section)
        assert paths is not None
        fences = FENCE.findall(section)
        diffs = [body.splitlines() for language, body in fences if language == "diff"]
        consoles = [body for language, body in fences if language == "console"]
        commands = [line.removeprefix("$ extremis ") for body in consoles for line in body.splitlines()]
        entries = {lines[0].removeprefix("+++ "): lines[1:] for lines in diffs}
        return cls(ROOT / paths[1], paths[2], fences[0][1], entries, commands)

    def files(self) -> dict[str, str]:
        """Return the content of every file that is touched, by its path."""
        changed = {path: insert((ROOT / path).read_text(), lines) for path, lines in self.entries.items()}
        return {self.place: self.example.read_text(), **changed}


def sections() -> dict[str, Addition]:
    """Return the additions on the page, by what is added."""
    bodies = re.split(r"^## An? (.+)\n", PAGE, flags=re.MULTILINE)[1:]
    return {name: Addition.of(body) for name, body in zip(bodies[::2], bodies[1::2], strict=True)}


def insert(text: str, diff: Sequence[str]) -> str:
    """Add the lines with a `+` behind those with a blank, which are in `text` in this order."""
    lines, position = text.splitlines(), 0
    for line in diff:
        if line.startswith("+"):
            lines.insert(position, line[1:])
        else:
            position = lines.index(line[1:], position)
        position += 1
    return "\n".join(lines) + "\n"


def overlay(folder: Path, files: Mapping[str, str]) -> Path:
    """Make a tree of links to the project's packages in `folder`, with `files` in place of theirs."""
    for package in PACKAGES:
        _link(ROOT / package, folder / package, [folder / path for path in files])
    for path, text in files.items():
        (folder / path).write_text(text)
    return folder


def _link(source: Path, target: Path, changed: Sequence[Path]) -> None:
    if target in changed:
        return
    if not any(target in path.parents for path in changed):
        target.symlink_to(source)
        return
    target.mkdir()
    for child in source.iterdir():
        if child.name != "__pycache__":
            _link(child, target / child.name, changed)


ADDITIONS = sections()
Run = Callable[..., list[Done]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a DATA of a few rows."""
    folder = tmp_path_factory.mktemp("small") / "data"
    build_data(str(folder), shards=1)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[Done]]:
    return partial(run_commands, tmp_path)


def run_commands(folder: Path, name: str, **places: Path) -> list[Done]:
    """Run the commands of a section, with an object as last line of output, in a tree with its files.

    `places`: those that stand for a word of the page with a slash behind it; others are in `folder`.
    """
    addition = ADDITIONS[name]
    tree = overlay(_folder(folder / "tree"), addition.files())
    done = []
    for line in addition.commands:
        command, *words = line.split()
        arguments = [
            str(places.get(word[:-1], folder / word)) if word.endswith("/") or word == "runs/1" else word
            for word in words
        ]
        if command == "train":
            settings = TINY if "encoder.kind" in line else (*TINY, *TINY_BAG)
            arguments += [word for setting in settings for word in ("--set", setting)]
        arguments.append("--json")
        if command == "shard":
            arguments += ["--tokenizer", "train:100", *ONE_WORKER]
        done.append(extremis(command, *arguments, cwd=tree, env={"PYTHONPATH": str(tree)}))
    return done


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def losses(done: Done) -> list[float]:
    return [epoch["loss"] for epoch in done.json["epochs"]]


def recipe_of(folder: Path) -> dict:
    return load_config(str(folder / "runs" / "1" / "config.toml"))["recipe"]


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_short_and_touches_few_files(name: str) -> None:
    addition = ADDITIONS[name]
    assert addition.shown == addition.example.read_text()
    assert len(addition.shown.splitlines()) <= LINES
    assert len(addition.files()) == FILES[name]
    assert not (ROOT / addition.place).exists()


def test_every_example_is_on_the_page() -> None:
    assert ADDITIONS.keys() == FILES.keys()
    examples = {path for path in (ROOT / "examples" / "extending").iterdir() if path.is_file()}
    assert {addition.example for addition in ADDITIONS.values()} == examples


def test_a_recipe(run: Run, small: Path, tmp_path: Path) -> None:
    (trained,) = run("recipe", data=small)
    assert len(losses(trained)) == 2
    recipe = recipe_of(tmp_path)
    assert recipe["method"] == "frequent"
    assert recipe["negatives"]["frequency_share"] == 0.2
    assert recipe["classifier"]["initial_bias"] == -7.8  # of astra


def test_a_metric(run: Run, small: Path) -> None:
    _, evaluated = run("metric", data=small)
    metrics = evaluated.json["metrics"]
    assert metrics["MRR@1"] == metrics["P@1"]
    assert 0 < metrics["MRR@3"] <= metrics["MRR@10"] <= 100
    assert "MRR" in evaluated.out.partition("{")[0]


def test_a_sink(run: Run, tmp_path: Path) -> None:
    write_tiny(tmp_path / "raw")
    sharded, trained = run("sink")
    for split, rows in (("train", 30), ("test", 15)):
        manifest = open_manifest(DataLayout(sharded.json["data"]).queries(split))
        assert manifest.rows == rows
        assert all(shard.path.endswith(".arrow") for shard in manifest.shards)
    assert losses(trained)[1] < losses(trained)[0]


def test_a_loss(run: Run, small: Path, tmp_path: Path) -> None:
    (trained,) = run("loss", data=small)
    assert losses(trained)[1] < losses(trained)[0]
    assert recipe_of(tmp_path)["loss"] == {"kind": "focal", "temperature": 1.0, "chunk": 0, "gamma": 1.0}


def test_an_input_form(run: Run, tmp_path: Path) -> None:
    tables = {
        "labels": [["key", "text"], ["a", "sea"], ["b", "a ship, and its crew"]],
        "train": [["text", "labels"], *([f"point {n}\nof the sea", "a;b" if n % 2 else "a"] for n in range(20))],
        "test": [["text", "labels"], ["a ship", "b"]],
    }
    for name, rows in tables.items():
        with open(_parent(tmp_path / "tables" / f"{name}.csv"), "w", newline="") as file:
            csv.writer(file).writerows(rows)
    (sharded,) = run("input form")
    layout = DataLayout(sharded.json["data"])
    assert open_manifest(layout.queries("train")).rows == 20
    assert open_manifest(layout.queries("test")).rows == 1
    assert open_manifest(layout.labels).rows == 2


def _parent(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    return path


def test_a_source_of_negatives(run: Run, small: Path, tmp_path: Path) -> None:
    (trained,) = run("source of negatives", data=small)
    assert losses(trained)[1] < losses(trained)[0]
    assert recipe_of(tmp_path)["negatives"]["popular"] == {"hard": 5}


def test_an_encoder(run: Run, small: Path, tmp_path: Path) -> None:
    trained, evaluated = run("encoder", data=small)
    assert losses(trained)[1] < losses(trained)[0]
    assert recipe_of(tmp_path)["encoder"]["kind"] == "mean"
    assert evaluated.json["metrics"]["P@1"] > 0
