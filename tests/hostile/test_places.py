"""Every command with an output × every kind of place: the result, or one message and all else unchanged to the byte."""

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import command, environment
from tests.hostile.loop import SHARD, TRAIN
from tests.hostile.outcome import run

# Arguments of each command, whether its output is a folder, and what replaces an output.
Arguments = tuple[tuple[str, ...], bool, tuple[str, ...]]
COMMANDS: dict[str, Arguments] = {
    "shard": (("shard", "raw", "OUT", *SHARD), True, ("--overwrite",)),
    "train": (("train", "random", "data", "OUT", *TRAIN), True, ("--resume",)),
    "run auto": (("run", "auto", "data", "OUT", "--minutes", "0.1"), True, ("--resume",)),
    "embed": (("embed", "data", "run", "OUT"), True, ()),
    "mine": (("mine", "data", "run", "--out", "OUT"), True, ("--overwrite",)),
    "cluster": (
        ("cluster", "data", "run", "--queries", "vectors", "--size", "4", "--out", "OUT"),
        True,
        ("--overwrite",),
    ),
    "export": (("export", "data", "run", "OUT"), True, ("--overwrite",)),
    "tuples": (("tuples", "run", "OUT", "--data", "data", "--keys"), True, ("--overwrite",)),
    "ablate": (("ablate", "data", "OUT", "--recipes", "random", *TRAIN), True, ("--retry",)),
    "predict": (("predict", "export", "texts.jsonl", "OUT", "--to", "csv"), False, ("--overwrite",)),
    "predict a split": (("predict", "export", "--data", "data", "OUT", "--to", "parquet"), False, ("--overwrite",)),
    "report": (("report", "data", "run", "--queries", "0", "--out", "OUT"), False, ()),
    "recipes": (("recipes", "copy", "astra", "OUT"), False, ()),
}
FOLDERS = [name for name, (_, is_folder, _) in COMMANDS.items() if is_folder]
FILES = [name for name, (_, is_folder, _) in COMMANDS.items() if not is_folder]
MADE = {"run auto": "train"}  # what is made in a moment, and of the same kind
OTHERS = ("raw", "data", "data/labels", "data/queries/train", "run", "run/checkpoints", "vectors", "export", "notes")
KIND = {"shard": "data", "train": "run", "run auto": "run", "embed": "vectors", "export": "export"}
FULL = os.makedev(1, 7)
NULL = os.makedev(1, 3)


@pytest.fixture(scope="module")
def world(loop: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a loop of its own, in which the commands run."""
    folder = tmp_path_factory.mktemp("places") / "world"
    shutil.copytree(loop[0], folder)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("kept\n")
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture
def out(world: Path) -> Iterator[Path]:
    """Return a place that nothing is at, and remove what a test makes there."""
    place = world / "out"
    yield place
    for path in world.glob("out*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def words(name: str, out: Path | str, *more: str) -> list[str]:
    return [str(out) if word == "OUT" else word for word in (*COMMANDS[name][0], *more)]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Type and content of all that is below a folder, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
        found[str(path.relative_to(folder))] = stat.S_IFMT(mode), content
    return found


def refuse(world: Path, name: str, out: Path | str, *more: str, status: int | tuple[int, ...] = 2) -> None:
    """The command ends with `status` and one message, and nothing has changed."""
    before = snapshot(world)
    run(*words(name, out, *more), status=status)
    assert snapshot(world) == before


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in MADE])
def test_an_absent_place_and_what_is_there_then(world: Path, out: Path, name: str) -> None:
    run(*words(name, out), status=0)
    made = snapshot(out)
    assert made
    assert not [path for path in made if Path(path).name.startswith(".")]  # no mark, claim or staging
    again = run(*words(name, out), status=(0, 2))
    assert again.status == 0 or name == "train"
    assert {path: body for path, body in snapshot(out).items() if "ablation" not in path} == {
        path: body for path, body in made.items() if "ablation" not in path
    }
    for other in FOLDERS:
        if other != name and MADE.get(other) != name:
            refuse(world, other, out, *COMMANDS[other][2])


@pytest.mark.parametrize("kind", ["empty", "a link to nothing", "a link to an empty folder"])
def test_an_empty_place(world: Path, out: Path, kind: str) -> None:
    target = world / "out-there"
    if kind == "empty":
        out.mkdir()
    else:
        out.symlink_to(target)
    if kind.endswith("folder"):
        target.mkdir()
    run(*words("export", out), status=0)
    assert (out / "_manifest.json").is_file()
    assert out.is_symlink() == (kind != "empty")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_place_of_another_kind(world: Path, name: str) -> None:
    for place in OTHERS:
        if place != KIND.get(name):
            refuse(world, name, place)
            refuse(world, name, place, *COMMANDS[name][2])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_within_an_input(world: Path, name: str) -> None:
    for place in {"data", "run", "export"} & set(COMMANDS[name][0][1:]):
        refuse(world, name, f"{place}/inside")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_none(world: Path, out: Path, name: str) -> None:
    out.write_text("kept\n")
    refuse(world, name, out)
    out.unlink()
    os.mkfifo(out)
    refuse(world, name, out)
    out.unlink()
    _make_node(out, NULL)
    refuse(world, name, out)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_there(world: Path, out: Path, name: str) -> None:
    out.write_text("kept\n")
    refuse(world, name, out)
    if COMMANDS[name][2]:
        run(*words(name, out, *COMMANDS[name][2]), status=0)
        assert out.read_bytes() != b"kept\n"


def test_predictions_over_an_input(world: Path, out: Path) -> None:
    Path(f"{out}-linked").symlink_to(world / "texts.jsonl")
    os.link(world / "texts.jsonl", f"{out}-hard")
    for place in ("texts.jsonl", "./data/../texts.jsonl", "out-linked", "out-hard", "data", "notes"):
        refuse(world, "predict", place, "--overwrite")


@pytest.mark.parametrize("name", FILES)
def test_a_file_behind_a_link(world: Path, out: Path, name: str) -> None:
    target = world / "out-there"
    out.symlink_to(target)
    run(*words(name, out), status=0)
    assert out.is_symlink()
    assert target.stat().st_size
    if COMMANDS[name][2]:
        target.write_text("")
        run(*words(name, out, *COMMANDS[name][2]), status=0)
        assert out.is_symlink()
        assert target.stat().st_size


@pytest.mark.parametrize("name", FILES)
def test_devices_and_pipes_are_written_through(world: Path, out: Path, name: str) -> None:
    run(*words(name, out), status=0)
    expected = out.read_bytes()
    out.unlink()
    os.mkfifo(out)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(out.read_bytes()))
    reader.start()
    run(*words(name, out), status=0)
    reader.join(20)
    assert stat.S_ISFIFO(out.stat().st_mode)
    assert len(read[0]) == len(expected)
    out.unlink()
    _make_node(out, NULL)
    run(*words(name, out), status=0)
    assert stat.S_ISCHR(out.stat().st_mode)
    out.unlink()
    _make_node(out, FULL)
    refuse(world, name, out, status=6)


@pytest.mark.parametrize("place", ["/dev/stdout", "/proc/self/fd/1"])
def test_an_open_file_goes_on(world: Path, out: Path, place: str) -> None:
    out.write_text("before\n")
    with out.open("ab") as file:
        subprocess.run(command(*words("recipes", place)), stdout=file, check=True, cwd=world, env=_checkout())
        file.write(b"after\n")
    lines = out.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert len(lines) > 5


@pytest.mark.parametrize("name", [*FILES, "shard", "embed"])
@pytest.mark.parametrize("options", ["ro", "size=16k", pytest.param("size=4k", marks=pytest.mark.slow)])
def test_a_disk_that_takes_nothing(world: Path, out: Path, name: str, options: str) -> None:
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", out], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        if name in FILES and options != "ro":
            with pytest.raises(OSError, match="No space"):
                (out / "full").write_bytes(bytes(20_000))
        refuse(world, name, out / "made", status=4 if options == "ro" else (2, 6))
    finally:
        subprocess.run(["umount", out], check=True)


def _make_node(path: Path, device: int) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, device)
    except PermissionError:
        pytest.skip("no device can be made here")


def _checkout() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return environment({"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])})
