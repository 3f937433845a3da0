"""RAE, a method from outside: end to end, resumed, on two ranks, and without its keys."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.mine import mine
from schemas.errors import TableError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.table import Table
from tests.builders import SmallData, build_data, build_negatives
from tests.command import ROOT, call, refused
from tests.ranks import on_ranks
from tests.training import Killed, silent, train, with_sections
from trainer.group import ALONE, Group
from trainer.loop import EpochReport, Trainer
from trainer.methods.recipe import Recipe
from trainer.modules import open_named
from trainer.tracking import read_metrics

RAE: dict[str, Any] = {
    "method": "rae:Rae",
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 8, "buckets": 64, "dropout": 0.1, "feature_dropout": 0.1, "normalize": True, "lr": 0.02},
    "loss": {"kind": "decoupled", "temperature": 0.1},
    "memory": {"neighbours": 6, "temperature": 0.1},
    "refresh": {"start": 2, "every": 2},
    "train": {"epochs": 4, "threads": 1},
    "checkpoint": {"every_steps": 3},
    "logging": {"every_steps": 1, "tensorboard": False},
}
FOLDER = ROOT / "papers" / "rae"
open_named("rae:Rae", str(FOLDER))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("rae") / "data"), rows={"train": 100, "test": 20})


def recipe(**sections: dict[str, Any]) -> Recipe:
    return with_sections(RAE, sections)


def train_mined(
    group: Group, data: str, run: str, options: Recipe, resume: bool = False, stop: int | None = None
) -> tuple[list[float], np.ndarray]:
    """Train as `train`, a table mined after the epoch whose dump it is of; losses, and the embeddings of labels."""
    trainer = (Trainer.resume if resume else Trainer.start)(data, run, options, silent, group)

    def mine_dump(report: EpochReport) -> None:
        trainer.context.writer.wait()
        if group.first and report.epoch == 0 and not Path(RunLayout(run).negatives(2, "queries")).exists():
            mine(data, run, 0)

    losses = train(trainer, stop, mine_dump)
    return losses, trainer.model.head.vectors.numpy()


@pytest.fixture(scope="module")
def straight(small: SmallData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], np.ndarray]:
    run = tmp_path_factory.mktemp("straight") / "run"
    return run, *train_mined(ALONE, small.layout.root, str(run), recipe())


def test_the_votes_are_learnt(small: SmallData, tmp_path: Path, straight: tuple[Path, list[float], np.ndarray]) -> None:
    _, losses, vectors = straight
    without = train(Trainer.start(small.layout.root, str(tmp_path / "run"), recipe(memory={"weight": 0.0}), silent))
    steps = len(losses) // 4
    assert losses[: 2 * steps] == without[: 2 * steps]
    assert np.mean(losses[2 * steps : 3 * steps]) > np.mean(without[2 * steps : 3 * steps])  # one loss more
    assert np.mean(losses[3 * steps :]) < np.mean(losses[2 * steps : 3 * steps])
    assert np.isfinite(vectors).all()


def test_stopped_and_resumed_it_is_the_run_that_was_never_stopped(
    small: SmallData, tmp_path: Path, straight: tuple[Path, list[float], np.ndarray]
) -> None:
    _, losses, vectors = straight
    stop, run = len(losses) * 2 // 3, str(tmp_path / "run")
    with pytest.raises(Killed):
        train_mined(ALONE, small.layout.root, run, recipe(), stop=stop)
    rest, others = train_mined(ALONE, small.layout.root, run, recipe(), resume=True)
    assert 0 < len(rest) < len(losses)
    assert rest == losses[-len(rest) :]
    np.testing.assert_array_equal(others, vectors)


def test_two_ranks_train_the_model_of_one(small: SmallData, tmp_path: Path) -> None:
    options = recipe(
        encoder={"dropout": 0.0, "feature_dropout": 0.0}, train={"epochs": 3}
    )  # that of labels is a rank's
    losses, vectors = train_mined(ALONE, small.layout.root, str(tmp_path / "one"), options)
    for name in ("dumps", "negatives"):  # the same keys and neighbours: a rounding may turn those of near points
        shutil.copytree(tmp_path / "one" / name, tmp_path / "two" / name)
    results = on_ranks(2, train_mined, small.layout.root, str(tmp_path / "two"), options)
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][0], losses, rtol=1e-4)
    np.testing.assert_allclose(np.concatenate([part for _, part in results]), vectors, rtol=1e-2, atol=1e-4)


def test_without_its_keys_or_with_labels_it_says_so(
    small: SmallData, tmp_path: Path, straight: tuple[Path, list[float], np.ndarray]
) -> None:
    run, _, _ = straight
    shutil.copytree(run / "negatives", tmp_path / "gone" / "negatives")
    with pytest.raises(TableError, match="Restore the file, or start a new run"):
        train(Trainer.start(small.layout.root, str(tmp_path / "gone"), recipe(refresh={"start": 3}), silent))
    url, queries = RunLayout(str(tmp_path / "labels")).negatives(2, "queries"), small.layout.queries("train")
    build_negatives(url, open_manifest(queries), small.points["train"].positives, small.labels, 3)
    with pytest.raises(TableError, match="the ids of this table are labels, expected points"):
        train(Trainer.start(small.layout.root, str(tmp_path / "labels"), recipe(), silent))


@pytest.mark.parametrize(
    "wrong", [{"data": {"label_texts": True}}, {"data": {"mix": {"train": 1.0}}}, {"encoder": {"normalize": False}}]
)
def test_a_memory_of_several_sources_or_without_cosines_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="method = 'rae:Rae'"):
        recipe(**wrong)


def test_the_recipe_runs_from_end_to_end(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny = ("encoder.dimension=8", "encoder.buckets=64", "encoder.hidden=4", "memory.neighbours=5", "train.epochs=3")
    others = (
        "order.batch=128",
        "order.streams=4",
        "refresh.stale=wait",
        "train.threads=1",
        "logging.tensorboard=false",
    )
    changes = [word for change in (*tiny, *others) for word in ("--set", change)]
    assert call("run", FOLDER / "rae.toml", data, run, *changes).status == 0
    table = Table.open(RunLayout(str(run)).negatives(2, "queries"))
    assert (table.ids_of, table.width("label_ids")) == ("points", 5)
    epochs = [record for record in read_metrics(RunLayout(str(run))) if record["kind"] == "epoch"]
    assert [record["table_epoch"] for record in epochs] == [None, None, 2]
    shown = call("inspect", data, "--run", run, "--rows", "1")
    assert "no hard negatives of" in shown.out
    refused(
        call("tuples", run, tmp_path / "tuples.jsonl", "--data", data, "--keys"), "the ids of this table are points"
    )
