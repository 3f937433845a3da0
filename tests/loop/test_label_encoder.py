"""A run whose head encodes labels: trained, resumed, dumped for mining, evaluated; other losses on a classifier."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas import storage
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.builders import SmallData, build_data, build_negatives
from tests.training import Killed, silent, train, with_sections
from trainer.evaluation.evaluate import SplitScorer
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import load_model

DEXML: dict[str, Any] = {
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 8, "buckets": 64, "dropout": 0.1, "feature_dropout": 0.1, "normalize": True, "lr": 0.02},
    "method": "dexml",
    "head": {"label_batch": 7},
    "negatives": {"pool": "all"},
    "loss": {"kind": "decoupled", "temperature": 0.1},
    "train": {"epochs": 3},
    "checkpoint": {"every_steps": 3},
    "logging": {"every_steps": 1, "tensorboard": False},
}
SAMPLED = {"negatives": {"pool": "batch", "hard": 2, "width": 3}, "refresh": {"start": 2, "every": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("data")))


def recipe(**sections: dict[str, Any]) -> Recipe:
    return with_sections(DEXML, sections)


def started(data: SmallData, run: Path, recipe: Recipe) -> Trainer:
    table = open_manifest(data.layout.queries("train"))
    build_negatives(
        RunLayout(str(run)).negatives(2, "queries"), table, data.points["train"].positives, data.labels, 3, pads=False
    )
    return Trainer.start(data.layout.root, str(run), recipe, silent)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sections", [{}, SAMPLED], ids=["all", "sampled"])
def test_stopped_and_resumed_it_is_the_run_that_was_never_stopped(
    data: SmallData, tmp_path: Path, sections: dict[str, Any], shared: bool
) -> None:
    settings = recipe(**sections, head={"shared": shared})
    straight = train(started(data, tmp_path / "straight", settings))
    assert sections or straight[-1] < straight[0]  # a table makes the pool larger
    with pytest.raises(Killed):
        train(started(data, tmp_path / "killed", settings), stop_after=5)
    resumed = train(Trainer.resume(data.layout.root, str(tmp_path / "killed"), settings, silent))
    assert resumed == straight[-len(resumed) :]
    models = [load_model(data.layout, RunLayout(str(tmp_path / name)))[1] for name in ("straight", "killed")]
    assert torch.equal(models[0].head.vectors, models[1].head.vectors)
    assert models[0].head.vectors.shape == (data.labels, 8)
    scores = [SplitScorer.open(data.layout, model, "test").score().report()["metrics"] for model in models]
    assert scores[0] == scores[1]
    assert [*models[0].encoders] == (["encoder"] if shared else ["encoder", "label-encoder"])


def test_a_dump_holds_the_embeddings_of_queries_and_labels(data: SmallData, tmp_path: Path) -> None:
    settings = recipe(**SAMPLED, train={"epochs": 3}, encoder={"dropout": 0.0, "feature_dropout": 0.0, "lr": 1e-9})
    trainer = started(data, tmp_path / "run", settings)
    train(trainer)
    run = RunLayout(str(tmp_path / "run"))
    manifest = open_manifest(run.vectors(0), "vectors")
    assert manifest.rows == data.labels
    assert manifest.parameters["bias"] is False
    z = np.concatenate([matrix_column(group, "vector") for group in Table(run.vectors(0), manifest).batches()])
    np.testing.assert_allclose(z, trainer.model.head.vectors.numpy(), atol=1e-4)
    url = run.embeddings(0, "queries")
    x = np.concatenate([matrix_column(group, "vector") for group in Table.open(url).batches()])
    rows = Table.open(data.layout.queries("train")).batches(trainer.model.columns)
    expected = torch.cat([trainer.model.embed_table(group) for group in rows])
    np.testing.assert_allclose(x, expected.numpy(), atol=2e-3)  # float16


def test_a_checkpoint_has_no_rows_of_labels(data: SmallData, tmp_path: Path) -> None:
    train(started(data, tmp_path / "run", recipe(train={"epochs": 1})))
    run = RunLayout(str(tmp_path / "run"))
    names = storage.list_names(run.checkpoint(4))
    assert names
    assert not [name for name in names if name.startswith("vectors")]


@pytest.mark.parametrize("pool", ["shared", "all"])
@pytest.mark.parametrize("kind", ["softmax", "decoupled", "softtopk", "triplet"])
def test_every_loss_trains_a_classifier_too(data: SmallData, tmp_path: Path, kind: str, pool: str) -> None:
    negatives = {"pool": pool, "random": 6} if pool == "shared" else {"chunk": 4}
    loss = {"kind": kind, **({"k": 3} if kind == "softtopk" else {})}
    method = {"method": "astra" if pool == "shared" else "renee", "negatives": negatives}
    settings = with_sections(DEXML, {**method, "loss": loss, "train": {"epochs": 4}})
    losses = train(started(data, tmp_path / "run", settings))
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"negatives": {"pool": "shared"}}, r"negatives\.pool = 'shared': expected one of 'all', 'batch'"),
        ({"negatives": {"pool": "all", "hard": 2}}, r"negatives\.hard"),
    ],
)
def test_a_pool_of_another_head_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**sections)
