"""`extremis recipes show|copy|validate`, and what is told of a recipe before anything heavy is loaded."""

import re
import subprocess
import sys
from pathlib import Path

from extremis.console import Event
from tests.command import call, refused
from tests.keys_page import page
from tests.pages import DOCS
from tests.recipes import RECIPES
from trainer.recipe_files import load_recipe, read_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_a_copy_is_the_recipe_and_can_be_changed(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    for name in ("astra", "dexml", "decoupled-m2", RECIPES["theta-hard"]):
        out.unlink(missing_ok=True)
        assert call("recipes", "copy", name, out).status == 0
        assert load_recipe(str(out)) == load_recipe(name)
        shown = call("recipes", "show", name)
        assert tomllib.loads(shown.out) == read_recipe(name)
    refused(call("recipes", "copy", "astra", out), "this file exists already")
    assert call("recipes", "validate", out, "--set", "train.epochs=3").status == 0
    refused(call("recipes", "validate", out, "--set", "train.epoch=3"), "did you mean 'epochs'")
    refused(call("recipes", "copy", "astra"), "expected RECIPE and OUT")
    refused(call("recipes", "list", "astra"), "expected nothing")


def test_a_typo_is_told_before_anything_heavy_is_loaded() -> None:
    """A recipe is checked as a whole, with the classes of its method, encoder and loss."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numba', 'numpy', 'pyarrow', 'fsspec'): sys.modules[name] = None\n"
        "from extremis.cli import main; main()"
    )
    for override, message in (
        ("train.epoch=3", "unknown key 'train.epoch', did you mean 'epochs'"),
        ("trian.epochs=3", "unknown key 'trian', did you mean 'train'"),
        ("train.epochs=0", "train.epochs: expected a number greater than or equal to 1, got 0"),
        ("negatives.pool=shard", "negatives.pool"),
        ("encoder.dimensions=8", "unknown key 'encoder.dimensions', did you mean 'dimension'"),
        ("loss.margin=1", "loss.margin works only with loss.kind = 'triplet'"),
    ):
        command = [sys.executable, "-c", code, "train", "astra", "data", "run", "--set", override]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in done.stderr


def test_the_page_of_keys_is_that_of_the_options() -> None:
    """`python -m tests.keys_page > docs/keys.md` renews it."""
    assert (DOCS / "keys.md").read_text() == page()
    without = [line for line in page().splitlines() if re.match(r"\| `[^`]+` \|  \|", line)]
    assert not without, "every key has its meaning"


def test_an_event_reads_as_its_text() -> None:
    assert str(Event("step 3 of 5", "train", 3, 5)) == "step 3 of 5"
