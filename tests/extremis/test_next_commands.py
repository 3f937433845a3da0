"""Long commands end with their steps, and with the next command, which can be typed; `-q` and `--json` stay clean."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.command import call, sets


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a RUN with a dump to be mined."""
    run = tmp_path_factory.mktemp("next") / "run"
    assert call("train", "astra", data, run, *sets("train.epochs=3", "refresh.source=table")).status == 0
    return run


@pytest.mark.parametrize("name", ["mine", "mine --out", "embed", "cluster"])
def test_a_command_ends_with_its_steps_and_the_next_command(name: str, data: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = {
        "mine": (),
        "mine --out": ("--out", out),
        "embed": (out, "--split", "train"),
        "cluster": ("--queries", tmp_path / "embedded", "--size", "8", "--for-epoch", "0"),
    }[name]
    if name == "cluster":
        assert call("embed", data, run, tmp_path / "embedded", "--split", "train").status == 0
    done = call(name.split()[0], data, run, *arguments)
    assert done.status == 0, done.err
    (steps,) = (line for line in done.err.splitlines() if line.startswith("steps: "))
    for step in steps.removeprefix("steps: ").split("; "):
        assert re.fullmatch(r"[a-z ]+ [\d,]+ rows in \d+\.\d s( \([\d.,]+ \w+\))?", step), steps
    last = done.err.splitlines()[-1]
    assert last.startswith("next: extremis ")
    following = call(*shlex.split(last)[2:])
    assert following.status == 0, following.err


@pytest.mark.parametrize("flag", ["-q", "--json"])
def test_quiet_and_json_stay_clean(flag: str, data: Path, run: Path, tmp_path: Path) -> None:
    done = call("embed", data, run, tmp_path / "out", flag)
    assert done.status == 0
    assert done.err == "" if flag == "-q" else json.loads(done.out)["rows"] == 200
    assert "steps" not in done.out
