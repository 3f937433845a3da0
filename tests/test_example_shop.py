"""The story of a shop in examples/shop: each question has its answer, on a small catalogue."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT

sys.path.insert(0, str(ROOT / "examples" / "shop"))

import make_shop
import story

ROW = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    return story.tell(folder, rows=400, new=40, row=ROW, minutes=0.1)


def test_bad_categories_are_those_without_words_or_articles(answers: dict[str, Any]) -> None:
    assert {make_shop.VAGUE, make_shop.RARE} <= {category["label"] for category in answers["worst"]}


def test_why_a_category_is_never_predicted(answers: dict[str, Any]) -> None:
    why = answers["why"]
    assert not why["is_given"]
    assert why["reason"].startswith("its score is ")
    assert min(why["gaps"].values()) < 0
    assert make_shop.RARE not in {row[f"label_{n}"] for row in answers["predicted"] for n in (1, 2)}


def test_wrong_categories_are_the_first_suspects(answers: dict[str, Any], folder: Path) -> None:
    wrong = (folder / "wrong.txt").read_text().split()
    first = answers["suspects"][: len(wrong) // 2]
    assert len([each for each in first if each["key"] in wrong]) >= 0.7 * len(first) > 2


def test_each_row_of_the_file_has_its_labels(answers: dict[str, Any], folder: Path) -> None:
    with open(folder / "new.csv", encoding="cp1252", newline="") as file:
        rows = [*csv.DictReader(file, delimiter=";")]
    predicted = answers["predicted"]
    assert len(predicted) == len(rows) == 40
    people = {*story.GROUPS[0]}
    for row, answer in zip(rows, predicted, strict=True):
        cells = {name: answer[name] for name in row}
        assert {name: cell.removeprefix("'") for name, cell in cells.items()} == row
        given = {cell for name, cell in answer.items() if name.startswith("label_") and cell}
        assert given
        assert len(given & people) <= 1
    assert predicted[ROW - 1]["Artikelnummer"] == f"N-{ROW - 1:06d}"
