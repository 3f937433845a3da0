"""docs/extending.md: every example works through the real commands, once it is where the page says, with its entry."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from tests.builders import build_data
from tests.command import ROOT, Done, environment
from tests.pages import DOCS, FENCE
from tests.pipelines.raw import write_tiny
from trainer.recipe_files import load_config

PAGE = (DOCS / "extending.md").read_text()
PACKAGES = ("schemas", "search", "trainer", "pipelines", "scoring", "extremis", "recipes")
FILES = {
    "method": 2,
    "loss": 1,
    "score": 1,
    "command": 2,
    "runner": 2,
    "recipe": 1,
    "metric": 2,
    "sink": 2,
    "watcher of a run": 2,
    "input format": 2,
    "source of negatives": 2,
    "encoder": 2,
}
LINES = 43
TINY = (
    "encoder.dimension=8",
    "order.batch=16",
    "order.streams=2",
    "train.epochs=2",
    "train.threads=1",
    "logging.tensorboard=false",
)
TINY_BAG = ("encoder.buckets=512", "encoder.hidden=16", "encoder.dropout=0")  # which 8 columns are too few for
ONE_WORKER = ("--", "--direct_num_workers=1", "--direct_running_mode=in_memory")


@dataclass(frozen=True)
class Addition:
    """A section of the page: examples by their places, what it shows of the first, entries in other files, commands."""

    examples: Mapping[str, Path]
    shown: str
    entries: Mapping[str, Sequence[str]]  # lines of the diff, by file
    commands: Sequence[str]

    @classmethod
    def of(cls, section: str) -> "Addition":
        """Read a section of the page."""
        copies = re.findall(r"`(examples/extending/\S+)` to `(\S+)`", section)
        fences = FENCE.findall(section)
        diffs = [body.splitlines() for language, body in fences if language == "diff"]
        consoles = [body for language, body in fences if language == "console"]
        commands = [line.removeprefix("$ extremis ") for body in consoles for line in body.splitlines()]
        entries = {lines[0].removeprefix("+++ "): lines[1:] for lines in diffs}
        return cls({place: ROOT / example for example, place in copies}, fences[0][1], entries, commands)

    def files(self) -> dict[str, str]:
        """Return the content of every file that is touched, by its path."""
        changed = {path: insert((ROOT / path).read_text(), lines) for path, lines in self.entries.items()}
        return {**{place: example.read_text() for place, example in self.examples.items()}, **changed}


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


def overlay(folder: Path, files: Mapping[str, str]) -> None:
    """Make a tree of links to the project's packages in `folder`, with `files` in place of theirs."""
    for package in PACKAGES:
        _link(ROOT / package, folder / package, [folder / path for path in files])
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)


def _link(source: Path, target: Path, changed: Sequence[Path]) -> None:
    if target in changed:
        return
    if not any(target in path.parents for path in changed):
        target.symlink_to(source)
        return
    target.mkdir()
    for child in source.iterdir():
        if child.name == "__pycache__":  # what is compiled: a copy, so that the project's own stays as it is
            shutil.copytree(child, target / child.name)
        else:
            _link(child, target / child.name, changed)


ADDITIONS = sections()

# Calls the command line of the tree, in one process, which loads its libraries once.
CALLS = """
import dataclasses, json, sys
from tests.command import call
print(json.dumps([dataclasses.asdict(call(*arguments)) for arguments in json.load(sys.stdin)]))
"""


@dataclass(frozen=True)
class Outcome:
    """Results of a section's commands, each with an object as last line of output, and their folder."""

    folder: Path
    done: list[Done]

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of its run."""
        return load_config(str(self.folder / "runs" / "1" / "config.toml"))["recipe"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run the commands of every section on tiny data, in a tree with the files of all of them."""
    root = tmp_path_factory.mktemp("extending")
    build_data(str(root / "data"), shards=1)
    for name in ("sink", "runner"):
        write_tiny(root / name / "raw")
    write_tables(root / "input format" / "tables")
    calls = [
        (name, arguments_of(line, root, root / name))
        for name, addition in ADDITIONS.items()
        for line in addition.commands
    ]
    tree = root / "tree"
    tree.mkdir()
    overlay(tree, files_of_all())
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps([arguments for _, arguments in calls]),
        capture_output=True,
        text=True,
        env=environment({"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}),
        cwd=tree,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = {name: Outcome(root / name, []) for name in ADDITIONS}
    for (name, _), result in zip(calls, json.loads(done.stdout.splitlines()[-1]), strict=True):
        results[name].done.append(Done(**result))
    return results


def files_of_all() -> dict[str, str]:
    """Return the content of every file that any section touches: its own, and those that have entries of several."""
    files = {place: file.read_text() for each in ADDITIONS.values() for place, file in each.examples.items()}
    for addition in ADDITIONS.values():
        for path, lines in addition.entries.items():
            files[path] = insert(files[path] if path in files else (ROOT / path).read_text(), lines)
    return files


def arguments_of(line: str, root: Path, folder: Path) -> list[str]:
    """Return a page's command line for tiny data: `data/` is a small DATA of `root` where the section makes none."""
    command, *words = line.split()
    own_data = (folder / "raw").exists()

    def place(word: str) -> str:
        if word == "data/" and command != "shard" and not own_data:
            return str(root / "data")
        return str(folder / word) if "/" in word and not word.startswith("mine/") else word

    for_beam = words[words.index("--") :] if "--" in words else ONE_WORKER
    arguments = [command, *map(place, words[: -len(for_beam)] if "--" in words else words), "--json"]
    if command == "shard":
        arguments += ["--tokenizer", "train:100", *for_beam]
    if command == "train":
        settings = TINY if "encoder.kind" in line else (*TINY, *TINY_BAG)
        arguments += [word for setting in settings for word in ("--set", setting)]
    return arguments


def write_tables(folder: Path) -> None:
    """Write a data set with columns between |."""
    tables = {
        "labels": [["key", "text"], ["a", "sea"], ["b", "a ship, and its crew"]],
        "train": [["text", "labels"], *([f"point {n}\nof the sea", "a;b" if n % 2 else "a"] for n in range(20))],
        "test": [["text", "labels"], ["a ship", "b"]],
    }
    folder.mkdir(parents=True)
    for name, rows in tables.items():
        with open(folder / f"{name}.psv", "w", newline="") as file:
            csv.writer(file, delimiter="|").writerows(rows)


def losses(done: Done) -> list[float]:
    """Return the loss of each epoch."""
    return [epoch["loss"] for epoch in done.json["epochs"]]


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_short_and_touches_few_files(name: str) -> None:
    addition = ADDITIONS[name]
    texts = [example.read_text() for example in addition.examples.values()]
    shown = addition.shown, indent(addition.shown, "    ")  # the page shows the end of a file, or of its last class
    assert texts[0].endswith(shown)
    assert all(len(text.splitlines()) <= LINES for text in texts)
    assert len(addition.files()) == FILES[name]
    assert not any((ROOT / place).exists() for place in addition.examples)


def test_every_example_is_on_the_page() -> None:
    assert ADDITIONS.keys() == FILES.keys()
    examples = {path for path in (ROOT / "examples" / "extending").iterdir() if path.is_file()}
    assert {example for addition in ADDITIONS.values() for example in addition.examples.values()} == examples


@pytest.mark.parametrize("name", FILES)
def test_its_commands_succeed(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].done
    assert [done.err for done in outcomes[name].done if done.status] == []


def test_a_command(outcomes: dict[str, Outcome]) -> None:
    (counted,) = outcomes["command"].done
    assert counted.json["queries"] > 1
    assert 0 < counted.json["tokens"] <= counted.json["longest"]


def test_a_runner(outcomes: dict[str, Outcome]) -> None:
    (sharded,) = outcomes["runner"].done
    assert open_manifest(DataLayout(sharded.json["data"]).queries("train")).rows == 30
    assert re.search(r"^ +\d+\.\d\d s  \w", sharded.err, re.MULTILINE)


def test_a_recipe(outcomes: dict[str, Outcome]) -> None:
    recipe = outcomes["recipe"].recipe
    assert recipe["name"] == "frequent"
    assert recipe["negatives"]["frequency_share"] == 0.2
    assert recipe["classifier"]["weight_decay"] == 0.003  # of astra
    assert recipe["classifier"]["initial_bias"] < -1  # as astra leaves it to the data


def test_a_metric(outcomes: dict[str, Outcome]) -> None:
    trained, evaluated = outcomes["metric"].done
    metrics = evaluated.json["metrics"]
    assert metrics["MRR@1"] == metrics["P@1"]
    assert 0 < metrics["MRR@1"] <= metrics["MRR@3"] <= metrics["MRR@10"] <= 100
    assert re.search(r"^.*MRR( .*\d){4}", evaluated.err, re.MULTILINE)
    assert trained.status == 0


def test_a_sink(outcomes: dict[str, Outcome]) -> None:
    sharded, trained = outcomes["sink"].done
    for split, rows in (("train", 30), ("test", 15)):
        manifest = open_manifest(DataLayout(sharded.json["data"]).queries(split))
        assert manifest.rows == rows
        assert all(shard.path.endswith(".arrow") for shard in manifest.shards)
    assert losses(trained)[1] < losses(trained)[0]


def test_a_watcher_of_a_run(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["watcher of a run"]
    with (outcome.folder / "runs" / "1" / "numbers.csv").open(newline="") as file:
        numbers = [float(value) for _, name, value in csv.reader(file) if name == "epoch/loss"]
    assert numbers == losses(outcome.done[0])


def test_a_method(outcomes: dict[str, Outcome]) -> None:
    trained, resumed, evaluated = outcomes["method"].done
    assert losses(trained)[1] < losses(trained)[0]
    assert resumed.json["epochs"] == []
    assert (outcomes["method"].recipe["method"], outcomes["method"].recipe["spread"]) == (
        "spread:Spread",
        {"weight": 0.1},
    )
    assert evaluated.json["metrics"]["P@1"] > 0


def test_a_loss(outcomes: dict[str, Outcome]) -> None:
    trained, evaluated = outcomes["loss"].done
    assert losses(trained)[1] < losses(trained)[0]
    assert evaluated.json["metrics"]["P@1"] > 0
    assert outcomes["loss"].recipe["loss"] == {"kind": "focal:Focal", "temperature": 1.0, "chunk": 0, "gamma": 1.0}


def test_a_score(outcomes: dict[str, Outcome]) -> None:
    _, fitted, evaluated, exported, predicted = outcomes["score"].done
    assert fitted.json["by"] == "product:fit"
    assert evaluated.json["scores"] == "fused"
    assert predicted.json["queries"] == 20
    assert exported.status == 0


def test_an_input_format(outcomes: dict[str, Outcome]) -> None:
    (sharded,) = outcomes["input format"].done
    layout = DataLayout(sharded.json["data"])
    assert open_manifest(layout.queries("train")).rows == 20
    assert open_manifest(layout.queries("test")).rows == 1
    assert open_manifest(layout.labels).rows == 2


def test_a_source_of_negatives(outcomes: dict[str, Outcome]) -> None:
    (trained,) = outcomes["source of negatives"].done
    assert losses(trained)[1] < losses(trained)[0]
    assert outcomes["source of negatives"].recipe["negatives"]["popular"] == {"hard": 5}


def test_an_encoder(outcomes: dict[str, Outcome]) -> None:
    trained, evaluated = outcomes["encoder"].done
    assert losses(trained)[1] < losses(trained)[0]
    assert outcomes["encoder"].recipe["encoder"]["kind"] == "mean"
    assert evaluated.json["metrics"]["P@1"] > 0
