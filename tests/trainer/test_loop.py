"""The loop as a whole, in one process: the size of the estimate, exact resume, and what it refuses.

Real processes, killed and resumed, are in tests/loop.
"""

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas import storage
from schemas.errors import ExtremisError, InputError, TableError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from tests.builders import SmallData, build_data, build_negatives
from tests.training import Killed, assert_resumes, silent, train, with_sections
from trainer.checkpoints import latest_checkpoint
from trainer.evaluation.evaluate import SplitScorer
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import load_model
from trainer.refresh.dump import dump_is_published
from trainer.stream import open_sources
from trainer.threads import set_threads
from trainer.tracking import read_metrics

BASE = {
    "data": {"label_texts": True},
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 4, "buckets": 64, "dropout": 0.1, "feature_dropout": 0.1, "residual": True},
    "classifier": {"bias": True},
    "negatives": {"random": 6, "hard": 2, "width": 3},
    "refresh": {"start": 2, "every": 2},
    "train": {"epochs": 5},
    "checkpoint": {"every_steps": 4},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://loop/data")


def with_tables(run: RunLayout, data: SmallData) -> RunLayout:
    """`run` with its tables mined in time."""
    for epoch in (2, 4):
        for name, table, points in (
            ("queries", data.layout.queries("train"), data.points["train"]),
            ("labels", data.layout.labels, data.label_points),
        ):
            url = run.negatives(epoch, name)
            build_negatives(url, open_manifest(table), points.positives, data.labels, 3, seed=epoch, pads=False)
    return run


@pytest.fixture
def runs(data: SmallData, request: pytest.FixtureRequest) -> Iterator[RunLayout]:
    """Fresh runs."""
    return (with_tables(RunLayout(f"memory://loop/{request.node.name}/{number}"), data) for number in count())


@pytest.fixture(scope="module")
def straight(data: SmallData) -> tuple[RunLayout, list[float]]:
    """A run that was never stopped, and its losses."""
    run = with_tables(RunLayout("memory://loop/straight"), data)
    return run, train(Trainer.start(data.layout.root, run.root, recipe(), silent))


def recipe(**sections: dict) -> Recipe:
    return with_sections(BASE, sections)


STILL = {"encoder": {"lr": 1e-12, "dense_lr": 1e-12}, "classifier": {"lr": 1e-12, "bias": False}}


@pytest.mark.parametrize(
    ("negatives", "spread"),
    [
        (None, 0),
        ({"pool": "shared", "random": 3000}, 0.02),
        ({"pool": "own", "random": 3000}, 0.02),
        ({"pool": "shared", "random": 0, "hard": 2, "reweight": True}, None),
    ],
    ids=str,
)
def test_the_loss_has_the_size_of_one_vs_all(
    data: SmallData, runs: Iterator[RunLayout], negatives: dict | None, spread: float | None
) -> None:
    # Vectors that stay at zero give every label softplus(0) = ln 2, before and after the first table.
    run = next(runs)
    sections = {"method": "renee"} if negatives is None else {"negatives": negatives}
    trainer = Trainer.start(data.layout.root, run.root, recipe(**sections, **STILL), silent)
    losses = np.asarray(train(trainer)) / math.log(2)
    if spread is None:  # hard negatives alone: once there is a table, positives and k_h are all that is scored
        last = losses[-trainer.stream.steps :]
        positives = sum(map(len, data.points["train"].positives)) + data.labels
        assert last.mean() == pytest.approx(positives / trainer.stream.rows + 2, rel=0.1)
    else:
        np.testing.assert_allclose(losses, data.labels, rtol=max(spread, 1e-5))


def test_random_negatives_can_count_once_each(data: SmallData, runs: Iterator[RunLayout]) -> None:
    options = recipe(negatives={"reweight": False, "hard": 0, "random": 3000}, train={"epochs": 1}, **STILL)
    losses = np.asarray(train(Trainer.start(data.layout.root, next(runs).root, options, silent))) / math.log(2)
    assert (losses > 2000).all()


@pytest.mark.parametrize("stop", [4, 20, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 7, 13, 29))])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    data: SmallData, straight: tuple[RunLayout, list[float]], runs: Iterator[RunLayout], stop: int
) -> None:
    whole, losses = straight
    assert len(losses) == 30
    resumed = next(runs)
    assert assert_resumes(data.layout.root, resumed.root, recipe(), losses, stop) >= 30 - stop
    assert outcome(resumed) == outcome(whole)
    assert [r["loss"] for r in read_metrics(resumed) if r["kind"] == "train"] == losses


def test_a_crash_between_a_dump_and_the_end_of_its_parts_leaves_none(
    data: SmallData, straight: tuple[RunLayout, list[float]], runs: Iterator[RunLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, losses = straight
    run = next(runs)

    def crash(url: str, recursive: bool = False) -> None:
        if url == run.parts(0):
            raise Killed
        remove(url, recursive)

    remove = storage.remove
    trainer = Trainer.start(data.layout.root, run.root, recipe(), silent)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "remove", crash)
        with pytest.raises(Killed):
            train(trainer)
    assert storage.list_names(run.parts(0))
    rest = train(Trainer.resume(data.layout.root, run.root, recipe(), silent))
    assert rest == losses[-len(rest) :]
    assert outcome(run) == outcome(whole)
    assert not storage.list_names(run.parts(0))


def test_a_resume_keeps_the_threads_that_the_run_began_with(data: SmallData, runs: Iterator[RunLayout]) -> None:
    run, before = next(runs), torch.get_num_threads()
    try:
        set_threads(1)
        Trainer.start(data.layout.root, run.root, recipe(), silent)
        set_threads(2)
        Trainer.resume(data.layout.root, run.root, recipe(), silent)
        assert torch.get_num_threads() == 1
        other = next(runs)
        train(Trainer.start(data.layout.root, other.root, recipe(train={"threads": 2}), silent))
        set_threads(1)
        Trainer.resume(data.layout.root, other.root, recipe(), silent)
        assert torch.get_num_threads() == 2
    finally:
        set_threads(before)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_narrow_vectors_in_a_file_are_resumed_to_the_same_bits(
    dtype: str, data: SmallData, runs: Iterator[RunLayout], tmp_path: Path
) -> None:
    options = {"dtype": dtype, "weight_decay": 0.1, "storage": str(tmp_path)}
    whole, cut = next(runs), next(runs)
    losses = train(Trainer.start(data.layout.root, whole.root, recipe(classifier={"bias": True, **options}), silent))
    # Where the rows are kept is no part of the recipe that a resume has to have.
    in_memory = recipe(classifier={"bias": True, **options, "storage": "memory"})
    in_file = recipe(classifier={"bias": True, **options})
    assert_resumes(data.layout.root, cut.root, in_memory, losses, 13, resumed_with=in_file)
    assert outcome(cut) == outcome(whole)


def outcome(run: RunLayout) -> dict[str, object]:
    """Return the tables that were used, digests of what was dumped, and the last checkpoint's files."""
    dumps = [epoch for epoch in range(5) if dump_is_published(run, epoch)]
    urls = [url for epoch in dumps for url in (run.vectors(epoch), run.embeddings(epoch, "queries"))]
    adoptions = [(r["epoch"], r["table_epoch"]) for r in read_metrics(run) if r["kind"] == "adoption"]
    assert adoptions == [(0, None), (1, None), (2, 2), (3, 2), (4, 4)]
    assert dumps == [0, 2]
    return {
        "tables": adoptions,
        "dumps": [open_manifest(url).digest for url in urls],
        "checkpoint": latest_checkpoint(run).table.shards,
    }


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"negatives": {"hard": 3, "curriculum": True}}, marks=pytest.mark.slow),
        {"refresh": {"source": "in-trainer", "start": 1, "every_steps": 3, "rebuild_steps": 2}},
        pytest.param(
            {"refresh": {"source": "in-trainer", "start": 0, "every_steps": 100, "index": "IVF4,Flat"}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_other_sources_of_hard_negatives_resume_as_exactly(
    data: SmallData, runs: Iterator[RunLayout], changes: dict
) -> None:
    options, whole = recipe(**changes), next(runs)
    losses = train(Trainer.start(data.layout.root, whole.root, options, silent))
    for stop in (7, 17, 22):
        resumed = next(runs)
        assert_resumes(data.layout.root, resumed.root, options, losses, stop)
        assert latest_checkpoint(resumed).table.shards == latest_checkpoint(whole).table.shards
    dumps = [epoch for epoch in range(5) if dump_is_published(whole, epoch)]
    assert dumps == ([] if "refresh" in changes else [0, 2])


def test_storage_may_be_read_in_another_way_after_a_resume(
    data: SmallData, straight: tuple[RunLayout, list[float]], runs: Iterator[RunLayout], tmp_path: Path
) -> None:
    run = next(runs)
    cached = {"cache": str(tmp_path / "cache"), "cache_size": "10MB", "verify": False, "fetch_threads": 3}
    assert_resumes(data.layout.root, run.root, recipe(), straight[1], 9, resumed_with=recipe(storage=cached))
    assert [r["loss"] for r in read_metrics(run) if r["kind"] == "train"] == straight[1]
    assert len(list((tmp_path / "cache").glob("??/*"))) > 5
    small = recipe(storage={**cached, "cache_size": "1kB"})
    with pytest.raises(InputError, match="1,000 bytes are too few: the row groups of 3 fetching threads"):
        Trainer.start(data.layout.root, next(runs).root, small, silent)


def test_damaged_rows_are_left_out_told_and_counted_when_asked(runs: Iterator[RunLayout]) -> None:
    data = build_data("memory://loop/damaged")
    url, run, said = data.layout.queries("train"), next(runs), []
    gone = open_manifest(url).shards[0]
    storage.remove(storage.join(url, gone.path))
    with pytest.raises(TableError, match="the file is missing"):
        train(Trainer.start(data.layout.root, next(runs).root, recipe(train={"epochs": 1}), silent))
    skip = recipe(train={"epochs": 1}, storage={"damaged": "skip"}, encoder={"idf": False})
    train(Trainer.start(data.layout.root, run.root, skip, said.append))
    assert [record["skipped_rows"] for record in read_metrics(run) if record["kind"] == "epoch"] == [gone.rows]
    assert [line for line in said if f"{gone.rows} rows were skipped" in line and "inspect --verify" in line]


def test_tars_give_the_same_losses_as_parquet_and_resume_in_the_same_way(
    data: SmallData, straight: tuple[RunLayout, list[float]], runs: Iterator[RunLayout]
) -> None:
    tars = build_data("memory://loop/tars", sink="webdataset")
    assert open_manifest(tars.layout.queries("train")).shards[0].path.endswith(".tar")
    for stop in (None, 7, 20):
        run = with_tables(RunLayout(f"memory://loop/tars-{stop}"), tars)
        if stop is None:
            assert train(Trainer.start(tars.layout.root, run.root, recipe(), silent)) == straight[1]
        else:
            assert assert_resumes(tars.layout.root, run.root, recipe(), straight[1], stop) >= 30 - stop


@pytest.mark.parametrize("inputs", ["features", "both"])
def test_sparse_features_are_learnt_from_scored_and_resumed(inputs: str, runs: Iterator[RunLayout]) -> None:
    data = build_data(f"memory://loop/sparse/{inputs}", features=40, with_tokens=inputs == "both", sink="webdataset")
    options = recipe(encoder={"inputs": inputs})
    straight, stopped = (with_tables(RunLayout(f"memory://loop/{inputs}/{n}"), data) for n in range(2))
    losses = train(Trainer.start(data.layout.root, straight.root, options, silent))
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    assert_resumes(data.layout.root, stopped.root, options, losses, 13)
    _, model, _ = load_model(data.layout, straight)
    metrics = SplitScorer.open(data.layout, model, "train").score().metrics.result()
    assert metrics["P@1"] > 10  # of 30 labels


def test_data_without_what_the_recipe_reads_is_refused_with_a_remedy(
    data: SmallData, runs: Iterator[RunLayout]
) -> None:
    sparse = build_data("memory://loop/sparse-only", features=40, with_tokens=False)
    for small, inputs, remedy in (
        (
            sparse,
            "tokens",
            "set encoder.inputs = 'features' .*a transformer reads token ids only",
        ),
        (sparse, "both", "no column input_ids"),
        (data, "features", "no column feature_ids, feature_values.*set encoder.inputs = 'tokens'"),
    ):
        run = next(runs)
        with pytest.raises(InputError, match=remedy):
            Trainer.start(small.layout.root, run.root, recipe(encoder={"inputs": inputs}), silent)
        assert not storage.exists(run.config)
    with pytest.raises(
        InputError, match=r"labels: no column feature_ids, feature_values.*set data\.label_texts = false"
    ):
        open_sources(data.layout, "val", label_texts=True, inputs="features", mix={"labels": 1.0})


def test_threads_change_no_loss(
    data: SmallData, straight: tuple[RunLayout, list[float]], runs: Iterator[RunLayout]
) -> None:
    options = recipe(order={"threads": 3})
    assert train(Trainer.start(data.layout.root, next(runs).root, options, silent)) == straight[1]


def test_another_recipe_names_what_differs(data: SmallData, runs: Iterator[RunLayout]) -> None:
    run = next(runs)
    train(Trainer.start(data.layout.root, run.root, recipe(), silent))
    with pytest.raises(InputError, match=r"train\.epochs was 5, now 6; classifier\.lr was 0\.1, now 0\.2"):
        Trainer.resume(data.layout.root, run.root, recipe(classifier={"lr": 0.2}, train={"epochs": 6}), silent)
    with pytest.raises(InputError, match=r"a run exists here already\. Give resume=True"):
        Trainer.start(data.layout.root, run.root, recipe(), silent)


def test_a_loss_that_diverges_stops_the_run_with_a_remedy(data: SmallData, runs: Iterator[RunLayout]) -> None:
    wild = recipe(loss={"temperature": 1e-38})
    with pytest.raises(ExtremisError, match=r"the loss is (nan|inf) at step \d+ .*Lower encoder\.lr"):
        train(Trainer.start(data.layout.root, next(runs).root, wild, silent))
