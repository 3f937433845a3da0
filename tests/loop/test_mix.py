"""Several query tables in one run: each is dumped, mined and adopted under its own name, and a resume is exact."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.mine import mine
from pipelines.options import MineOptions
from schemas import storage
from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from tests import training
from tests.builders import SmallData, build_data
from trainer.checkpoints import latest_checkpoint
from trainer.loop import EpochReport, Trainer
from trainer.methods.recipe import Recipe
from trainer.recipe_files import load_config

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


BY_SOURCE = {
    "data": {"mix": {"train": 2.0, "market": 3.0, "labels": 1.0}, "mix_by": "shares"},
    "order": {"batches": "by_source"},
}


def train(
    data: str, run: str, sections: dict[str, dict[str, Any]], stop: int | None = None, resume: bool = False
) -> list[float]:
    """Losses of the steps; tables are mined as soon as they can be."""

    def on_epoch(report: EpochReport) -> None:
        if report.epoch == 0:
            trainer.context.writer.wait()  # the dump, which is written while training goes on
            mine(data, run, options=MineOptions())
        if report.epoch >= 2:
            assert report.adoption.table_epoch == 2
            assert sorted(report.adoption.digests) == NAMES

    begin = Trainer.resume if resume else Trainer.start
    trainer = begin(data, run, training.with_sections(RECIPE, sections), training.silent)
    return training.train(trainer, stop, on_epoch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("mixed") / "data"), rows={"train": 64, "market": 45, "test": 8})


@pytest.mark.parametrize("sections", [{}, BY_SOURCE], ids=["mixed", "by source"])
def test_every_source_of_a_mix_goes_round_the_loop(
    data: SmallData, tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    whole = RunLayout(str(tmp_path / "whole"))
    losses = train(data.layout.root, whole.root, sections)
    assert storage.list_names(whole.dump(0)) == [*NAMES, "vectors"]
    for name in NAMES:
        table = data.layout.labels if name == "labels" else data.layout.queries(name)
        manifest = open_manifest(whole.negatives(2, name), "negatives")
        assert manifest.parents["queries"] == open_manifest(table).digest
    killed = RunLayout(str(tmp_path / "killed"))
    with pytest.raises(training.Killed):
        train(data.layout.root, killed.root, sections, stop=len(losses) - 3)
    rest = train(data.layout.root, killed.root, sections, resume=True)
    assert rest == losses[-len(rest) :]
    assert latest_checkpoint(killed).table.shards == latest_checkpoint(whole).table.shards


def test_a_split_that_is_not_there_is_refused_before_anything_is_written(data: SmallData, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({**RECIPE, "data": {"mix": {"train": 1.0, "marktet": 1.0}}})
    with pytest.raises(InputError, match="no split 'marktet'; known splits: market, test, train"):
        Trainer.start(data.layout.root, str(tmp_path / "run"), recipe, training.silent)
    assert not (tmp_path / "run").exists()


SHORT = {"negatives": {"hard": 0}, "train": {"epochs": 3, "warmup": 0.0}, "checkpoint": {"every_steps": 2}}
SHARES = {"mix": {"train": 0.2, "market": 0.7, "labels": 0.1}, "mix_by": "shares"}


def test_other_shares_count_from_the_epoch_after_the_checkpoint(data: SmallData, tmp_path: Path) -> None:
    first = training.with_sections(RECIPE, SHORT)
    second = training.with_sections(RECIPE, {**SHORT, "data": SHARES})
    ends: list[tuple[int, int, float]] = []

    def begin(run: str, recipe: Recipe) -> Trainer:
        is_new = not (tmp_path / run).exists()
        open_run = Trainer.start if is_new else Trainer.resume
        return open_run(data.layout.root, str(tmp_path / run), recipe, training.silent)

    def go_on(trainer: Trainer) -> tuple[list[float], list[int]]:
        losses, rows = [], []

        def on_step(step: int, total: int, loss: float) -> None:
            losses.append(loss)
            ends.append((step, total, trainer.rate_factor(step)))

        rows = [report.rows for report in trainer.train(on_step)]
        return losses, rows

    lengths = [begin(f"length-{n}", recipe).stream.steps for n, recipe in enumerate((first, second))]
    assert lengths[0] < lengths[1]
    for run in ("once", "twice"):
        with pytest.raises(training.Killed):
            training.train(begin(run, first), 5)
    with pytest.raises(training.Killed):  # in the epoch that goes on with the shares of before
        training.train(begin("twice", second), 9)
    with pytest.raises(training.Killed):
        training.train(begin("twice", second), lengths[0] + 3)
    losses, rows = go_on(begin("once", second))
    assert len(losses) == lengths[0] - 4 + 2 * lengths[1]  # from the checkpoint of step 4 on
    # Of 64 rows of train, 45 of market and 30 label texts those of train come once, and are 0.2 of all.
    assert rows[1:] == [320, 320]
    assert ends[-1][:2] == (lengths[0] + 2 * lengths[1],) * 2
    assert ends[-1][2] == pytest.approx(0)
    rest, _ = go_on(begin("twice", second))
    assert rest == losses[-len(rest) :]
    saved = load_config(str(tmp_path / "once" / "config.toml"))["recipe"]["data"]
    assert (saved["mix"], saved["mix_by"]) == (SHARES["mix"], "shares")
    for mix in ({"train": 1.0, "labels": 2.0}, {**SHARES["mix"], "test": 1.0}):
        with pytest.raises(InputError, match=r"another recipe: .*data\.mix\.(market|test) was"):
            begin("once", Recipe.model_validate({**RECIPE, **SHORT, "data": {"mix": mix}}))
