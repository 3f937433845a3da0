"""Validation of a run on a version: by default the newest part of `val`, unless something else is stated."""

import json

import pytest

from pipelines.shard import ShardOptions, shard
from schemas.layout import DataLayout
from trainer.evaluation.evaluate import open_split
from trainer.methods.sections import Data, Validation
from trainer.settings.resolve import resolve
from trainer.settings.versions import settings_of_validation

DAYS = [{"train": 6, "val": 3}, {"train": 4, "val": 2}, {"train": 5}]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three versions; the last one brings no validation points."""
    folder, data = tmp_path_factory.mktemp("days"), list[str]()
    for day, splits in enumerate(DAYS):
        raw = folder / f"raw{day}"
        raw.mkdir()
        for split, count in splits.items():
            rows = [{"key": f"{split}{day}-{i}", "text": f"word {i}", "labels": [f"l{i % 3}"]} for i in range(count)]
            (raw / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if not data:
            rows = [{"key": f"l{i}", "text": f"label {i}"} for i in range(3)]
            (raw / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        onto = {"onto": data[-1]} if data else {"tokenizer": "train:100"}
        shard(str(raw), str(folder / f"data{day}"), ShardOptions(part=f"d-{day}", **onto))
        data.append(str(folder / f"data{day}"))
    return data


def test_the_newest_part_with_rows_is_scored(days: list[str]) -> None:
    for data in days[1:]:
        recipe = resolve("random", (), data).recipe
        assert recipe.validation.split == "val"
        table, part = open_split(DataLayout(data), "val", Data(), recipe.validation.parts)
        assert part.rows(table) == 2


@pytest.mark.parametrize("stated", ["validation.split=", "validation.split=train", "data.holdout=0.2"])
def test_what_is_stated_stays(days: list[str], stated: str) -> None:
    recipe = resolve("random", [stated], days[1]).recipe
    assert recipe.validation.parts == ""
    assert recipe.validation.split == ("train" if stated.endswith("train") else "")


def test_data_without_versions_is_not_scored(days: list[str]) -> None:
    recipe = resolve("random", (), days[0]).recipe
    assert recipe.validation == Validation()
    assert settings_of_validation(recipe, days[0], {}) == {}
