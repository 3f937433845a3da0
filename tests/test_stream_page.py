"""docs/stream.md: the example that it shows is the one that runs, and what it names is there."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from tests.builders import write_negatives
from tests.command import ROOT, environment
from trainer.config import validate
from trainer.config.load import tomllib

PAGE = (ROOT / "docs" / "stream.md").read_text()
EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_the_page_shows_the_example_as_it_is() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == EXAMPLE.read_text()
    assert len(shown.splitlines()) <= 30


def test_the_recipe_on_the_page_is_one() -> None:
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert validate(tomllib.loads(shown), "the page").data.mix == {"train": 1.0, "val": 0.5, "labels": 2.0}


def test_the_example_trains(data: Path, tmp_path: Path) -> None:
    layout = DataLayout(str(data))
    queries, labels = open_manifest(layout.queries("train")), open_manifest(layout.labels).rows
    table = np.random.default_rng(0).integers(0, labels, (queries.rows, 12))
    write_negatives(str(tmp_path / "negatives"), queries, table, labels)
    command = [sys.executable, EXAMPLE, data, tmp_path / "negatives"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+) at step", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
