"""A day whose commands are killed at any moment and run again is the day that nobody disturbed."""

import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import TableError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.storage import read_json
from schemas.table import Table
from scoring.exported import Exported
from tests.command import ROOT, environment, refused
from tests.days import TINY
from tests.forks import extremis, run, tree
from tests.loop.test_kill import last_checkpoint, records
from tests.pages import DOCS, blocks
from tests.pipelines.test_versions import SEQUENCE, Day, rows_of, write

THIRD = Day(None, True, [("p3", "again", ["l4"])])
SETS = [word for name, value in {**TINY, "logging.tensorboard": False}.items() for word in ("--set", f"{name}={value}")]
SHARD = ("--tokenizer", "train:200", "--row-group-rows", "3", "--shards", "2", "--labels", "all")
EXPORT = ("--index", "IVF2,Flat", "--calibration-split", "none", "--current")


Days = tuple[dict[str, Path], dict[str, int]]


@dataclass(frozen=True)
class Step:
    """A command of a day, the folder that it makes, and what is compared of it."""

    command: tuple[str, ...]
    made: str
    compared: Callable[[Path], Any]


def of_run(run: Path) -> Any:
    return records(run), last_checkpoint(run)


def of_tree(folder: Path) -> Any:
    for place in folder.rglob("_manifest.json"):
        Table.open(str(place.parent)).verify()
    return tree(folder)


def of_evaluation(run: Path) -> Any:
    files = (run / "evaluations").glob("train-*")
    return {path.name: read_json(str(path)) if path.suffix == ".json" else path.read_bytes() for path in files}


STEPS = {
    "shard": Step(("shard", "raw1", "data/1", "--onto", "data/0", *SHARD), "data/1", of_tree),
    "run": Step(("run", "random", "data/1", "runs/1", "--from", "runs/0", "--resume", *SETS), "runs/1", of_run),
    "evaluate": Step(("evaluate", "data/1", "runs/1", "--split", "train"), "runs/1", of_evaluation),
    "export": Step(("export", "data/1", "runs/1", "exports/1", "--onto", "exports", *EXPORT), "exports", of_tree),
}


def words(step: Step, root: Path) -> list[str]:
    """The command with its places under `root`."""
    return [f"{root}/{word}" if word.startswith(("raw", "data", "runs", "exports")) else word for word in step.command]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first day, and the second one's input."""
    root = tmp_path_factory.mktemp("before")
    for number in (0, 1):
        write(root / f"raw{number}", SEQUENCE[number])
    extremis("shard", root / "raw0", root / "data/0", *SHARD[:-2])
    extremis("train", "random", root / "data/0", root / "runs/0", *SETS)
    extremis("export", root / "data/0", root / "runs/0", root / "exports/0", *EXPORT)
    return root


@pytest.fixture(scope="module")
def days(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Days:
    """The state before each step of the second day, and after all; and how many changes of files each step made."""
    folder = tmp_path_factory.mktemp("days")
    states, changes, root = {"shard": before}, {}, before
    for name, after in zip(STEPS, [*list(STEPS)[1:], "all"], strict=True):
        root = shutil.copytree(root, folder / after)
        ((done, changes[name]),) = run(words(STEPS[name], root))
        assert done.status == 0, done.err
        states[after] = root
    return states, changes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moments", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_killed_and_run_again_makes_the_same(
    days: Days, tmp_path: Path, name: str, moments: int
) -> None:
    states, changes = days
    step = STEPS[name]
    expected = step.compared(states["all"] / step.made)
    draw = random.Random(moments)
    chosen = {*draw.sample(range(1, changes[name]), min(moments - 1, changes[name] - 1)), changes[name]}
    for moment in sorted(chosen):
        root = shutil.copytree(states[name], tmp_path / str(moment))
        (ended,) = run(words(step, root), kill_at=moment)
        assert ended.killed, f"{name}, before change {moment} of {changes[name]}: {ended}"
        extremis(*words(step, root))
        assert step.compared(root / step.made) == expected, f"{name}, killed before change {moment}"
        assert tree(root / "data/0") == tree(states["shard"] / "data/0")
        shutil.rmtree(root)


def begin_two_days(before: Path, tmp_path: Path, other_data: str) -> tuple[Path, list[str], list[str]]:
    """Copy the state `before` a day, and return its place, and the commands of that day and of another."""
    root = shutil.copytree(before, tmp_path / "root")
    write(root / "raw2", THIRD)
    other = ["shard", f"{root}/raw2", f"{root}/{other_data}", "--onto", f"{root}/data/0", *SHARD[:-2]]
    return root, words(STEPS["shard"], root), other


def test_two_days_at_once_from_one_base(days: Days, tmp_path: Path) -> None:
    states, _ = days
    root, first, other = begin_two_days(states["shard"], tmp_path, "data/2")
    for ended in run(first, other):
        assert ended.done.status == 0, ended.done.err
    assert of_tree(root / "data/1") == of_tree(states["all"] / "data/1")
    assert len(rows_of(f"{root}/data/2/queries/train")) == 12
    assert tree(root / "data/0") == tree(states["shard"] / "data/0")


def test_two_days_at_once_to_one_output(days: Days, tmp_path: Path) -> None:
    states, _ = days
    root, first, other = begin_two_days(states["shard"], tmp_path, "data/1")
    ended = run(first, other, apart=0.1)
    winners = [number for number, each in enumerate(ended) if each.done.status == 0]
    assert len(winners) == 1
    refused(ended[1 - winners[0]].done, f"{root}/data/1")
    of_tree(root / "data/1")
    assert len(rows_of(f"{root}/data/1/queries/train")) == (20, 12)[winners[0]]


def test_a_reader_of_the_base_is_not_disturbed(days: Days, tmp_path: Path) -> None:
    root = shutil.copytree(days[0]["shard"], tmp_path / "root")
    url = DataLayout(f"{root}/data/0").queries("train")
    expected, before = rows_of(url), tree(root / "data/0")
    thread = threading.Thread(target=extremis, args=words(STEPS["shard"], root))
    thread.start()
    reads = 0
    while thread.is_alive():
        assert rows_of(url) == expected
        reads += 1
    thread.join()
    assert reads > 3
    assert tree(root / "data/0") == before
    assert (root / "data/1/_manifest.json").exists()


def test_a_part_that_is_deleted_is_named_by_each_command(days: Days, tmp_path: Path) -> None:
    root = shutil.copytree(days[0]["all"], tmp_path / "root")
    write(root / "raw2", THIRD)
    shutil.rmtree(root / "data/0")
    gone = f"{root}/data/0"
    for command in (
        ["shard", f"{root}/raw2", f"{root}/data/2", "--onto", f"{root}/data/1", *SHARD[:-2]],
        ["run", "random", f"{root}/data/1", f"{root}/runs/2", "--from", f"{root}/runs/1", *SETS],
        ["evaluate", f"{root}/data/1", f"{root}/runs/1", "--split", "train"],
        ["export", f"{root}/data/1", f"{root}/runs/1", f"{root}/exports/2", "--onto", f"{root}/exports", *EXPORT],
    ):
        ((done, _),) = run(command)
        refused(done, gone, "missing")
    (root / "texts.txt").write_text("t3\n")
    extremis("predict", root / "exports", root / "texts.txt", root / "out.jsonl")  # needs no data
    shutil.rmtree(root / "exports/0")
    with pytest.raises(TableError, match=r"part 0001 \(.*exports/0\) is missing"):
        Exported.open(f"{root}/exports")


@pytest.mark.slow
def test_the_script_of_the_page_makes_a_day_and_goes_on_after_a_failed_one(before: Path, tmp_path: Path) -> None:
    (script,) = blocks(DOCS / "versions.md", "sh")
    script = script.replace("evaluate", "evaluate --split train")
    script = script.replace("extremis ", f"{shlex.quote(sys.executable)} -m extremis ")
    root = shutil.copytree(before, tmp_path / "root")
    (tmp_path / "day.sh").write_text(script)
    for number, day in ((1, SEQUENCE[1]), (2, Day(None, True, [("p4", "of", [])])), (3, THIRD)):
        write(root / "raw" / str(number), day)

    def live(day: str) -> int:
        command = ["sh", str(tmp_path / "day.sh"), str(root), day]
        return subprocess.run(command, env=environment(), cwd=ROOT, timeout=300, check=False).returncode

    assert live("1") == 0
    assert (live("2"), live("3")) == (2, 0)  # its only point has no label
    assert (root / "exports/CURRENT").read_text() == "3\n"
    after = tree(root)
    assert live("3") == 0
    assert tree(root) == after
    assert open_manifest(f"{root}/data/3").parameters["version"]["needs"][1] == ["1", "../1"]
