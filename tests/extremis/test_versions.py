"""A day: a version is sharded, a run goes on from yesterday's, and is evaluated, exported and asked."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import extremis
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from schemas.shard_files.shards import iterate
from tests.days import TINY
from tests.pipelines.test_versions import NAMES, SEQUENCE, make, rows_of
from tests.training import silent
from trainer.checkpoints.checkpoint import latest_checkpoint
from trainer.config import load_recipe
from trainer.evaluation.label_embeddings import embed_texts
from trainer.group import ALONE
from trainer.initial.earlier_run import begin_with_run
from trainer.model import DataFacts, find_checkpoint, load_encoder
from trainer.model import Model as TrainedModel


def weights(run: Path) -> torch.Tensor:
    checkpoint = latest_checkpoint(RunLayout(str(run)))
    assert checkpoint is not None
    return checkpoint.vectors("weight").float()


def begun(days: Path, data: str, **train: Any) -> TrainedModel:
    """A model of the recipe on `data`, as it begins with run0."""
    changes = [*(f"{key}={str(value).lower()}" for key, value in TINY.items())]
    changes += [f"train.{key}={value!r}" for key, value in {"start_from": f"{days}/run0", **train}.items()]
    recipe, layout = load_recipe("random", changes), DataLayout(f"{days}/{data}")
    facts = DataFacts.of(layout)
    model = TrainedModel.build(recipe, facts.vocabulary, facts.labels, facts.features, ALONE)
    assert begin_with_run(model, layout, recipe, silent)
    return model


def test_labels_that_stay_keep_their_vectors_and_retired_ones_leave(days: Path) -> None:
    before, model = weights(days / "run0"), begun(days, "data1")
    labels = rows_of(f"{days}/data1/labels")
    for row in labels[: len(before)]:
        expected = torch.zeros(9) if row["retired"] else before[row["label_id"]]
        assert torch.equal(model.head.vectors[row["label_id"]].float(), expected)
    assert any(row["retired"] for row in labels)


def test_new_labels_begin_at_the_mean_of_their_points(days: Path) -> None:
    known, model = len(weights(days / "run0")), begun(days, "data1")
    layout = DataLayout(f"{days}/data1")
    table = open_manifest(layout.queries("train"))
    for label in range(known, len(model.head.vectors)):
        points = [
            model.embed_table(group.take([row]))[0, :8]
            for group in iterate(layout.queries("train"), table)
            for row, ids in enumerate(group["label_ids"].to_pylist())
            if label in ids
        ]
        row = model.head.vectors[label, :8].float()
        expected = torch.stack(points).mean(0) if points else next(embed_texts(model, layout, label, label + 1))[1][0]
        assert torch.nn.functional.cosine_similarity(row, expected, dim=0) > 0.999
    lengths = model.head.vectors[known:, :8].float().norm(dim=1)
    assert torch.allclose(lengths, weights(days / "run0")[:, :8].norm(dim=1).median(), rtol=1e-4)


def test_new_labels_may_begin_at_their_texts(days: Path) -> None:
    known, model = len(weights(days / "run0")), begun(days, "data1", new_labels="texts")
    layout = DataLayout(f"{days}/data1")
    ((_, z),) = [each for each in embed_texts(model, layout, known, len(model.head.vectors)) if len(each[1])][:1]
    rows = torch.nn.functional.normalize(model.head.vectors[known : known + len(z), :8].float(), dim=1)
    assert torch.allclose(rows, z, atol=1e-5)


def test_the_encoder_is_that_of_the_run(days: Path) -> None:
    _, checkpoint = find_checkpoint(DataLayout(f"{days}/data0"), RunLayout(f"{days}/run0"))
    tensors = begun(days, "data1").encoder.tensors()
    for name, tensor in checkpoint.tensors("encoder").items():
        assert torch.equal(tensors[name], tensor)


def test_a_refresh_has_fewer_epochs_at_lower_rates(days: Path, tmp_path: Path) -> None:
    run = extremis.train("random", f"{days}/data2", tmp_path / "run2", from_run=days / "run1", progress=False)
    whole = extremis.inspect(tmp_path / "run2", progress=False)
    assert len(run.epochs) < load_epochs(f"{days}/data2")
    assert whole


def load_epochs(data: str) -> int:
    from trainer.settings.resolve import resolve

    return resolve("random", (), data).recipe.train.epochs


def test_a_run_of_other_data_is_refused(days: Path, tmp_path: Path) -> None:
    make(tmp_path, SEQUENCE[:1])
    with pytest.raises(InputError, match="made from other data"):
        extremis.train("random", tmp_path / "data0", tmp_path / "run", from_run=days / "run1", progress=False)


def test_a_model_of_another_make_is_refused(days: Path, tmp_path: Path) -> None:
    changes = {**TINY, "encoder.dimension": 16}
    with pytest.raises(InputError, match=r"of another make: encoder.dimension is 8 there, 16 here"):
        extremis.train("random", days / "data1", tmp_path / "run", from_run=days / "run0", set=changes, progress=False)


def test_retired_labels_are_never_predicted_by_an_export(days: Path, tmp_path: Path) -> None:
    extremis.export(days / "data1", days / "run1", tmp_path / "export", index="none", progress=False)
    retired = {row["key"] for row in rows_of(f"{days}/data1/labels") if row["retired"]}
    for prediction in extremis.load(tmp_path / "export").predict(["text 1", "t3 u9"], k=9):
        keys = {label.key for label in prediction.labels}
        assert retired
        assert not keys & retired
        assert keys == set(NAMES) - retired


def test_data_lists_shows_and_drops_versions(days: Path, tmp_path: Path) -> None:
    root = tmp_path / "moved"
    shutil.copytree(days, root)
    listed = extremis.data("list", root, progress=False).versions
    assert [each["data"] for each in listed] == ["data0", "data1", "data2"]
    assert [each["needs"] for each in listed] == [[], ["data0"], ["data0", "data1"]]
    shown = extremis.data("show", root / "data2", progress=False)
    assert [part["part"] for part in shown.parts] == ["0001", "0002", "0003"]
    assert shown.parts[2]["rows"]["train"] == 1
    with pytest.raises(InputError, match=r"data1 \(version 2\), .*data2 \(version 3\) need its part 0001"):
        extremis.data("drop", root / "data0", progress=False)
    extremis.data("drop", root / "data2", progress=False)
    extremis.data("drop", root / "data1", progress=False)
    assert [each["data"] for each in extremis.data("list", root, progress=False).versions] == ["data0"]
    shutil.rmtree(root / "data0")
    with pytest.raises(InputError, match="no data set or export here"):
        extremis.data("drop", root / "data1", progress=False)


def test_what_is_gone_is_told(days: Path, tmp_path: Path) -> None:
    shutil.copytree(days / "data1", tmp_path / "data1")
    (version,) = extremis.data("list", tmp_path, progress=False).versions
    assert "part 0001" in version["fault"]


def test_embeddings_and_negatives_are_aligned_with_a_version(days: Path, tmp_path: Path) -> None:
    out = extremis.embed(days / "data1", days / "run1", tmp_path / "x", split="train", progress=False)
    assert out
    table = open_manifest(f"{days}/data1/queries/train")
    assert open_manifest(str(tmp_path / "x")).cut == table.cut
    model = load_encoder(DataLayout(f"{days}/data1"), RunLayout(f"{days}/run1"))
    vectors = iterate(f"{tmp_path}/x", open_manifest(f"{tmp_path}/x"))
    for queries, embedded in zip(iterate(f"{days}/data1/queries/train", table), vectors, strict=True):
        assert queries["query_id"].to_pylist() == embedded["query_id"].to_pylist()
        x = np.array(embedded["vector"].to_pylist(), np.float32)
        assert np.allclose(x, model.embed_table(queries).numpy(), atol=2e-2)
