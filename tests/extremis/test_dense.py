"""Dense vectors from shard to predictions: what `evaluate` counts, whoever embeds the texts; and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import extremis
from extremis.auto import Survey, contenders
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from tests.command import call, refused, sets
from tests.pipelines.test_shard_dense import WORDS, d, points, write
from tests.static_model import write_static_model

SHARD = ("--tokenizer", "train:100", "--shards", "2", "--row-group-rows", "16")
SMALL = ("order.batch=16", "train.epochs=2", "negatives.hard=0", "logging.tensorboard=false")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_static_model(tmp_path_factory.mktemp("model"), [" ".join(WORDS), "label"])


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors made by a model, and given ones: DATA, RUN and an export of each."""
    folder = tmp_path_factory.mktemp("dense")
    for name, options, inputs in (("made", ("--embed", model), "tokens+dense"), ("given", (), "dense")):
        raw = write(folder / f"{name}-raw", vectors=name == "given")
        for command in (
            ("shard", raw, folder / name, *SHARD, *options),
            ("train", "astra", folder / name, folder / f"{name}-run", *sets(*SMALL, f"encoder.inputs={inputs}")),
            ("export", folder / name, folder / f"{name}-run", folder / f"{name}-export", "--calibration-split", "none"),
        ):
            done = call(*command)
            assert done.status == 0, done.err
    return folder


def predicted(place: Path) -> dict[str, tuple[list[str], list[float]]]:
    rows = map(json.loads, place.read_text().splitlines())
    return {row["key"]: (row["labels"], row["scores"]) for row in rows}


@pytest.mark.parametrize("name", ["made", "given"])
def test_predictions_are_those_that_evaluate_counts(name: str, folder: Path, tmp_path: Path) -> None:
    export, data = folder / f"{name}-export", folder / name
    assert call("predict", export, "--data", data, tmp_path / "split.jsonl", "--max-labels", "6").status == 0
    done = call("predict", export, folder / f"{name}-raw" / "test.jsonl", tmp_path / "rows.jsonl", "--max-labels", "6")
    assert done.status == 0, done.err
    of_split, of_rows = predicted(tmp_path / "split.jsonl"), predicted(tmp_path / "rows.jsonl")
    assert of_split.keys() == of_rows.keys()
    for key, (_, scores) in of_split.items():
        np.testing.assert_allclose(of_rows[key][1], scores, atol=2e-3)
    hits = np.mean([of_split[row["key"]][0][0] in row["labels"] for row in points(200, 20)])
    report = call("evaluate", data, folder / f"{name}-run", "--scores", "classifier", "--json").json
    assert report["metrics"]["P@1"] == pytest.approx(100 * hits)


def test_texts_are_embedded_by_the_model_that_an_export_states(folder: Path, model: str, tmp_path: Path) -> None:
    stated = open_manifest(str(folder / "made-export")).parameters
    assert (stated["dense"], stated["dense_model"]["name"]) == (6, model)
    moved, texts = str(shutil.copytree(model, tmp_path / "moved")), ["sea storm", "a ship"]
    found = [extremis.load(folder / "made-export", embedder=place).predict(texts) for place in (None, moved)]
    assert found[0] == found[1]
    other = write_static_model(tmp_path / "other", WORDS, seed=1)
    place = tmp_path / "in.txt"
    place.write_text("sea\n")
    refused(
        call("predict", folder / "made-export", place, tmp_path / "out.jsonl", "--embedder", other),
        "is a different model",
        "--embedder",
    )
    refused(
        call("predict", folder / "given-export", place, tmp_path / "out.jsonl", "--embedder", other),
        "does not use a text model",
    )
    refused(call("predict", folder / "given-export", place, tmp_path / "out.jsonl"), "lines of text", "reads vectors")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"key": "q", "text": "sea", "vector": [1.0] * (d + 1)}))
    refused(call("predict", folder / "given-export", rows, tmp_path / "out.jsonl"), "has 6 numbers, expected 5")
    with pytest.raises(extremis.InputError, match="your own vectors"):
        extremis.load(folder / "given-export")


def test_auto_reads_vectors_and_a_dual_encoder_reads_those_of_labels(folder: Path) -> None:
    survey = Survey.of(DataLayout(str(folder / "made")))
    assert survey.inputs == "tokens+dense"
    assert all("encoder.inputs=tokens+dense" in contender.changes for contender in contenders(survey))
    assert "tokens and a dense vector" in next(iter(survey.lines()))
    options = ("encoder.dimension=8", "encoder.buckets=512", "encoder.inputs=tokens+dense", "train.epochs=1")
    changes = [word for option in (*options, "negatives.hard=0") for word in ("--set", option)]
    done = call("train", "dexml-sampled", folder / "made", folder / "dual", *changes)
    assert done.status == 0, done.err
    assert call("evaluate", folder / "made", folder / "dual", "--json").json["queries"] == 20


def test_data_without_vectors_is_refused_with_a_remedy(tmp_path: Path) -> None:
    assert call("shard", write(tmp_path / "raw", vectors=False), tmp_path / "data", *SHARD).status == 0
    done = call("train", "astra", tmp_path / "data", tmp_path / "run", *sets("encoder.inputs=tokens+dense"))
    refused(done, "no column dense", "--embed MODEL")


def test_inspect_says_who_made_the_vectors_and_by_which_command(folder: Path, model: str) -> None:
    said = call("inspect", folder / "made").out
    assert f"dense_model.name: {model}" in said
    assert f"--embed {model}" in said
    assert "dense_model" not in call("inspect", folder / "given").out
