"""A memory against brute force over all training points; its budget, and its files."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.manifest import Manifest, publish
from schemas.ragged import Ragged
from schemas.table import Table
from scoring import memory as module
from scoring.memory import FACTS, NEIGHBOURS, TARGET_RECALL, TEMPERATURE, VECTORS, Memory, plan_index
from search import topk
from search.index import Factory
from tests.builders import SmallData, build_data, ragged, tokens_of
from tests.laws import assert_equal
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


def read(memory: Memory, url: str, trained: bool = False) -> Memory:
    manifest = Manifest(kind="fusion", shards=tuple(memory.write(url)), parameters={FACTS: memory.facts})
    again = Memory.read(Table(url, publish(url, manifest)), trained)
    assert again is not None
    return again


def clusters(rows: int, seed: int) -> torch.Tensor:
    """Unit vectors [rows, 8] around 20 centres, some of them equal."""
    centres = np.random.default_rng(0).standard_normal((20, 8), np.float32)
    draw = np.random.default_rng(seed)
    rows_of = centres[draw.integers(0, 20, rows)] + 0.3 * draw.standard_normal((rows, 8), np.float32)
    return normalize(torch.from_numpy(np.where(draw.random((rows, 1)) < 0.05, centres[0], rows_of).astype(np.float32)))


def indexed(spec: str, rows: int = 2000) -> Memory:
    """A memory with an index, of whose points 9 of 10 are trained on."""
    draw = np.random.default_rng(1)
    counts = draw.integers(0, 4, rows)
    labels = Ragged.from_counts(draw.integers(0, 50, counts.sum()).astype(np.int32), counts)
    whole = Memory(clusters(rows, 2).half().numpy(), labels, rows * 9 // 10, Factory(spec))
    return whole.first(whole.trained).indexed(clusters(200, 3), budget=0).extended(whole)


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
    assert again.vectors.tobytes() == memory.vectors.tobytes()
    assert_equal(again.labels, memory.labels)
    assert_equal(again.votes(x), memory.votes(x))
    assert again.bytes == memory.bytes
    assert len([*(tmp_path / "out" / "memory").glob("*.parquet")]) == math.ceil(150 / rows_a_file)


def test_where_a_manifest_names_no_memory_there_is_none(data: SmallData, tmp_path: Path) -> None:
    assert Memory.read(Table.open(data.layout.root)) is None


@pytest.mark.parametrize("number", range(3))
def test_a_damaged_file_is_refused(tmp_path: Path, number: int) -> None:
    """Of labels, vectors or the index."""
    url, memory = str(tmp_path / "out"), indexed("IVF16,Flat")
    manifest = publish(url, Manifest(kind="fusion", shards=tuple(memory.write(url)), parameters={FACTS: memory.facts}))
    place = storage.join(url, manifest.shards[number].path)
    content = bytearray(storage.read_bytes(place))
    content[20 : len(content) // 2] = bytes(len(content) // 2 - 20)
    storage.write_bytes(place, bytes(content))
    with pytest.raises(TableError, match=manifest.shards[number].path):
        Memory.read(Table(url, manifest))


@pytest.mark.parametrize("change", [{"rows": 1999}, {"rows": 0}, {"rows": 1000}])
def test_vectors_that_do_not_fit_their_labels_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    url, memory = str(tmp_path / "out"), indexed("IVF16,Flat")
    shards = [shard.model_copy(update=change) if shard.path == VECTORS else shard for shard in memory.write(url)]
    manifest = publish(url, Manifest(kind="fusion", shards=tuple(shards), parameters={FACTS: memory.facts}))
    with pytest.raises(TableError, match="Fit the fusion again"):
        Memory.read(Table(url, manifest))


@pytest.mark.parametrize("budget", [1, 100, 1000, 3000, 10_000, 1 << 30])
def test_a_budget_bounds_its_bytes(data: SmallData, model: Model, budget: int) -> None:
    whole = Memory.build(model, data.layout, Data())
    memory = Memory.build(model, data.layout, Data(), budget)
    assert memory.bytes <= max(budget, 8)
    assert plan_index(150, D, len(whole.labels.entries) / 150).bytes == pytest.approx(whole.bytes, abs=1)
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
    groups = options.held_out_rows.batches(table, ["query_id"])
    held_out = [row for group in groups for row in group["query_id"].to_pylist()]
    assert (len(memory.vectors), memory.trained) == (150, 150 - len(held_out))
    kept = [row for row in range(150) if row not in held_out]
    assert rows_of(memory.labels) == [points.positives[row] for row in kept + held_out]
    of_trained, x = memory.first(memory.trained), embedded(data, model, "test")
    assert rows_of(of_trained.labels) == [points.positives[row] for row in kept]
    assert_equal(of_trained.extended(memory).votes(x), memory.votes(x))
    whole = Memory.build(model, data.layout, Data())
    assert_equal(memory.votes(x), whole.votes(x))
    with pytest.raises(InputError, match=r"data\.mix: a memory contains the training points of a single split"):
        Memory.build(model, data.layout, Data(mix={"train": 1.0}))


INDEXES = ("IVF16,Flat", "IVF16,PQ4x4fs")


@pytest.mark.parametrize("spec", INDEXES)
def test_with_all_lists_and_offers_an_index_votes_as_exact_search(spec: str) -> None:
    memory, x = indexed(spec, 500), clusters(40, 4)
    faiss.extract_index_ivf(memory.index).nprobe = 16
    all_offered = replace(memory, refine=500)
    exact = replace(memory, index=None)
    for got, expected in zip(all_offered.nearest(x), exact.nearest(x), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert_equal(all_offered.votes(x), exact.votes(x))


@pytest.mark.parametrize("queries", [1, 3, 17])
def test_an_index_that_offers_enough_reads_no_other_vectors(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, x = indexed("IVF16,Flat"), clusters(queries, 4)
    expected = memory.nearest(x)
    faiss.extract_index_ivf(memory.index).nprobe = 16
    monkeypatch.setattr(topk, "search_exactly", lambda *arguments: pytest.fail("all vectors were read"))
    found = memory.nearest(x)
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert (found[0] >= expected[0]).all()


@pytest.mark.parametrize("spec", INDEXES)
def test_the_recall_that_is_stated_is_that_of_brute_force(spec: str, tmp_path: Path) -> None:
    memory, x = indexed(spec), clusters(200, 3)
    of_trained = read(memory, str(tmp_path / "out"), trained=True)
    _, found = of_trained.nearest(x)
    scores = x.numpy() @ of_trained.vectors.astype(np.float32).T
    least = np.sort(scores, axis=1)[:, -NEIGHBOURS]
    share = (np.take_along_axis(scores, found, 1) >= least[:, None] - 1e-6).mean()
    assert memory.measured["recall"] >= TARGET_RECALL
    assert memory.facts["measured"]["recall"] == pytest.approx(share, abs=0.02)  # equal points stand for each other


@pytest.mark.parametrize("spec", [*INDEXES, "PQ8x4fs"])
@pytest.mark.parametrize("place", ["disk", "memory://memory/indexed"])
def test_an_index_votes_the_same_once_it_was_written_and_read(spec: str, place: str, tmp_path: Path) -> None:
    memory, x = indexed(spec), clusters(100, 4)
    again = read(memory, str(tmp_path / "out") if place == "disk" else f"{place}/{spec}")
    assert (again.facts, again.bytes) == (memory.facts, memory.bytes)
    assert again.vectors.tobytes() == memory.vectors.tobytes()
    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert_equal(again.votes(x), memory.votes(x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spec", ["exact", *INDEXES, "PQ8x4fs"])
def test_points_that_were_held_out_are_left_out_where_they_are_asked_for(spec: str, tmp_path: Path) -> None:
    memory, x = indexed(spec), clusters(100, 4)
    assert memory.nearest(x)[1].max() >= memory.trained
    of_trained = read(memory, str(tmp_path / "out"), trained=True)
    assert len(of_trained.vectors) == of_trained.labels.rows == memory.trained
    assert 0 <= of_trained.nearest(x)[1].min() <= of_trained.nearest(x)[1].max() < memory.trained


@given(st.integers(0, 10**9), st.integers(1, 1024), st.floats(0, 20), st.integers(0, 1 << 40))
def test_a_memory_of_any_size_is_settled_within_its_budget(points: int, wide: int, labels: float, budget: int) -> None:
    settled = plan_index(points, wide, labels, budget)
    assert 0 <= settled.points <= points
    assert settled.bytes <= max(budget, 8)
    assert plan_index(points, wide, labels, 2 * budget).points >= settled.points
    assert settled.stored >= 2 * wide * settled.points
