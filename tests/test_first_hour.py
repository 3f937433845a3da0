"""A newcomer's first hour, by what the pages show: the demo in a clone, and data of one's own with the wheel."""

import csv
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT, environment
from tests.pages import DOCS, FENCE, blocks, typed, typed_lines
from tests.wheel import build_wheel

# The installation that runs this test stands for the one that the Makefile would make.
INSTALLED = Path(sys.prefix)
SITE = sysconfig.get_path("purelib")
# A recipe that is through with all of Tate in seconds; a newcomer waits for the whole one.
QUICK = " ".join(
    f"--set {setting}"
    for setting in (
        "encoder.dimension=32",
        "encoder.hidden=0",
        "encoder.residual=false",
        "negatives.random=100",
        "train.epochs=3",
        "refresh.start=2",
        "refresh.every=1",
        "refresh.stale=wait",
    )
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists() or not (INSTALLED / "bin" / "extremis").exists():
        pytest.skip("needs a checkout, and an installation of it")
    folder = tmp_path_factory.mktemp("first") / "extremis"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    (folder / ".venv").symlink_to(INSTALLED)
    return folder


def follow(line: str, clone: Path) -> str:
    """Run a command line in the clone and return its output. It has to succeed."""
    path = f"{INSTALLED / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = environment({"PATH": path, "PYTHONPATH": str(clone)})
    done = subprocess.run(line, shell=True, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_in_a_clone(clone: Path) -> None:
    said = follow(f'make -o .venv/.demo demo DEMO="{QUICK}"', clone)
    assert "PSP" in said
    for line in said.splitlines()[-3:-1]:  # what to type next, but for one's own data
        follow(line, clone)
    for line in typed(DOCS / "quickstart.md"):
        follow(f"{line} {QUICK}" if line.startswith("extremis run") else line, clone)
    for run in ("demo/run", "runs/tate"):
        assert (clone / run / "report.html").stat().st_size < 5_000_000


# Which files the packages of the wheel are read from, and that they are not those of this checkout.
OURS = """
import extremis, pipelines, schemas, search, sys, trainer
for package in (extremis, pipelines, schemas, search, trainer):
    assert package.__file__.startswith(sys.prefix), package.__file__
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_data_of_ones_own_with_the_wheel(tmp_path: Path) -> None:
    """All of your-data.md in its order, in the shell and in Python, in an environment that has our wheel alone."""
    folder = tmp_path / "hour"
    folder.mkdir()
    shutil.copy(build_wheel(tmp_path), folder)
    _write_keyed(folder / "mine")
    said = _type_page(DOCS / "your-data.md", folder)
    summary = blocks(DOCS / "your-data.md", "")[0]
    assert [line for line in summary.splitlines() if line not in said] == []
    assert "data/: up to date: built from this input with these options" in said
    for run in ("runs/1", "runs/2"):
        assert (folder / run / "report.html").stat().st_size < 5_000_000
    with open(folder / "predictions.csv", newline="") as file:
        shell = [row["text"] for row in csv.DictReader(file)]
    assert len(shell) == 5
    python = said.partition("a ship in a storm\n")[2].splitlines()[:5]
    assert any("ship" in label for label in shell)
    assert any("ship" in label for label in python)


def _type_page(page: Path, folder: Path) -> str:
    """Type the blocks of a page into one shell, and return what it says; a Python block is a script of its own.

    The packages that ours needs are those of the installation that runs this test: it takes gigabytes to install them.
    """
    dependencies = f"import site; open(site.getsitepackages()[0] + '/dependencies.pth', 'w').write({SITE!r})"
    lines = []
    for number, (language, body) in enumerate(FENCE.findall(page.read_text())):
        if language == "python":
            (folder / f"block-{number}.py").write_text(body)
            lines.append(f"python block-{number}.py")
        for line in typed_lines(body) if language == "console" else ():
            lines.append(line)
            if line.startswith("pip install"):
                lines += [f"python -c {shlex.quote(code)}" for code in (dependencies, OURS)]
    path = f"{INSTALLED / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = environment({"PATH": path, "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"})
    env.pop("PYTHONPATH", None)
    script = ["bash", "-e", "-x", "-c", "\n".join(lines)]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    typing = subprocess.run(script, cwd=folder, env=env, text=True, check=False, **pipes)
    assert typing.returncode == 0, typing.stdout
    return typing.stdout


def _write_keyed(folder: Path) -> None:
    """Write the files with keys that your-data.md shows: labels, and one point for each split."""
    labels, point = blocks(DOCS / "your-data.md", "json")
    folder.mkdir()
    for name, body in (("labels", labels), ("train", point), ("test", point)):
        (folder / f"{name}.jsonl").write_text(body)
