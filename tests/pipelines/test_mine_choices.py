"""Tables under each option, against brute force; and the fate of a table that is there already."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.mine import MineOptions, mine
from pipelines.mining.inputs import equal_ranges
from pipelines.mining.search import DROPS
from schemas import storage
from schemas.errors import InputError
from schemas.manifest import open_manifest
from schemas.options import check
from schemas.storage import join, write_json
from schemas.table import Table
from tests.command import call, refused
from tests.pipelines.mining.world import World, apart, brute_force, random_world, read_negatives

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world(tmp_path) -> World:
    made = random_world(str(tmp_path), rows=60, labels=50, dimension=6, with_labels=True)
    made.write_dump(bias=True)
    return made


def table(world: World, source: str = "queries", one_by_one: bool = False, **options) -> tuple[np.ndarray, dict]:
    """Label ids [N, K] and the manifest of a table mined into a place of its own; perhaps a block at a time."""
    out = f"{world.run}-out"
    storage.remove(out, recursive=True)
    chosen = check(MineOptions, {"out": out, **options})
    manifest = mine(world.data, world.run, options=apart(world, chosen) if one_by_one else chosen)[source]
    _, label_ids, _ = read_negatives(join(out, source), manifest)
    return label_ids, manifest


def ranking(world: World, width: int = 50) -> np.ndarray:
    return brute_force(world.scores("queries"), world.excluded("queries"), width)


def funnel_adds_up(counters: dict) -> bool:
    return counters["candidates"] == counters["kept"] + sum(counters[name] for name in (*DROPS, "outranked"))


@pytest.mark.parametrize(("block_rows", "one_by_one"), [(50, False), (13, True)])
def test_a_rank_window_is_counted_over_all_labels(world, block_rows, one_by_one):
    label_ids, manifest = table(world, skip_top=3, window=12, width=4, block_rows=block_rows, one_by_one=one_by_one)
    assert (label_ids == ranking(world)[:, 3:7]).all()
    assert manifest.counters["skipped_top"] == 3 * 60
    assert funnel_adds_up(manifest.counters)
    assert manifest.quality["recall_at_k"] == 1.0


def expected_with_margin(world: World, margin: float, relative: float, width: int, window: int) -> np.ndarray:
    rows = []
    for row, (scores, own) in enumerate(zip(world.scores("queries"), world.positives, strict=True)):
        weakest = min((scores[label] for label in own), default=np.inf)
        limit = weakest - margin - relative * abs(weakest) if own else np.inf
        ranked = [label for label in ranking(world)[row].tolist()[:window] if label >= 0 and scores[label] < limit]
        rows.append((ranked + [-1] * width)[:width])
    return np.asarray(rows)


@pytest.mark.parametrize(("margin", "relative"), [(0.0, None), (0.5, None), (None, 0.2), (0.3, 0.1)])
@pytest.mark.parametrize(("block_rows", "one_by_one"), [(50, False), (17, True)])
def test_a_margin_is_taken_from_the_weakest_positive_of_all_blocks(world, margin, relative, block_rows, one_by_one):
    options = {name: value for name, value in (("margin", margin), ("relative_margin", relative)) if value is not None}
    options |= {"query_batch": 64}
    label_ids, manifest = table(world, width=4, window=20, block_rows=block_rows, one_by_one=one_by_one, **options)
    assert (label_ids == expected_with_margin(world, margin or 0, relative or 0, 4, 20)).all()
    assert manifest.counters["above_margin"] > 0
    assert manifest.counters["padded_rows"] == (label_ids < 0).any(axis=1).sum()
    assert funnel_adds_up(manifest.counters)
    assert manifest.quality["recall_at_k"] == 1.0


@pytest.mark.parametrize(("block_rows", "one_by_one"), [(50, False), (9, True)])
def test_each_label_range_keeps_its_own_columns(world, block_rows, one_by_one):
    label_ids, manifest = table(world, ranges=3, width=2, block_rows=block_rows, one_by_one=one_by_one)
    assert manifest.parameters["ranges"] == [list(bounds) for bounds in equal_ranges(0, 50, 3)]
    for number, (start, stop) in enumerate(equal_ranges(0, 50, 3)):
        gone = [own | {*range(start)} | {*range(stop, 50)} for own in world.excluded("queries")]
        assert (label_ids[:, 2 * number : 2 * number + 2] == brute_force(world.scores("queries"), gone, 2)).all()
    assert manifest.quality["recall_at_k"] == 1.0


@pytest.mark.parametrize("spec", ["exact", "IVF4,Flat", "IVF4,PQ3x4fs", "HNSW8", "IVF4,PQ4x4fs,RFlat"])
def test_every_index_reaches_the_recall_that_it_is_tuned_to(tmp_path, spec):
    world = random_world(str(tmp_path), rows=300, labels=400, dimension=6, width=10)
    world.write_dump()
    _, manifest = table(world, index=spec, block_rows=200, target_recall=0.9)
    assert manifest.quality["recall_at_k"] > 0.85
    if spec.startswith("IVF"):
        assert manifest.quality["nprobe"]["most"] <= 4


def test_more_recall_is_more_work(tmp_path):
    world = random_world(str(tmp_path), rows=400, labels=2000, dimension=8, width=10)
    world.write_dump()
    label_ids = [table(world, index="IVF64,Flat", target_recall=target)[1].quality for target in (0.5, 0.9, 0.99)]
    assert label_ids[0]["nprobe"]["most"] < label_ids[1]["nprobe"]["most"] < label_ids[2]["nprobe"]["most"]
    for quality, target in zip(label_ids, (0.5, 0.9, 0.99), strict=True):
        assert quality["recall_at_k"] >= target - 0.02


class TestByLabels:
    def test_label_embeddings_of_the_dump_are_searched_without_their_bias(self, world):
        label_ids, manifest = table(world, by="labels", width=5)
        embeddings = world.label_embeddings.astype(np.float16).astype(np.float64)
        embeddings[:, -1] = 0
        scores = world.queries.astype(np.float16).astype(np.float64) @ embeddings.T
        assert (label_ids == brute_force(scores, world.excluded("queries"), 5)).all()
        assert manifest.parameters["by"] == "labels"
        assert manifest.parents["vectors"] == open_manifest(world.layout.embeddings(3, "labels")).digest

    def test_a_dump_without_label_texts_says_how_to_get_them(self, world):
        world.write_vectors(["queries"])
        with pytest.raises(InputError, match=r"no label embeddings.*extremis embed DATA RUN OUT --what labels"):
            mine(world.data, world.run, options=MineOptions(by="labels"))


class TestOtherTables:
    def test_previous_overlap_is_measured_against_the_table_before(self, world):
        first = mine(world.data, world.run)["queries"]
        assert "previous" not in first.quality
        world.epoch = 6
        world.vectors = world.vectors + 0.5 * np.random.default_rng(1).standard_normal((50, 6)).astype(np.float32)
        world.write_dump()
        second = mine(world.data, world.run)["queries"]
        tables = [
            read_negatives(world.layout.negatives(epoch, "queries"), m)[1] for epoch, m in ((5, first), (8, second))
        ]
        shares = [len({*a} & {*b}) / 5 for a, b in zip(*(label_ids.tolist() for label_ids in tables), strict=True)]
        assert second.quality["previous"] == first.digest
        assert second.quality["overlap_with_previous"] == pytest.approx(np.mean(shares))
        assert 0.1 < np.mean(shares) < 0.95

    def test_other_options_are_refused_and_replace_on_request(self, world):
        mine(world.data, world.run)
        url = world.layout.negatives(5, "queries")
        with pytest.raises(
            InputError,
            match=r"queries: contains a finished negatives .* made with other options \(width was 5, now it is 3\)",
        ):
            mine(world.data, world.run, options=MineOptions(width=3))
        with pytest.raises(InputError, match=r"other vectors; by was 'classifier', now it is 'labels'"):
            mine(world.data, world.run, options=MineOptions(by="labels"))
        assert open_manifest(url).parameters["width"] == 5
        mine(world.data, world.run, options=MineOptions(width=3, overwrite=True))
        assert open_manifest(url).parameters["width"] == 3
        Table.open(url).verify()

    def test_a_table_that_an_epoch_trains_on_is_not_replaced(self, world):
        manifest = mine(world.data, world.run)["queries"]
        body = {"epoch": 5, "table_epoch": 5, "digests": {"queries": manifest.digest}, "late": False}
        write_json(world.layout.adoption(5), body)
        options = MineOptions(width=3, overwrite=True)
        with pytest.raises(InputError, match="epoch 5 of this run trains on this table"):
            mine(world.data, world.run, options=options)
        assert open_manifest(world.layout.negatives(5, "queries")) == manifest
        write_json(world.layout.finished, {})
        assert mine(world.data, world.run, options=options)["queries"].parameters["width"] == 3


def test_the_command_line_takes_every_option(world):
    done = call(
        "mine", world.data, world.run, "--memory", "1GiB", "--width", 3, "--skip-top", 1, "--margin", 0.1, "--json"
    )
    assert done.status == 0, done.err
    facts = done.json["tables"]["queries"]
    assert facts["counters"]["skipped_top"] == 60
    assert "of its 1.0 GiB, with" in done.err
    refused(call("mine", world.data, world.run, "--memory", "100MiB"), "--memory 100.0MiB", "Give --memory")
    refused(call("mine", world.data, world.run, "--memory", "much"), "--memory: expected a number with a unit", "8GiB")
    refused(call("mine", world.data, world.run, "--width", 7), "made with other options", "--overwrite")
    refused(
        call("mine", world.data, world.run, "--target-recall", 2),
        "--target-recall",
        "expected a number less than or equal to 1",
    )
    refused(call("mine", world.data, world.run, "--watch", "--out", "x"), "--out")


PEAK = """
import sys
from pipelines.mine import mine, MineOptions
from schemas.process import peak_bytes
mine(sys.argv[1], sys.argv[2], options=MineOptions(index=sys.argv[3], memory=sys.argv[4], threads=1))
print(peak_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["exact", "IVF128,Flat", "IVF128,PQ32x4fs", "HNSW16"])
def test_a_run_stays_within_its_memory(tmp_path, spec):
    """The real process, at a budget that forces several blocks."""
    world = random_world(str(tmp_path), rows=2000, labels=60_000, dimension=64, shards=2, row_group_rows=1000)
    world.write_dump()
    budget = 390 << 20
    command = [sys.executable, "-c", PEAK, world.data, world.run, spec, str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(done.stdout) <= budget
    profile = json.loads(storage.read_bytes(join(world.layout.negatives_root, "epoch-0005", "spent.json")))
    assert 50 << 20 < profile["tables"]["queries"]["peak_bytes"] <= budget
    assert profile["estimated_bytes"] <= budget
    assert set(profile["tables"]["queries"]["seconds"]) >= {"read vectors", "build index", "search", "audit", "merge"}
