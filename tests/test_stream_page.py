"""docs/stream.md: the example that it shows is the one that runs, and what it names is there."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from tests.builders import write_negatives
from tests.command import ROOT, Done, captured
from trainer.recipe_files import tomllib, validate

PAGE = (ROOT / "docs" / "stream.md").read_text()
EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_the_page_shows_the_examples_as_they_are() -> None:
    own, *others = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert own == EXAMPLE.read_text()
    assert len(own.splitlines()) <= 45
    for shown, name in zip(others, ("hf_trainer", "lightning_module"), strict=True):
        assert shown in EXAMPLE.with_stem(name).read_text()
        assert len(shown.splitlines()) <= 35


def test_the_recipes_on_the_page_are_recipes() -> None:
    shown = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    weights, shares = (validate(tomllib.loads(each), "the page").data for each in shown)
    assert weights.mix == {"train": 1.0, "val": 0.5, "labels": 2.0}
    assert (shares.mix_by, shares.mix) == ("shares", {"train": 0.7, "val": 0.3})


def test_the_example_trains(data: Path, tmp_path: Path) -> None:
    layout = DataLayout(str(data))
    queries, labels = open_manifest(layout.queries("train")), open_manifest(layout.labels).rows
    table = np.random.default_rng(0).integers(0, labels, (queries.rows, 12))
    write_negatives(str(tmp_path / "negatives"), queries, table, labels)
    done = follow(data, tmp_path / "negatives")
    assert done.status == 0, done.err
    losses = [float(loss) for loss in re.findall(r"loss (\S+) at step", done.out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ((), "the following arguments are required: DATA"),
        (("nowhere",), "error: nowhere/queries/train: no table here"),
        (("{data}", "nowhere"), "error: nowhere: no table here"),
        (("{data}", "{data}"), "expected a table of kind negatives, got data"),
    ],
)
def test_wrong_use_of_the_example_is_one_message(places: tuple[str, ...], message: str, data: Path) -> None:
    done = follow(*(place.format(data=data) for place in places))
    assert done.status == 2
    assert message in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def follow(*places: str | Path) -> Done:
    """Run the example as a program, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(EXAMPLE), *map(str, places)])
        return captured(lambda: runpy.run_path(str(EXAMPLE), run_name="__main__"))
