"""One process and several train the same model: losses, vectors, encoder, metrics and dumps, to float tolerance.

Ranks are processes of their own, joined over gloo. Bit-equal encoders on all ranks are asserted on the way.
"""

import contextlib
import itertools
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import trainer.refresh.dump
import trainer.setup
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.builders import SmallData, build_data, build_negatives
from tests.ranks import on_ranks
from tests.training import with_sections
from trainer.checkpoints import latest_checkpoint
from trainer.group import ALONE, Group
from trainer.loop import EpochReport, Trainer
from trainer.methods.recipe import Recipe
from trainer.tracking import read_metrics

EPOCHS = 4
BASE: dict[str, dict[str, Any]] = {
    "data": {"label_texts": True},
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {
        "dimension": 6,
        "buckets": 64,
        "dropout": 0.2,
        "feature_dropout": 0.3,
        "residual": True,
        "hidden": 5,
        "optimizer": "adagrad",
    },
    "classifier": {"bias": True, "initial_scale": 0.3, "initial_bias": -2.0, "weight_decay": 0.01},
    "negatives": {"random": 12, "hard": 2, "width": 3},
    "refresh": {"start": 2, "every": 1},
    "train": {"epochs": EPOCHS, "positive_weight": 0.5, "threads": 1},
    "validation": {"split": "test"},
    "checkpoint": {"every_steps": 3},
    "logging": {"every_steps": 1, "tensorboard": False},
}
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "shared": {},
    "own": {"negatives": {"pool": "own"}},
    "all": {"method": "renee", "negatives": {"chunk": 7}},
    "adam without a residual": {
        "encoder": {"residual": False, "hidden": 0, "optimizer": "adam", "normalize": True, "scale": 3.0},
        "classifier": {"optimizer": "adam", "lr": 0.02},
    },
    "sgd": {
        "encoder": {"optimizer": "sgd", "lr": 0.05},
        "classifier": {"optimizer": "sgd", "momentum": 0.5, "lr": 0.05},
    },
    "weight decay": {"classifier": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.1}},
    "16 bits": {"classifier": {"dtype": "bfloat16"}},
    "decoupled softmax": {"loss": {"kind": "decoupled", "temperature": 0.5}},
    "softmax over all": {"loss": {"kind": "softmax"}, "method": "renee"},
    "soft top-k": {"loss": {"kind": "softtopk", "k": 2}},
    "triplets": {"loss": {"kind": "triplet"}, "negatives": {"pool": "own"}},
    "the batch's labels": {
        "method": "ngame-m2",
        "loss": {"kind": "triplet", "radius": 1.9},
        "encoder": {"normalize": True, "dropout": 0.0},
        "head": {"positives": 1},
        "classifier": {"bias": False, "normalize": True, "initial_scale": 1.0, "initial_bias": 0.0},
    },
    "batches by source": {"order": {"batches": "by_source"}},
    "curriculum": {"negatives": {"curriculum": True}},
    "in the foreground": {"checkpoint": {"background": False}},
    "in-trainer": {"refresh": {"source": "in-trainer", "index": "exact", "start": 1, "every_steps": 4}},
    "fresh": {"refresh": {"source": "in-trainer", "index": "fresh", "start": 1}},
    "few rows for the statistics": {"encoder": {"idf_rows": 20}, "data": {"label_texts": False}},
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return with_sections(BASE, sections)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("ranks") / "data"), rows={"train": 150, "test": 40})


@pytest.fixture
def with_tables(data: SmallData, tmp_path: Path) -> Path:
    """A run whose tables have been mined."""
    run = RunLayout(str(tmp_path / "with-tables"))
    for epoch in range(2, EPOCHS):
        for name, url, points in (
            ("queries", data.layout.queries("train"), data.points["train"]),
            ("labels", data.layout.labels, data.label_points),
        ):
            place = run.negatives(epoch, name)
            build_negatives(place, open_manifest(url), points.positives, data.labels, 3, seed=epoch)
    return Path(run.root)


class Stopped(Exception):
    """Stands for the end of a process."""


def train(
    group: Group, data: str, run: str, options: Recipe, resume: bool = False, stop: int | None = None
) -> dict[str, Any]:
    """Train to the end, or until global step `stop` is done; losses step by step, and what the model then is."""
    open_run = Trainer.resume if resume else Trainer.start
    trainer = open_run(data, run, options, print, group)
    losses: list[float] = []
    reports: list[EpochReport] = []

    def on_step(step: int, total: int, loss: float) -> None:
        losses.append(loss)
        if step == stop:
            raise Stopped

    with contextlib.suppress(Stopped):
        reports.extend(trainer.train(on_step))
    encoder = trainer.model.encoder
    return {
        "losses": losses,
        "metrics": [report.metrics for report in reports],
        "rows": [report.rows for report in reports],
        "vectors": trainer.model.head.vectors.float().numpy(),
        "encoder": {name: value.numpy() for name, value in encoder.tensors().items()},
        "optimizer": {name: value.numpy() for name, value in encoder.optimizer_tensors().items()},
    }


def on(ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    return [train(ALONE, *arguments)] if ranks == 1 else on_ranks(ranks, train, *arguments)


def assert_same_training(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for other in results:
        assert other["losses"] == results[0]["losses"]
        assert other["metrics"] == results[0]["metrics"]
        for part in ("encoder", "optimizer"):
            for name, value in other[part].items():
                np.testing.assert_array_equal(value, results[0][part][name], name)
    last = len(results[0]["losses"])
    np.testing.assert_allclose(results[0]["losses"], expected["losses"][-last:], rtol=1e-4)
    vectors = np.concatenate([part["vectors"] for part in results])
    np.testing.assert_allclose(vectors, expected["vectors"], rtol=1e-2, atol=1e-4)
    for part in ("encoder", "optimizer"):
        assert results[0][part].keys() == expected[part].keys()
        for name, value in results[0][part].items():
            np.testing.assert_allclose(value, expected[part][name], rtol=1e-2, atol=1e-4, err_msg=name)
    for actual, reference in zip(results[0]["metrics"][::-1], expected["metrics"][::-1], strict=False):
        assert actual == pytest.approx(reference, abs=2.6)  # a query of 40 that a rounding turns


def dumped(run: str, epoch: int) -> dict[str, np.ndarray]:
    """Vectors by table of a dump, its shards verified."""
    layout = RunLayout(run)
    tables = {}
    for name in ("queries", "labels", "vectors"):
        url = layout.vectors(epoch) if name == "vectors" else layout.embeddings(epoch, name)
        manifest = open_manifest(url)
        Table(url, manifest).verify()
        rows = pa.concat_tables(Table(url, manifest).batches())
        np.testing.assert_array_equal(rows.column(0), np.arange(manifest.rows))
        tables[name] = matrix_column(rows, "vector")
    return tables


def saved(run: str) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(RunLayout(run))
    assert checkpoint is not None
    names = {name for _, rows in checkpoint.rows(0, checkpoint.labels) for name in rows}
    rows = {name: checkpoint.vectors(name) for name in names}
    return {**rows, **checkpoint.tensors("encoder"), **checkpoint.tensors("encoder-optimizer")}


def untimed(run: str) -> list[dict[str, Any]]:
    """Return what is recorded and not measured by a clock."""
    timed = ("seconds", "rows_per_second")
    records = read_metrics(RunLayout(run))
    return [{name: value for name, value in record.items() if not name.startswith(timed)} for record in records]


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("shared", 2),
        *(pytest.param(form, 2, marks=pytest.mark.slow) for form in FORMS if form != "shared"),
        *(pytest.param(form, 4, marks=pytest.mark.slow) for form in FORMS),
    ],
)
def test_several_ranks_train_the_model_of_one(
    data: SmallData, with_tables: Path, tmp_path: Path, form: str, ranks: int
) -> None:
    single, several = (str(shutil.copytree(with_tables, tmp_path / name)) for name in ("one", "several"))
    options = recipe(**FORMS[form])
    (expected,) = on(1, data.layout.root, single, options)
    results = on(ranks, data.layout.root, several, options)
    assert len(expected["losses"]) > 20
    if form == "fresh":  # its scores are bfloat16: a rounding of x may choose another of two labels
        assert all(other["losses"] == results[0]["losses"] for other in results)
        np.testing.assert_allclose(results[0]["losses"], expected["losses"], rtol=2e-2)
        return
    assert_same_training(results, expected)
    assert results[0]["rows"] == expected["rows"]
    for name, value in saved(several).items():
        torch.testing.assert_close(value, saved(single)[name], rtol=1e-2, atol=1e-4, msg=name)
    actual, reference = untimed(several), untimed(single)
    assert [(record["kind"], record["step"]) for record in actual] == [(r["kind"], r["step"]) for r in reference]
    if options.table_epochs():
        for epoch in range(2):
            if form != "few rows for the statistics":
                for name, rows in dumped(several, epoch).items():
                    np.testing.assert_allclose(rows, dumped(single, epoch)[name], rtol=1e-2, atol=2e-3)


def die_within_a_dump(group: Group, *arguments: Any) -> None:
    """Train until rank 0 is killed while it writes the first dump, in the second step of the next epoch."""
    shards, write = itertools.count(), trainer.refresh.dump.write_shard
    steps, step, is_second = itertools.count(1), trainer.loop.take_step, threading.Event()

    def write_or_die(*shard: Any) -> Any:
        if group.first and next(shards) == 1:
            assert is_second.wait(120)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*shard)

    def count_step(*facts: Any) -> Any:
        if next(steps) == 14:
            is_second.set()
        return step(*facts)

    trainer.refresh.dump.write_shard = write_or_die
    trainer.loop.take_step = count_step
    train(group, *arguments)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_killed_while_a_dump_is_written_goes_on_to_the_same_bits(
    data: SmallData, with_tables: Path, tmp_path: Path, ranks: int
) -> None:
    straight, killed = (str(shutil.copytree(with_tables, tmp_path / name)) for name in ("straight", "killed"))
    options = recipe(train={"epochs": 3})
    expected = on(ranks, data.layout.root, straight, options)
    on_ranks(ranks, die_within_a_dump, data.layout.root, killed, options, killed=range(ranks))
    kept = latest_checkpoint(RunLayout(killed))
    assert kept is not None
    # No checkpoint of the epoch's end: a resume from it would never write the dump.
    assert kept.state["progress"]["epoch"] == 0
    assert any(record["epoch"] == 1 for record in untimed(killed) if record["kind"] == "train")
    results = on(ranks, data.layout.root, killed, options, True)
    for result, other in zip(results, expected, strict=True):
        assert result["losses"] == other["losses"][-len(result["losses"]) :]
        np.testing.assert_array_equal(result["vectors"], other["vectors"])
    actual, reference = (latest_checkpoint(RunLayout(run)) for run in (killed, straight))
    assert actual.table.shards == reference.table.shards
    assert untimed(killed) == untimed(straight)
    for name, rows in dumped(killed, 0).items():
        np.testing.assert_array_equal(rows, dumped(straight, 0)[name])


@pytest.mark.slow
def test_labels_by_popularity_are_trained_by_ranks_of_equal_work(tmp_path: Path) -> None:
    """The second rank holds more labels; the model, its dumps and its checkpoints are those of one."""
    data = build_data(str(tmp_path / "data"), rows={"train": 150, "test": 40}, popular=True)
    single, several = str(tmp_path / "one"), str(tmp_path / "several")
    options = recipe(negatives={"pool": "own"}, train={"epochs": 2})
    (expected,) = on(1, data.layout.root, single, options)
    on(2, data.layout.root, several, options, False, 9)
    results = on(2, data.layout.root, several, options, True)
    held = [len(part["vectors"]) for part in results]
    assert held[0] < data.labels // 2
    assert held[1] <= 1.25 * data.labels / 2 + 1
    assert_same_training(results, expected)
    for name, value in saved(several).items():
        torch.testing.assert_close(value, saved(single)[name], rtol=1e-2, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [
        (2, 1, 9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2, 17), (1, 2, 30), (2, 2, 41), (4, 2, 29), (4, 4, 33))
        ),
    ],
)
def test_a_run_goes_on_on_another_number_of_ranks(
    data: SmallData, with_tables: Path, tmp_path: Path, before: int, after: int, stop: int
) -> None:
    straight, stopped = (str(shutil.copytree(with_tables, tmp_path / name)) for name in ("straight", "stopped"))
    options = recipe()
    expected = on(after, data.layout.root, straight, options)
    on(before, data.layout.root, stopped, options, False, stop)
    assert latest_checkpoint(RunLayout(stopped)) is not None
    results = on(after, data.layout.root, stopped, options, True)
    assert len(expected[0]["losses"]) - stop <= len(results[0]["losses"]) < len(expected[0]["losses"])
    whole = {**expected[0], "vectors": np.concatenate([part["vectors"] for part in expected])}
    assert_same_training(results, whole)
    if before == after:  # to the bit, with all that was recorded and dumped on the way
        assert results[0]["losses"] == expected[0]["losses"][-len(results[0]["losses"]) :]
        for result, other in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result["vectors"], other["vectors"])
        actual, reference = (latest_checkpoint(RunLayout(run)) for run in (stopped, straight))
        assert actual.table.shards == reference.table.shards
        assert untimed(stopped) == untimed(straight)
    for epoch in range(2):
        for name, rows in dumped(stopped, epoch).items():
            np.testing.assert_allclose(rows, dumped(straight, epoch)[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("ranks", [(2, 3), pytest.param((4, 3, 5), marks=pytest.mark.slow)])
def test_a_run_goes_on_within_an_epoch_on_any_number_of_ranks(
    data: SmallData, with_tables: Path, tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    """Ranks that do not divide the streams have unequal parts of a batch, down to none of the last one."""
    straight, changed = (str(shutil.copytree(with_tables, tmp_path / name)) for name in ("straight", "changed"))
    options = recipe(order={"streams": 8}, train={"epochs": len(ranks)})
    (expected,) = on(1, data.layout.root, straight, options)
    for number, count in enumerate(ranks[:-1]):  # in the first epoch, then in the second
        on(count, data.layout.root, changed, options, number > 0, (5, 18)[number])
        kept = latest_checkpoint(RunLayout(changed))
        assert kept is not None
        assert kept.state["progress"]["step"] > 0
    results = on(ranks[-1], data.layout.root, changed, options, True)
    assert_same_training(results, expected)
    for name, value in saved(changed).items():
        torch.testing.assert_close(value, saved(straight)[name], rtol=1e-2, atol=1e-4, msg=name)
