import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pipelines.mine import MineOptions, mine, watch
from pipelines.mining.filters import pack_chunk, read_chunk, unpack_chunk, write_chunks
from pipelines.mining.inputs import equal_ranges
from pipelines.mining.search import find_unfinished
from schemas import owners, storage
from schemas.errors import ClaimedError, InputError, StorageError, TableError
from schemas.layout import RunLayout, phases
from schemas.manifest import open_manifest, unpublish
from schemas.shard_files.parquet import open_shard
from schemas.storage import join
from schemas.table import Table
from tests.owners import held_elsewhere
from tests.pipelines.mining.world import World, apart, brute_force, plan_of, random_rows, random_world, read_negatives
from tests.pipelines.watched import finish_at_second_look

ROOT = Path(__file__).parents[2]


def contents(url: str) -> dict[str, bytes]:
    return {name: storage.read_bytes(join(url, name)) for name in storage.list_names(url)}


@pytest.fixture
def world(tmp_path) -> World:
    made = random_world(str(tmp_path), rows=70, labels=40, dimension=6, with_labels=True)
    made.write_dump()
    return made


@settings(
    max_examples=12,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    labels=st.integers(1, 30),
    dimension=st.integers(1, 6),
    width=st.integers(1, 12),
    shards=st.integers(1, 3),
    row_group_rows=st.integers(1, 9),
    block_rows=st.integers(1, 30),
    tasks=st.integers(1, 4),
    query_batch=st.integers(1, 20),
    filtered=st.booleans(),
    ranges=st.integers(1, 3),
    together=st.integers(1, 4),
)
def test_a_row_holds_its_best_negatives_and_nothing_else(
    tmp_path,
    seed,
    rows,
    labels,
    dimension,
    width,
    shards,
    row_group_rows,
    block_rows,
    tasks,
    query_batch,
    filtered,
    ranges,
    together,
):
    """The law of a mined table, against brute force, in any number of blocks, of them in memory together, of passes.

    Small whole numbers make scores exact and ties common.
    """
    shutil.rmtree(tmp_path, ignore_errors=True)
    ranges = min(ranges, labels)
    generator = np.random.default_rng(seed)
    world = World(
        data=str(tmp_path / "data"),
        run=str(tmp_path / "run"),
        queries=generator.integers(-3, 4, (rows, dimension)),
        vectors=generator.integers(-3, 4, (labels, dimension)),
        positives=random_rows(generator, rows, labels, labels),
        filters=random_rows(generator, rows, labels, 4) if filtered else None,
        shards=shards,
        row_group_rows=row_group_rows,
        width=width,
        with_labels=True,
    )
    world.write_dump()
    options = MineOptions(
        block_rows=block_rows,
        tasks_per_block=tasks,
        query_batch=query_batch,
        audit_queries=7,
        ranges=ranges,
        index="exact",
    )
    options = apart(world, options, together)
    for source, manifest in mine(world.data, world.run, options=options).items():
        url = world.layout.negatives(world.epoch + 2, source)
        assert open_manifest(url, "negatives") == manifest
        Table(url, manifest).verify()
        ids, label_ids, scores = read_negatives(url, manifest)
        excluded = [
            [own | {*range(start)} | {*range(stop, labels)} for own in world.excluded(source)]
            for start, stop in equal_ranges(0, labels, ranges)
        ]
        expected = np.hstack([brute_force(world.scores(source), gone, width) for gone in excluded])
        assert ids.tolist() == list(range(len(expected)))
        assert label_ids.tolist() == expected.tolist()
        held = np.take_along_axis(world.scores(source), np.maximum(expected, 0), axis=1)
        assert (scores == np.where(expected < 0, -np.inf, held)).all()
        assert manifest.counters["rows"] == len(expected)
        assert manifest.counters["padded_rows"] == (expected < 0).any(axis=1).sum()
        assert manifest.quality["recall_at_k"] in (1.0, None)
    root = join(world.layout.negatives_root, f"epoch-{world.epoch + 2:04d}")
    assert storage.list_names(root) == ["labels", "queries", "spent.json"]


def test_a_table_is_aligned_with_its_queries(world):
    for source, manifest in mine(world.data, world.run).items():
        folder = {"queries": "queries/train", "labels": "labels"}[source]
        queries_url = join(world.data, folder)
        queries = open_manifest(queries_url)
        assert manifest.row_group_rows == queries.row_group_rows
        assert [shard.rows for shard in manifest.shards] == [shard.rows for shard in queries.shards]
        url = world.layout.negatives(world.epoch + 2, source)
        id_column = "label_id" if source == "labels" else "query_id"
        for shard, other_keys in zip(manifest.shards, queries.shards, strict=True):
            with open_shard(url, shard) as same_keys, open_shard(queries_url, other_keys) as points:
                assert same_keys.num_row_groups == points.num_row_groups > 1
                for group in range(same_keys.num_row_groups):
                    mined = same_keys.read_row_group(group).column("query_id")
                    assert mined.equals(points.read_row_group(group).column(id_column))


def test_the_manifest_tells_what_it_was_made_from(world):
    table = mine(world.data, world.run, options=MineOptions(width=3, block_rows=25))["queries"]
    layout = world.layout
    assert table.parents == {
        "queries": open_manifest(join(world.data, "queries/train")).digest,
        "embeddings": open_manifest(layout.embeddings(3, "queries")).digest,
        "vectors": open_manifest(layout.vectors(3)).digest,
    }
    expected = {"width": 3, "index": "exact", "epoch": 3, "step": 77, "use_from": 5, "block_rows": 25, "blocks": 2}
    assert {name: table.parameters[name] for name in expected} == expected
    assert {column.name: column.type for column in table.columns}["label_ids"] == "fixed_size_list<item: int32>[3]"
    assert world.run not in json.dumps(table.model_dump(mode="json"))


@pytest.mark.parametrize("index", ["exact", "IVF6,Flat"])
def test_the_same_input_gives_the_same_bytes(world, index):
    url = world.layout.negatives(5, "queries")
    options = MineOptions(index=index, block_rows=21, tasks_per_block=2)
    mine(world.data, world.run, options=options)
    first = contents(url)
    storage.remove(world.layout.negatives_root, recursive=True)
    mine(world.data, world.run, options=options)
    assert contents(url) == first


@pytest.mark.parametrize("index", ["exact", "IVF4,PQ3x4fs", "HNSW8"])
def test_passes_and_groups_change_no_byte(tmp_path, index):
    """An index that is read in a later pass finds what it found when it was built; margins meet all groups."""
    world = random_world(str(tmp_path), rows=90, labels=200, dimension=6, shards=5)
    world.write_dump()
    chosen = {"index": index, "block_rows": 60, "query_batch": 16, "ranges": 2, "margin": 0.1, "window": 12}
    url, tables, plans = world.layout.negatives(5, "queries"), [], []
    for memory in (1 << 32, apart(world, MineOptions(**chosen)).memory):
        options = MineOptions(**chosen, memory=memory)
        plans.append(plan_of(world, options))
        mine(world.data, world.run, options=options)
        tables.append(contents(url))
        storage.remove(world.layout.negatives_root, recursive=True)
    assert [(len(plan.groups), len(plan.passes(plan.source_shards))) for plan in plans] == [(1, 1), (4, 5)]
    assert tables[0] == tables[1]


@given(
    keys=npst.arrays(np.uint64, npst.array_shapes(min_dims=3, max_dims=3, max_side=5)),
    start=st.integers(0, 2**32 - 1),
)
def test_packing_loses_nothing(keys, start):
    assert (unpack_chunk(pack_chunk(keys, start), keys.shape, start) == keys).all()


def test_damaged_candidates_are_named(tmp_path):
    url, keys = str(tmp_path / "keys"), np.arange(24, dtype=np.uint64).reshape(1, 4, 6)
    chunks = write_chunks(url, 0, [keys, keys[:, :1]])
    assert (read_chunk(url, chunks, 1, 0) == keys[:, :1]).all()
    content = bytearray(Path(url).read_bytes())
    content[-1] ^= 1
    Path(url).write_bytes(content)
    assert (read_chunk(url, chunks, 0, 0) == keys).all()
    with pytest.raises(StorageError, match=r"keys after \d attempt.*are damaged"):
        read_chunk(url, chunks, 1, 0)
    Path(url).unlink()
    with pytest.raises(StorageError, match="this file of candidates is missing"):
        read_chunk(url, chunks, 1, 0)


def test_a_mining_that_was_cut_off_goes_on_from_its_finished_shards(tmp_path):
    """From all that are whole, and only with the same options."""
    world = random_world(str(tmp_path), rows=90, labels=60, dimension=6, shards=5)
    world.write_dump()
    options = apart(world, MineOptions(index="IVF4,Flat", block_rows=20, query_batch=16))
    mine(world.data, world.run, options=options)
    url = world.layout.negatives(5, "queries")
    whole, kept = contents(url), phases(str(Path(url).parent))

    storage.remove(world.layout.negatives_root, recursive=True)
    lines: list[str] = []

    def stop(line: str) -> None:
        if "pass 4 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine(world.data, world.run, options=options, progress=stop)
    assert not storage.exists(join(url, "_manifest.json"))
    assert not [path for path in Path(url).parent.rglob("*") if path.suffix == ".keys"]
    assert find_unfinished(plan_of(world, options)) == ([(0, 3), (0, 4)], 3)
    assert len(find_unfinished(plan_of(world, options.model_copy(update={"seed": 1})))[0]) == 5
    (first, second, _) = sorted(Path(kept).rglob("tables/queries/*.parquet"))
    first.write_bytes(first.read_bytes()[:-1])
    record = second.with_suffix(".record")
    record.write_bytes(record.read_bytes()[:-1])
    mine(world.data, world.run, options=options, progress=lines.append)
    assert "epoch 3: resuming, 1 of 5 shards are finished" in lines
    assert contents(url) == whole
    assert storage.list_names(str(Path(url).parent)) == ["queries", "spent.json"]


def test_recall_and_scores_are_measured_truthfully(tmp_path):
    """The audit of all rows equals figures computed here from the table and brute force."""
    world = random_world(str(tmp_path), rows=200, labels=300, dimension=8, width=10)
    world.write_dump()
    options = MineOptions(index="IVF20,Flat", nprobe=2, block_rows=150, target_recall=0.1)
    manifest = mine(world.data, world.run, options=options)["queries"]
    _, label_ids, _ = read_negatives(world.layout.negatives(5, "queries"), manifest)
    scores = world.scores("queries")
    expected = brute_force(scores, world.excluded("queries"), 10)
    recall = np.mean([len({*a} & {*b}) / 10 for a, b in zip(label_ids.tolist(), expected.tolist(), strict=True)])
    quality = manifest.quality
    assert quality["audit_queries"] == 200
    assert quality["recall_at_k"] == pytest.approx(recall)
    assert 0.2 < recall < 0.9
    hard = np.take_along_axis(scores, label_ids, axis=1)
    assert list(quality["score_quantiles"].values()) == pytest.approx(
        np.quantile(hard, [0.01, 0.1, 0.5, 0.9, 0.99]).tolist(), rel=1e-4
    )
    own = [scores[row, labels] for row, labels in enumerate(world.positives)]
    assert list(quality["positive_score_quantiles"].values()) == pytest.approx(
        np.quantile(np.concatenate(own), [0.01, 0.1, 0.5, 0.9, 0.99]).tolist(), rel=1e-4
    )
    above = [hard[row, 0] > line.min() for row, line in enumerate(own) if line.size]
    assert quality["top1_above_weakest_positive"] == pytest.approx(np.mean(above))
    assert all((row >= 0).all() and len({*row}) == 10 for row in label_ids)
    gone = zip(label_ids.tolist(), world.excluded("queries"), strict=True)
    assert not any(positives & {*row} for row, positives in gone)


def test_a_sample_measures_about_what_all_rows_do(tmp_path):
    world = random_world(str(tmp_path), rows=600, labels=200, dimension=8, width=10)
    world.write_dump()
    options = MineOptions(index="IVF16,Flat", nprobe=2, audit_queries=200, target_recall=0.1)
    sampled = mine(world.data, world.run, options=options)["queries"].quality
    storage.remove(world.layout.negatives_root, recursive=True)
    whole = mine(world.data, world.run, options=options.model_copy(update={"audit_queries": 600}))["queries"].quality
    assert (sampled["audit_queries"], whole["audit_queries"]) == (200, 600)
    assert sampled["recall_at_k"] == pytest.approx(whole["recall_at_k"], abs=0.06)
    assert sampled["recall_at_k"] != whole["recall_at_k"]


def test_what_is_mined_already_is_not_mined_again(world):
    lines: list[str] = []
    first = mine(world.data, world.run)
    before = Path(world.layout.negatives(5, "queries"), "_manifest.json").stat().st_mtime_ns
    assert mine(world.data, world.run, progress=lines.append) == first
    assert Path(world.layout.negatives(5, "queries"), "_manifest.json").stat().st_mtime_ns == before
    assert lines == ["epoch 3: already mined, for use from epoch 5"]
    # Only what is missing is made; what is there is left alone.
    unpublish(world.layout.negatives(5, "labels"))
    assert mine(world.data, world.run) == first
    assert Path(world.layout.negatives(5, "queries"), "_manifest.json").stat().st_mtime_ns == before
    # Another dump of the same epoch makes another table.
    world.vectors = world.vectors[::-1].copy()
    world.write_vectors(["queries", "labels"])
    second = mine(world.data, world.run)["queries"]
    assert second.parents["vectors"] != first["queries"].parents["vectors"]
    _, label_ids, _ = read_negatives(world.layout.negatives(5, "queries"), second)
    assert (label_ids == brute_force(world.scores("queries"), world.excluded("queries"), 5)).all()


def test_the_newest_complete_dump_is_the_default(world):
    world.epoch = 6
    world.write_dump(vectors=False)
    assert mine(world.data, world.run)["queries"].parameters["epoch"] == 3
    world.write_vectors(["queries", "labels"])
    assert mine(world.data, world.run)["queries"].parameters["epoch"] == 6


def test_the_loop_runs_on_an_object_store():
    world = random_world("memory://mine", rows=30, labels=20, dimension=4)
    world.write_dump()
    options = apart(world, MineOptions(block_rows=7, index="IVF2,Flat", nprobe=2))

    def stop(line: str) -> None:
        if "pass 2 of 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine(world.data, world.run, options=options, progress=stop)
    lines: list[str] = []
    manifest = mine(world.data, world.run, options=options, progress=lines.append)["queries"]
    assert "epoch 3: resuming, 1 of 2 shards are finished" in lines
    _, label_ids, _ = read_negatives(world.layout.negatives(5, "queries"), manifest)
    assert (label_ids == brute_force(world.scores("queries"), world.excluded("queries"), 5)).all()


class TestRefusals:
    def test_a_run_without_dumps(self, tmp_path):
        with pytest.raises(InputError, match=r"run/dumps: no complete dump to mine"):
            mine(str(tmp_path / "data"), str(tmp_path / "run"))

    def test_an_unfinished_dump(self, world):
        unpublish(world.layout.vectors(3))
        with pytest.raises(TableError, match=r"epoch-0003/vectors: unfinished table"):
            mine(world.data, world.run, epoch=3)
        with pytest.raises(InputError, match="no complete dump to mine"):
            mine(world.data, world.run)

    def test_a_source_that_is_not_finished(self, world):
        unpublish(world.layout.embeddings(3, "labels"))
        with pytest.raises(TableError, match=r"epoch-0003/labels: unfinished table"):
            mine(world.data, world.run, epoch=3)

    def test_a_run_of_other_data(self, world, tmp_path):
        other = random_world(str(tmp_path / "other"), rows=70, labels=40, dimension=6, seed=1)
        other.write_data()
        message = r"epoch-0003/queries: this embeddings table was built from a queries table .*other/data/queries"
        with pytest.raises(TableError, match=message):
            mine(other.data, world.run)

    def test_embeddings_in_other_row_groups(self, world):
        parents = world.write_data()
        world.row_group_rows = 5
        world.write_dump(parents)
        with pytest.raises(TableError, match=r"not aligned with .*queries/train.*row groups of 5, expected"):
            mine(world.data, world.run)

    def test_embeddings_of_another_width(self, world):
        world.vectors = np.ones((40, 9), np.float32)
        world.write_vectors(["queries"])
        with pytest.raises(TableError, match=r"embeddings of 6 dimensions, but the vectors at .* have 9"):
            mine(world.data, world.run)

    def test_a_diverged_training(self, world):
        world.queries[33] = np.nan
        world.write_dump()
        with pytest.raises(TableError, match=r"epoch-0003/queries: the vector of row 33 is not finite"):
            mine(world.data, world.run)
        assert not storage.exists(join(world.layout.negatives(5, "queries"), "_manifest.json"))

    def test_a_damaged_shard_of_the_dump(self, world):
        shard = Path(world.layout.vectors(3), "part-00001-of-00002.parquet")
        shard.write_bytes(shard.read_bytes()[:-9])
        with pytest.raises(TableError, match=r"part-00001-of-00002.parquet: damaged"):
            mine(world.data, world.run)

    def test_an_index_that_cannot_be_built_on_a_worker(self, world):
        with pytest.raises(InputError, match="index 'IVF4096,Flat' cannot be built on a block of 40 vectors"):
            mine(world.data, world.run, options=MineOptions(index="IVF4096,Flat"))

    def test_no_width_anywhere(self, world):
        world.write_vectors(["queries"], table_width=None)
        with pytest.raises(InputError, match=r"the number of negatives K is unknown\. Give width=K"):
            mine(world.data, world.run)


MINE = "import sys; from pipelines.mine import mine, MineOptions; print('ready', flush=True); " + (
    "mine(sys.argv[1], sys.argv[2], options=MineOptions(block_rows=40, query_batch=16))"
)


@pytest.mark.slow
def test_a_killed_miner_leaves_no_half_table_and_the_next_try_makes_the_whole(tmp_path):
    world = random_world(str(tmp_path), rows=1500, labels=120, dimension=8, with_labels=True, row_group_rows=64)
    world.write_dump()
    options = MineOptions(block_rows=40, query_batch=16)
    started = time.monotonic()
    mine(world.data, world.run, options=options)
    seconds = time.monotonic() - started
    urls = [world.layout.negatives(5, source) for source in ("queries", "labels")]
    whole = [contents(url) for url in urls]
    storage.remove(world.layout.negatives_root, recursive=True)
    for share in (0.2, 0.5, 0.8):
        child = subprocess.Popen([sys.executable, "-c", MINE, world.data, world.run], stdout=subprocess.PIPE, cwd=ROOT)
        child.stdout.readline()
        time.sleep(share * seconds)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        for url, expected in zip(urls, whole, strict=True):
            if "_manifest.json" in storage.list_names(url):
                assert contents(url) == expected
    mine(world.data, world.run, options=options)
    assert [contents(url) for url in urls] == whole


class TestWatch:
    def test_dumps_are_mined_as_they_appear_until_the_run_is_finished(self, world):
        lines: list[str] = []
        result: list[int] = []
        watching = threading.Thread(target=lambda: result.append(watch(world.data, world.run, progress=lines.append)))
        watching.start()
        self.wait_for(world.layout.negatives(5, "queries"))
        world.epoch = 8
        world.write_dump(vectors=False)
        time.sleep(0.2)
        assert not storage.exists(join(world.layout.negatives(10, "queries"), "_manifest.json"))
        world.write_vectors(["queries", "labels"])
        self.wait_for(world.layout.negatives(10, "queries"))
        storage.write_bytes(RunLayout(world.run).finished, b"{}")
        watching.join(timeout=60)
        assert result == [2]
        named = [line.split(":")[0] for line in lines if line.startswith("epoch ")]
        assert list(dict.fromkeys(named)) == ["epoch 3", "epoch 8"]
        assert len([line for line in lines if line.startswith("steps: ")]) == 2

    def test_what_is_mined_is_not_mined_again_but_a_new_dump_of_that_epoch_is(self, world, monkeypatch):
        mine(world.data, world.run)
        finish_at_second_look(monkeypatch, world.run)
        assert watch(world.data, world.run) == 0
        world.vectors = -world.vectors
        world.write_vectors(["queries", "labels"])
        assert watch(world.data, world.run) == 1

    def test_a_dump_that_another_process_mines_is_left_to_it(self, world, monkeypatch):
        """And its tables are taken for its own when they are there."""
        monkeypatch.setattr(owners, "BEAT_SECONDS", 0.1)
        root = str(Path(world.layout.negatives(5, "queries")).parent)
        finish_at_second_look(monkeypatch, world.run)
        with held_elsewhere(root):
            with pytest.raises(ClaimedError, match="being mined by process"):
                mine(world.data, world.run)
            assert watch(world.data, world.run) == 0
        storage.remove(RunLayout(world.run).finished)
        assert mine(world.data, world.run).keys() == {"queries", "labels"}

    @staticmethod
    def wait_for(url: str) -> None:
        limit = time.monotonic() + 60
        while not storage.exists(join(url, "_manifest.json")):
            assert time.monotonic() < limit, f"no table at {url}"
            time.sleep(0.02)
