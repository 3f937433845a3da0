"""Several query tables in one run: each is dumped, mined and adopted under its own name, and a resume is exact."""

from pathlib import Path

import pytest

from pipelines.mine import mine
from pipelines.options import MineOptions
from schemas import storage
from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from tests import training
from tests.builders import SmallData, build_data
from trainer.checkpoints.checkpoint import latest_checkpoint
from trainer.config import Recipe
from trainer.loop import Trainer
from trainer.progress import EpochReport

RECIPE = {
    "data": {"mix": {"train": 1.0, "market": 1.5, "labels": 2.0}},
    "order": {"batch": 16, "streams": 4, "window_groups": 2},
    "encoder": {"dimension": 4, "buckets": 64},
    "negatives": {"random": 6, "hard": 2},
    "refresh": {"start": 2, "every": 2},
    "train": {"epochs": 4},
    "checkpoint": {"every_steps": 5},
    "logging": {"tensorboard": False},
}
NAMES = ["labels", "market", "train"]


def train(data: str, run: str, stop: int | None = None, resume: bool = False) -> list[float]:
    """Losses of the steps; tables are mined as soon as they can be."""

    def on_epoch(report: EpochReport) -> None:
        if report.epoch == 0:
            trainer.parts.saver.writer.wait()  # the dump, which is written while training goes on
            mine(data, run, options=MineOptions())
        if report.epoch >= 2:
            assert report.adoption.table_epoch == 2
            assert sorted(report.adoption.digests) == NAMES

    begin = Trainer.resume if resume else Trainer.start
    trainer = begin(data, run, Recipe.model_validate(RECIPE), training.silent)
    return training.train(trainer, stop, on_epoch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("mixed") / "data"), rows={"train": 64, "market": 45, "test": 8})


def test_every_source_of_a_mix_goes_round_the_loop(data: SmallData, tmp_path: Path) -> None:
    whole = RunLayout(str(tmp_path / "whole"))
    losses = train(data.layout.root, whole.root)
    assert storage.list_names(whole.dump(0)) == [*NAMES, "vectors"]
    for name in NAMES:
        table = data.layout.labels if name == "labels" else data.layout.queries(name)
        manifest = open_manifest(whole.negatives(2, name), "negatives")
        assert manifest.parents["queries"] == open_manifest(table).digest
    killed = RunLayout(str(tmp_path / "killed"))
    with pytest.raises(training.Killed):
        train(data.layout.root, killed.root, stop=len(losses) - 3)
    rest = train(data.layout.root, killed.root, resume=True)
    assert rest == losses[-len(rest) :]
    assert latest_checkpoint(killed).table.shards == latest_checkpoint(whole).table.shards


def test_a_split_that_is_not_there_is_refused_before_anything_is_written(data: SmallData, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({**RECIPE, "data": {"mix": {"train": 1.0, "marktet": 1.0}}})
    with pytest.raises(InputError, match="no split 'marktet'; this data set has market, test, train"):
        Trainer.start(data.layout.root, str(tmp_path / "run"), recipe, training.silent)
    assert not (tmp_path / "run").exists()
