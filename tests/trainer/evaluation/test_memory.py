"""A memory against brute force over all training points; its budget, and its files."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.manifest import Manifest, publish
from schemas.ragged import Ragged
from schemas.table import Table
from tests.builders import SmallData, build_data, ragged, tokens_of
from tests.laws import assert_equal
from trainer.evaluation import memory as module
from trainer.evaluation.memory import NEIGHBOURS, Memory
from trainer.evaluation.votes import TEMPERATURE
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import Model
from trainer.stream import open_queries

D = 6
SECTIONS: dict[str, Any] = {
    "encoder": {"dimension": D, "buckets": 64},
    "classifier": {"bias": True, "initial_scale": 1.0},
    "negatives": {"random": 4},
}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://memory/data", rows={"train": 150, "test": 20})


@pytest.fixture(scope="module")
def model(data: SmallData) -> Model:
    return Model.build(Recipe.model_validate(SECTIONS), data.vocabulary, data.labels)


def embedded(data: SmallData, model: Model, split: str) -> torch.Tensor:
    return model.embed(tokens_of(ragged(data.points[split].tokens, np.uint16)))


def rows_of(labels: Ragged) -> list[list[int]]:
    return [row.tolist() for row in np.split(labels.values, labels.offsets[1:-1])]


def read(memory: Memory, url: str) -> Memory | None:
    return Memory.read(Table(url, publish(url, Manifest(kind="fusion", shards=tuple(memory.write(url))))))


def test_votes_are_those_of_the_nearest_of_all_points(data: SmallData, model: Model) -> None:
    memory, x = Memory.build(model, data.layout, Data()), embedded(data, model, "test")
    points = data.points["train"]
    assert len(memory.vectors) == len(points.tokens)
    assert rows_of(memory.labels) == points.positives
    vectors = normalize(embedded(data, model, "train")[:, :D]).half().float()
    similarity = (normalize(x[:, :D]) @ vectors.T).numpy()
    votes = memory.votes(x)
    for row in range(len(x)):
        nearest = np.lexsort((np.arange(len(vectors)), -similarity[row]))[:NEIGHBOURS]
        weights = np.exp((similarity[row, nearest] - 1) / TEMPERATURE)
        expected = Counter[int]()
        for weight, point in zip(weights / weights.sum(), nearest.tolist(), strict=True):
            expected.update({label: float(weight) for label in points.positives[point]})
        part = slice(votes.offsets[row], votes.offsets[row + 1])
        got = dict(zip(votes.ids[part].tolist(), votes.values[part].tolist(), strict=True))
        assert got == pytest.approx({label: vote for label, vote in expected.items() if label in got}, abs=1e-4)
        assert sum(got.values()) == pytest.approx(sum(expected.values()), abs=1e-4)


@pytest.mark.parametrize("rows_a_file", [1 << 20, 40, 150])
def test_it_votes_the_same_after_it_was_written_and_read(
    data: SmallData, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_a_file: int
) -> None:
    monkeypatch.setattr(module, "ROWS_A_FILE", rows_a_file)
    memory, x = Memory.build(model, data.layout, Data()), embedded(data, model, "test")
    again = read(memory, str(tmp_path / "out"))
    assert again is not None
    assert again.vectors.tobytes() == memory.vectors.tobytes()
    assert_equal(again.labels, memory.labels)
    assert_equal(again.votes(x), memory.votes(x))
    assert again.bytes == memory.bytes
    assert len([*(tmp_path / "out" / "memory").glob("*.parquet")]) == math.ceil(150 / rows_a_file)


def test_where_a_manifest_names_no_memory_there_is_none(data: SmallData, tmp_path: Path) -> None:
    assert Memory.read(Table.open(data.layout.root)) is None


def test_a_damaged_file_is_refused(data: SmallData, model: Model, tmp_path: Path) -> None:
    url = str(tmp_path / "out")
    memory = Memory.build(model, data.layout, Data())
    manifest = publish(url, Manifest(kind="fusion", shards=tuple(memory.write(url))))
    place = storage.join(url, manifest.shards[0].path)
    content = bytearray(storage.read_bytes(place))
    content[20 : len(content) // 2] = bytes(len(content) // 2 - 20)
    storage.write_bytes(place, bytes(content))
    with pytest.raises(TableError, match=manifest.shards[0].path):
        Memory.read(Table(url, manifest))


@pytest.mark.parametrize("budget", [1, 100, 1000, 3000, 10_000, 1 << 30])
def test_a_budget_bounds_its_bytes(data: SmallData, model: Model, budget: int) -> None:
    whole = Memory.build(model, data.layout, Data())
    memory = Memory.build(model, data.layout, Data(), budget)
    assert memory.bytes <= max(budget, 8)
    if budget >= whole.bytes:
        assert memory.bytes == whole.bytes
    elif budget >= 1000:
        assert memory.bytes > budget * 0.8
    votes = memory.votes(embedded(data, model, "test"))
    assert votes.rows == 20
    assert (len(votes.ids) > 0) == (len(memory.vectors) > 0)


def test_what_is_held_out_is_behind_what_the_run_trained_on(data: SmallData, model: Model) -> None:
    options, points = Data(holdout=0.2), data.points["train"]
    memory, table = Memory.build(model, data.layout, options), open_queries(data.layout, "train")
    groups = options.held_out.batches(table, ["query_id"])
    held_out = [row for group in groups for row in group["query_id"].to_pylist()]
    assert (len(memory.vectors), memory.trained, len(held_out)) == (150, 120, 30)
    kept = [row for row in range(150) if row not in held_out]
    assert rows_of(memory.labels) == [points.positives[row] for row in kept + held_out]
    of_trained, x = memory.first(memory.trained), embedded(data, model, "test")
    assert rows_of(of_trained.labels) == [points.positives[row] for row in kept]
    assert_equal(of_trained.extended(memory).votes(x), memory.votes(x))
    whole = Memory.build(model, data.layout, Data())
    assert_equal(memory.votes(x), whole.votes(x))
    with pytest.raises(InputError, match=r"data\.mix: a memory holds the training points of one split"):
        Memory.build(model, data.layout, Data(mix={"train": 1.0}))
