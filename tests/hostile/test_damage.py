"""A bit that flips in a file of any artifact: the command that reads it names the file and publishes nothing, or has
the result of an undisturbed run."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.command import call
from tests.hostile.loop import COMMANDS, arguments, files

Loop = tuple[Path, dict[str, Any]]

# What reads an artifact: commands that would train on it, publish it or export it.
READERS = {"data": ("train", "mine", "embed", "evaluate", "fuse", "export"), "run": ("mine", "embed", "fuse", "export")}
READERS["export"] = ("predict",)


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def check(loop: Loop, name: str, reader: str, folder: Path, draw: random.Random) -> int:
    """Flip a bit of the file `name` in a copy of the loop, run `reader` on it, and return its status."""
    local, said = loop
    work = folder / "work"
    shutil.copytree(local, work)
    _, inside, made = COMMANDS[reader]
    out = work if inside else folder / "out"
    for place in filter(None, (inside and f"run/{inside}", "" if inside else None)):
        shutil.rmtree(work / place, ignore_errors=True)
    try:
        flip(work / name, draw)
    except FileNotFoundError:  # what the command makes itself
        shutil.rmtree(work)
        return 0
    done = call(*arguments(reader, str(work), str(out)))
    if done.status == 0:
        if reader == "evaluate":
            assert done.json["metrics"] == said["metrics"]
        else:
            assert files(out / made) == files(local / made), name
    else:
        assert "Traceback" not in done.err
        assert "bug in Extremis" not in done.err
        root = name.split("/")[0]
        assert f"work/{root}" in done.err, done.err
        assert any(word in done.err for word in ("damaged", "checksum", "manifest", "format", "not valid")), done.err
        assert not (out / made / "_manifest.json").exists()
    shutil.rmtree(folder)
    return done.status


@pytest.mark.parametrize("reader", ["export", "predict"])
def test_a_damaged_tokenizer_is_never_exported_nor_used(loop: Loop, tmp_path: Path, reader: str) -> None:
    place = "data/tokenizer/tokenizer.json" if reader == "export" else "export/encoder/tokenizer.json"
    for seed in range(3):
        assert check(loop, place, reader, tmp_path / str(seed), random.Random(seed)) == 2


def test_a_damaged_config_of_a_run_is_not_trained_on(loop: Loop, tmp_path: Path) -> None:
    assert check(loop, "run/config.toml", "export", tmp_path / "a", random.Random(1)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("root", "reader"), [(root, reader) for root in READERS for reader in READERS[root]])
def test_a_flip_in_every_file(root: str, reader: str, loop: Loop, tmp_path: Path) -> None:
    """A file that the command does not read may be damaged; what it reads is refused by some of the flips."""
    draw, statuses = random.Random(3), Counter[int]()
    for number, name in enumerate(files(loop[0] / root)):
        statuses[check(loop, f"{root}/{name}", reader, tmp_path / str(number), draw)] += 1
    assert set(statuses) <= {0, 2}
    assert statuses[2], f"{reader} has not met any of {statuses.total()} damaged files of {root}"
