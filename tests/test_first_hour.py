"""A newcomer's first hour: clone, demo, report, then data of one's own, by the command lines that the pages show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT, environment
from tests.pages import DOCS, blocks, typed

# The installation that runs this test stands for the one that the Makefile would make.
INSTALLED = Path(sys.prefix)
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
def test_the_demo_and_then_data_of_ones_own(clone: Path) -> None:
    said = follow(f'make -o .venv/.demo demo DEMO="--recipe astra {QUICK}"', clone)
    assert "1/3" in said or "epochs" in said
    assert "PSP" in said
    for line in typed(DOCS / "quickstart.md"):
        follow(f"{line} {QUICK}" if line.startswith("extremis run") else line, clone)
    for run in ("demo/run", "runs/tate"):
        assert (clone / run / "report.html").stat().st_size < 5_000_000
    keys = _write_own(clone / "mine")
    for line in typed(DOCS / "your-data.md"):
        follow(line, clone)
    predictions = [json.loads(line) for line in (clone / "predictions.jsonl").read_text().splitlines()]
    assert [row["key"] for row in predictions] == keys
    assert {label for row in predictions for label in row["labels"]} == {"sea", "ship"}


def _write_own(folder: Path) -> list[str]:
    """The files that your-data.md shows, with more points of the same form; the test points' keys."""
    labels, shown = blocks(DOCS / "your-data.md", "json")
    point = json.loads(shown)
    points = [
        {"key": f"N{i:03d}", "text": f"{point['text']} {i}", "labels": point["labels"][: 1 + i % 2]} for i in range(80)
    ]
    folder.mkdir()
    (folder / "labels.jsonl").write_text(labels)
    for name, some in (("train", points[:60]), ("test", points[60:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return [point["key"] for point in points[60:]]
