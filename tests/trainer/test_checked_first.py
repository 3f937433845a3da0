"""What can be known is known before anything starts: nothing is left behind, and what was wrong may be corrected."""

import shutil
from pathlib import Path

import pytest

import trainer.setup
from schemas.errors import InputError
from tests.builders import build_data
from tests.command import call, refused, sets
from tests.ranks import on_ranks
from trainer import sizes
from trainer.group import Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.recipe_files import load_config

CHOICES = sets("train.epochs=1", "logging.tensorboard=false", "refresh.start=3", "order.batch=128")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("validation.split=vall", ("vall", "test, train")),
        ("validation.split=holdout", ("data.holdout",)),
        ("encoder.dimension=8000000", ("of memory", "are free", "encoder.dimension (now 8,000,000)")),
        ("encoder.buckets=2000000000", ("of memory", "encoder.dimension")),
        ("negatives.random=1000000000000", ("negatives.random", "16777216")),
        ("checkpoint.keep=1000000000", ("of checkpoints", "are free.")),
        ("encoder.lr=inf", ("encoder.lr", "finite")),
        ("classifier.initial_bias=nan", ("classifier.initial_bias", "finite")),
    ],
)
def test_it_is_refused_before_anything_is_made(data: Path, tmp_path: Path, wrong: str, words: tuple[str, ...]) -> None:
    refused(call("run", "random", data, tmp_path / "run", *CHOICES, "--set", wrong), *words)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_the_data_cannot_have(raw: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert call("shard", raw, data, "--tokenizer", "train:500").status == 0
    choices = ["--set", "validation.split=test", "--set", "validation.metric=PSP@5"]
    refused(call("run", "random", data, tmp_path / "run", *CHOICES, *choices), "PSP@5", "propensity", "'P@5'")
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_may_be_corrected(data: Path, tmp_path: Path) -> None:
    """And is then what it would have been with the right value from the start."""
    run, right = tmp_path / "run", tmp_path / "right"
    assert call("train", "random", data, run, *CHOICES).status == 0
    changed = ["--set", "encoder.lr=0.5"]
    refused(call("train", "random", data, run, *CHOICES, *changed, "--resume"), "another recipe", "encoder.lr")
    shutil.rmtree(run / "checkpoints")
    (run / "finished.json").unlink()
    assert call("train", "random", data, run, *CHOICES, *changed, "--resume").status == 0
    assert call("train", "random", data, right, *CHOICES, *changed).status == 0
    assert load_config(str(run / "config.toml"))["recipe"]["encoder"]["lr"] == 0.5
    newest = next((right / "checkpoints").iterdir())
    for path in newest.iterdir():
        assert path.read_bytes() == (run / "checkpoints" / newest.name / path.name).read_bytes()


def started(group: Group, data: str, run: str, odd: str) -> str:
    """The refusal of a run whose rank 1 has another release, or little memory."""
    if group.rank == 1:
        if odd == "release":
            trainer.setup.code_version = lambda: "0.0.9"  # type: ignore[attr-defined]
        else:
            sizes.free_memory = lambda: 1000
    with pytest.raises(InputError) as caught:
        Trainer.start(data, run, Recipe.model_validate({}), print, group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("release", ("this rank has Extremis 0.0.9", "Install the same version")),
        ("memory", ("of memory", " are free. ")),
    ],
)
def test_an_odd_rank_is_named_by_all(tmp_path: Path, odd: str, words: tuple[str, ...]) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 20})
    said = on_ranks(2, started, data.layout.root, str(tmp_path / "run"), odd)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 of 2: ")
    assert all(word in said[0] for word in words)
    assert not (tmp_path / "run").exists()
