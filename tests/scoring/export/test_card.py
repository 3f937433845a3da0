"""The card of an export: the Hub's own reader reads it, and each figure in it is one of a file."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import extremis
from schemas.manifest import open_manifest
from tests.builders import build_data
from tests.command import call, refused, sets

STATED = ("--license", "cc0-1.0", "--language", "en,sv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DATA, and a RUN on it; 9 labels have no training point."""
    folder = tmp_path_factory.mktemp("card")
    build_data(str(folder / "data"), rows={"train": 64, "test": 20}, labels=60)
    call("train", "random", folder / "data", folder / "run", *sets("train.epochs=1", "encoder.dimension=8"))
    return folder


def read(export: Path) -> ModelCard:
    return ModelCard.load(export / "README.md")


def test_two_exports_have_one_card_that_the_hub_reads(folder: Path) -> None:
    for name in ("one", "two"):
        assert call("export", folder / "data", folder / "run", folder / name, *STATED).status == 0
    first, second = (open_manifest(str(folder / name), "export") for name in ("one", "two"))
    assert first.digest == second.digest
    card = read(folder / "one")
    assert card.data.to_dict() == {
        "library_name": "extremis",
        "pipeline_tag": "text-classification",
        "license": "cc0-1.0",
        "language": ["en", "sv"],
        "tags": ["extreme-classification"],
    }
    for said in (*first.parents.values(), "64 rows of train", "Not evaluated on a test split", "best 5 labels"):
        assert said in card.text
    assert "no probabilities" in card.text
    assert str(folder) not in card.text
    table = json.loads((folder / "one" / "_manifest.json").read_text())
    assert "README.md" in [shard["path"] for shard in table["shards"]]


def test_its_figures_are_those_of_the_evaluation(folder: Path) -> None:
    report = call("evaluate", folder / "data", folder / "run", "--json").json
    assert call("export", folder / "data", folder / "run", folder / "later").status == 0
    card = read(folder / "later")
    figures = {
        name: numbers.split(" | ") for name, numbers in re.findall(r"^\| (\w+@\d+) \| (.*) \|$", card.text, re.M)
    }
    assert {"P@1", "P@5", "PSP@5"} <= {*figures}
    for name, told in figures.items():
        assert told == [f"{each:.2f}" for each in (report["metrics"][name], *report["intervals"][name])]
    assert "license" not in card.data.to_dict()
    assert "license of the data: not stated; languages: not stated" in card.text


def test_what_it_does_not_know(exports: Path) -> None:
    """Of an export with probabilities, whose scores nobody evaluated on test."""
    facts = json.loads((exports / "one" / "calibration.json").read_text())
    card = read(exports / "one").text
    assert f"{facts['queries']:,} rows of holdout: expected calibration error {100 * facts['ece']:.2f} %" in card
    assert f"more than {100 * facts['none_of_these']['fragments']:.1f} % of the tokens are parts of words" in card
    labels = extremis.load(exports / "one")._exported.label_table(("frequency",))["frequency"].to_pylist()
    assert f"- {labels.count(0):,} of {len(labels):,} labels have no training point" in card


def test_a_license_is_a_name(folder: Path) -> None:
    refused(call("export", folder / "data", folder / "run", folder / "x", "--license", "a\n---"), "--license")
