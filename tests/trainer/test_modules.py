"""NGAME in two modules: an encoder that another run trained, frozen, and vectors that begin at its labels' texts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.ragged import Ragged
from tests.builders import SmallData, build_data
from tests.training import assert_resumes, silent, train, with_sections
from trainer.heads import FrozenQueries
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import load_model
from trainer.stream import Batch, open_sources

FIRST: dict[str, Any] = {
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 8, "buckets": 64, "feature_dropout": 0.2, "normalize": True, "lr": 0.02},
    "method": "ngame",
    "head": {"positives": 1},
    "loss": {"kind": "triplet", "radius": 1.9},
    "train": {"epochs": 2, "threads": 1},
    "checkpoint": {"every_steps": 3},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("modules") / "data"))


@pytest.fixture(scope="module")
def first(data: SmallData) -> str:
    """Module M1."""
    run = str(Path(data.layout.root).parent / "first")
    losses = train(Trainer.start(data.layout.root, run, with_sections(FIRST, {}), silent))
    assert losses[-1] < losses[0]
    return run


def second(first: str, **sections: dict[str, Any]) -> Recipe:
    """Module M2, of the encoder of the run `first`."""
    changed = {
        "head": {"positives": 1},
        "classifier": {
            "optimizer": "adam",
            "lr": 0.01,
            "initial": "labels",
            "initial_scale": 1.0,
            "normalize": True,
        },
        "train": {"epochs": 3, "encoder_from": first, "freeze_encoder": True},
    }
    merged = {name: {**changed.get(name, {}), **sections.get(name, {})} for name in {*changed, *sections}}
    return with_sections(FIRST, {"method": "ngame-m2", **merged})


def test_vectors_begin_at_the_trained_texts_and_the_encoder_stays(data: SmallData, first: str, tmp_path: Path) -> None:
    trained = load_model(data.layout, RunLayout(first))[1]
    options = second(first, train={"epochs": 10}, classifier={"lr": 0.1})
    trainer = Trainer.start(data.layout.root, str(tmp_path / "run"), options, silent)
    before = trainer.model.head.vectors.clone()
    torch.testing.assert_close(before, trained.head.vectors)
    losses = train(trainer)
    epoch = len(losses) // 10
    assert sum(losses[-2 * epoch :]) < 0.9 * sum(losses[: 2 * epoch])
    assert not torch.equal(trainer.model.head.vectors, before)
    # A label without text begins at 0, and comes to the sphere in the first step that touches it.
    lengths, moved = trainer.model.head.vectors.norm(dim=1), (trainer.model.head.vectors != before).any(1)
    torch.testing.assert_close(lengths, torch.where(moved, 1.0, before.norm(dim=1)))
    for name, value in trained.encoder.tensors().items():
        assert torch.equal(trainer.model.encoder.tensors()[name], value), name


def test_stopped_and_resumed_it_is_the_run_that_was_never_stopped(data: SmallData, first: str, tmp_path: Path) -> None:
    root, options = data.layout.root, second(first)
    straight = train(Trainer.start(root, str(tmp_path / "straight"), options, silent))
    assert_resumes(root, str(tmp_path / "killed"), options, straight, 5)


def test_a_frozen_encoder_encodes_each_query_once(
    data: SmallData, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer.start(data.layout.root, str(tmp_path / "run"), second(first), silent)
    encoder, encoded = trainer.model.encoder, []
    seen: dict[int, torch.Tensor] = {}
    real = FrozenQueries.embed

    def embed(self: FrozenQueries, batch: Batch, first: int) -> torch.Tensor:
        x = real(self, batch, first)
        again = torch.stack([seen.setdefault(row, vector) for row, vector in zip(batch.rows.tolist(), x, strict=True)])
        assert torch.equal(again, x)
        whole = encoder.encode(encoder.prepare(batch.inputs))
        encoded.pop()
        torch.testing.assert_close(x, whole, rtol=1e-3, atol=1e-3)
        return x

    def encode(inputs: Any, key: tuple[int, ...] | None = None) -> torch.Tensor:
        encoded.append(len(embeddings := type(encoder).encode(encoder, inputs, key)))
        return embeddings

    monkeypatch.setattr(FrozenQueries, "embed", embed)
    monkeypatch.setattr(encoder, "encode", encode)
    train(trainer)
    assert sum(encoded) == len(seen) == len(data.points["train"].positives)


def test_embeddings_of_other_tables_are_forgotten(data: SmallData, first: str, tmp_path: Path) -> None:
    trainer = Trainer.start(data.layout.root, str(tmp_path / "run"), second(first), silent)
    kept = FrozenQueries(trainer.model.encoder)
    train_split, test_split = (open_sources(data.layout, split, False) for split in ("train", "test"))
    kept.begin(train_split)
    batch = next(iter(trainer.stream))
    x = kept.embed(batch, 0)
    kept.begin(train_split)
    assert torch.equal(kept.embed(Batch(0, 0, batch.rows, batch.inputs.slice(0, 0), *Ragged.empty(0)), 0), x)
    kept.begin(test_split)
    few = batch.inputs.slice(1, 3)
    of_others = kept.embed(Batch(0, 0, np.array([0, 1]), few, *Ragged.empty(2)), 0)
    torch.testing.assert_close(of_others, x[1:3])


def test_an_encoder_goes_on_learning_where_it_is_not_frozen(data: SmallData, first: str, tmp_path: Path) -> None:
    options = second(first, train={"freeze_encoder": False, "epochs": 1})
    trainer = Trainer.start(data.layout.root, str(tmp_path / "run"), options, silent)
    trained = load_model(data.layout, RunLayout(first))[1].encoder.tensors()
    assert torch.equal(trainer.model.encoder.tensors()["embedding"], trained["embedding"])
    train(trainer)
    assert not torch.equal(trainer.model.encoder.tensors()["embedding"], trained["embedding"])


def test_what_is_no_encoder_to_begin_with_is_refused(data: SmallData, first: str, tmp_path: Path) -> None:
    def start(recipe: Recipe) -> None:
        Trainer.start(data.layout.root, str(tmp_path / "run"), recipe, silent)

    with pytest.raises(InputError, match=r"needs a trained encoder: give set=\{\"train\.encoder_from\": RUN\}"):
        start(second(""))
    with pytest.raises(InputError, match="no run here"):
        start(second(str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match=r"encoder\.ngrams is 2 in that run, 1 in this run"):
        start(second(first, encoder={"ngrams": 1}))
    other = build_data(str(tmp_path / "data"), seed=1)
    with pytest.raises(InputError, match="trained on different data"):
        Trainer.start(other.layout.root, str(tmp_path / "run"), second(first), silent)
    with pytest.raises(ValueError, match="nothing to learn"):
        with_sections(FIRST, {"train": {"freeze_encoder": True}})
    with pytest.raises(ValueError, match=r"radius = 1\.9 .*encoded labels or classifier\.normalize"):
        second(first, classifier={"normalize": False})
    for negatives in ({"pool": "shared", "random": 5}, {"lsh": {"hard": 5}}):
        with pytest.raises(ValueError, match=r"negatives|head"):
            second(first, negatives=negatives)
    assert not (tmp_path / "run" / "config.toml").exists()
