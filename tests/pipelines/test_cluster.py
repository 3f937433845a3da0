"""Queries in cluster order: the same rows, clusters equal within one, the same whatever makes it and however often."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import cluster as clustering
from pipelines.cluster import (
    _SAMPLE_GROUPS,
    _SAMPLE_ROWS,
    ClusterOptions,
    assign_parts,
    balanced_order,
    cluster,
    grow_tree,
    make_layout,
    open_clustering,
    watch,
)
from schemas import arrow, storage
from schemas.errors import InputError, StorageError, TableError
from schemas.layout import RunLayout
from schemas.manifest import Manifest, open_manifest
from schemas.options import check
from schemas.shard_files.parquet import matrix_array
from schemas.shard_files.shards import write_table
from schemas.storage import write_json
from schemas.table import Table
from tests.builders import SmallData, build_data
from tests.pipelines.watched import finish_at_second_look
from trainer.stream.sources import clusters_per_group

D, ROWS, SIZE = 6, 1203, 16


def embed_queries(data: SmallData, url: str, seed: int = 0, **fields: object) -> Manifest:
    """Publish embeddings [N, D] of the training queries, in groups, aligned with the table whose digest they name."""
    return write_embeddings(data.layout.queries("train"), url, seed, **fields)


def write_embeddings(queries_url: str, url: str, seed: int = 0, **fields: object) -> Manifest:
    queries = open_manifest(queries_url, "queries")
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((40, D))
    x = centres[draw.integers(0, 40, queries.rows)] + 0.3 * draw.standard_normal((queries.rows, D))
    x[:20] = x[0]  # some that are all the same
    schema = arrow.embeddings(D)
    shards, first = [], 0
    for shard in queries.shards:
        ids = pa.array(np.arange(first, first + shard.rows))
        vectors = matrix_array(x[first : first + shard.rows].astype(np.float16), pa.float16())
        shards.append(pa.Table.from_arrays([ids, vectors], schema=schema))
        first += shard.rows
    arguments = {"parents": {"queries": queries.digest}, "id_range": (0, queries.rows), **fields}
    return write_table(url, "embeddings", shards, queries.row_group_rows or 1, **arguments)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(
        str(tmp_path_factory.mktemp("cluster") / "data"), rows={"train": ROWS, "test": 20}, row_group_rows=64
    )


@pytest.fixture(scope="module")
def run(data: SmallData) -> str:
    """With a dump as a trainer leaves it."""
    run = RunLayout(str(Path(data.layout.root).parent / "run"))
    requested = {"epoch": 3, "use_from": 5, "step": 9, "clusters": {"size": SIZE, "smallest": 4}}
    embed_queries(data, run.embeddings(3, "queries"), parameters=requested)
    return run.root


def read(url: str) -> pa.Table:
    manifest = open_manifest(url, "queries")
    Table(url, manifest).verify()
    return pa.concat_tables(Table(url, manifest).batches())


def cluster_ids(manifest: Manifest) -> np.ndarray:
    """The cluster of each row, by what the manifest says alone."""
    rows = manifest.parameters["clusters"]["rows"]
    members, number = [], 0
    for shard in manifest.shards:
        for start in range(0, shard.rows, manifest.row_group_rows or 1):
            length = min(manifest.row_group_rows or 1, shard.rows - start)
            count = int(clusters_per_group(np.array([length]), rows, 0)[0])
            members.append(number + np.arange(length) * count // length)
            number += count
    return np.concatenate(members)


def vectors_of(url: str) -> np.ndarray:
    parts = [np.stack(group.column("vector").to_numpy(zero_copy_only=False)) for group in Table.open(url).batches()]
    return np.concatenate(parts).astype(np.float32)


@pytest.mark.parametrize("part_rows", [None, 400])
def test_the_table_is_the_queries_in_clusters_equal_within_one(
    data: SmallData, run: str, tmp_path: Path, part_rows: int | None
) -> None:
    out = str(tmp_path / "out")
    manifest = cluster(data.layout.root, run, options=ClusterOptions(out=out, part_rows=part_rows))
    source = open_manifest(data.layout.queries("train"))
    before, after = read(data.layout.queries("train")), read(out)
    assert after.schema == before.schema
    np.testing.assert_array_equal(after["query_id"], np.arange(ROWS))
    places = {key: row for row, key in enumerate(before["key"].to_pylist())}
    order = np.array([places[key] for key in after["key"].to_pylist()])
    assert sorted(order) == list(range(ROWS))
    kept = [name for name in before.column_names if name != "query_id"]
    assert after.select(kept).equals(before.take(pa.array(order)).select(kept))
    members = cluster_ids(manifest)
    sizes = np.bincount(members)
    assert sizes.max() == SIZE
    assert sizes.min() >= SIZE - 1
    assert len(sizes) == manifest.parameters["clusters"]["count"] == manifest.counters["clusters"]
    assert manifest.rows == ROWS
    assert manifest.parents["queries"] == source.digest
    # Row groups hold whole clusters.
    edges = np.flatnonzero(np.diff(members)) + 1
    starts = np.cumsum([0] + [shard.rows for shard in manifest.shards])[1:-1]
    assert set(starts) <= set(edges)
    # And clusters are of points near each other.
    x = vectors_of(RunLayout(run).embeddings(3, "queries"))[order]
    within = np.mean([x[members == index].var(0).sum() for index in np.unique(members)])
    assert within < 0.35 * x.var(0).sum()


@pytest.mark.parametrize("part_rows", [5000, 700, 400])
def test_split_by_the_top_of_the_tree_it_is_what_it_is_in_memory(
    data: SmallData, run: str, tmp_path: Path, part_rows: int
) -> None:
    options = ClusterOptions(out=str(tmp_path / "out"), part_rows=part_rows, seed=2)
    cluster(data.layout.root, run, options=options)
    keys = read(str(tmp_path / "out"))["key"].to_pylist()
    x = vectors_of(RunLayout(run).embeddings(3, "queries"))
    parts = {5000: 1, 700: 2, 400: 4}[part_rows]
    inputs = open_clustering(data.layout.root, run, None, options)
    sample = inputs.source.sample_queries(_SAMPLE_ROWS, 2, D, _SAMPLE_GROUPS)
    part = assign_parts(grow_tree(sample, parts, 2), x, 0)
    rows = [np.flatnonzero(part == index) for index in range(parts)]
    source = open_manifest(data.layout.queries("train"))
    layout = make_layout([len(some) for some in rows], SIZE, source.row_group_rows or 1, ROWS // len(source.shards), 2)
    expected = np.empty(ROWS, np.int64)
    for index, some in enumerate(rows):
        order, _ = balanced_order(x[some], SIZE, 4, 2)
        shard, place = layout.positions(index)
        expected[np.array([layout.first[s] for s in shard]) + place] = some[order]
    assert keys == read(data.layout.queries("train"))["key"].take(pa.array(expected)).to_pylist()


@pytest.fixture(scope="module")
def parted(data: SmallData, run: str, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Made in several parts, in this process."""
    out = str(tmp_path_factory.mktemp("parted"))
    return cluster(data.layout.root, run, options=ClusterOptions(out=out, part_rows=400, seed=1))


@pytest.mark.parametrize("flags", ["in process", "two processes"], indirect=True)
def test_the_bytes_are_the_same_on_every_runner(
    data: SmallData, run: str, tmp_path: Path, flags: tuple[str, ...], parted: Manifest
) -> None:
    out, threads = str(tmp_path / "out"), ("--direct_num_workers=2", "--direct_running_mode=multi_threading")
    options = ClusterOptions(out=out, part_rows=400, seed=1)
    assert cluster(data.layout.root, run, options=options, beam_options=flags or threads) == parted
    assert storage.list_names(out) == ["_manifest.json", *(shard.path for shard in parted.shards)]


def test_a_table_made_before_is_left_and_another_is_not_replaced(data: SmallData, run: str) -> None:
    place = RunLayout(run).clusters(5, "queries")
    first = cluster(data.layout.root, run)
    assert open_manifest(place) == first
    said: list[str] = []
    assert cluster(data.layout.root, run, progress=said.append) == first
    assert said == ["epoch 3: already clustered, for use from epoch 5"]
    with pytest.raises(InputError, match=r"size was 16, now it is 32.*overwrite=True"):
        cluster(data.layout.root, run, options=ClusterOptions(size=32))
    write_json(RunLayout(run).adoption(5), {"epoch": 5, "digests": {"queries": first.digest}})
    with pytest.raises(InputError, match="epoch 5 of this run trains on this table"):
        cluster(data.layout.root, run, options=ClusterOptions(size=32, overwrite=True))
    storage.remove(RunLayout(run).adoption(5))
    assert cluster(data.layout.root, run, options=ClusterOptions(size=32, overwrite=True)) != first
    storage.remove(RunLayout(run).clusters_root, recursive=True)


def test_embeddings_of_a_table_in_cluster_order_are_clustered_again(data: SmallData, run: str) -> None:
    layout = RunLayout(run)
    first = cluster(data.layout.root, run)
    requested = {"epoch": 8, "use_from": 10, "step": 30, "clusters": {"size": 32, "smallest": 4}}
    write_embeddings(layout.clusters(5, "queries"), layout.embeddings(8, "queries"), seed=1, parameters=requested)
    second = cluster(data.layout.root, run)
    assert second.parents["queries"] == first.parents["queries"] == open_manifest(data.layout.queries("train")).digest
    assert second.parents["order"] == first.digest
    assert second.parameters["clusters"]["size"] == 32
    keys = read(layout.clusters(10, "queries"))["key"].to_pylist()
    assert sorted(keys) == sorted(f"query {row}" for row in range(ROWS))
    storage.remove(layout.dump(8), recursive=True)
    storage.remove(layout.clusters_root, recursive=True)


def test_what_was_cut_off_is_invisible_and_made_again(
    data: SmallData, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = str(tmp_path / "out"), clustering.write_shard
    whole = cluster(data.layout.root, run, options=ClusterOptions(out=out))
    storage.remove(out, recursive=True)
    for step in (0, len(whole.shards) - 1):

        def failing(element: tuple, layout_plan: clustering.LayoutPlan, fail: int = step) -> object:
            if element[0] == fail:
                raise StorageError("the disk is full")
            return write(element, layout_plan)

        monkeypatch.setattr(clustering, "write_shard", failing)
        with pytest.raises(StorageError, match="the disk is full"):
            cluster(data.layout.root, run, options=ClusterOptions(out=out))
        with pytest.raises(TableError, match=r"no table here|unfinished"):
            open_manifest(out)
    monkeypatch.undo()
    assert cluster(data.layout.root, run, options=ClusterOptions(out=out)) == whole


def test_watching_makes_what_is_asked_for_once(data: SmallData, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_at_second_look(monkeypatch, run)
    assert watch(data.layout.root, run) == 1
    assert watch(data.layout.root, run) == 0
    storage.remove(RunLayout(run).finished)
    storage.remove(RunLayout(run).clusters_root, recursive=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": "PLAIN"}, r"queries needs a location for the table: give for_epoch=E or out=URL"),
        ({"queries": "PLAIN", "for_epoch": 0}, r"this run's recipe has no cluster size. Give size=C"),
        ({"size": 24, "smallest": 16}, r"smallest=16: clusters of 24 are halved"),
        ({"memory": 100 << 20}, r"memory=\"100.0MiB\": .*Give memory="),
        (
            {"queries": "OTHER", "for_epoch": 0, "size": 8},
            r"these embeddings belong to queries .*, but .*queries/train",
        ),
        ({"queries": "SPOILT", "for_epoch": 0, "size": 8}, r"vector of row 7 is not finite"),
    ],
)
def test_what_cannot_be_is_refused(
    data: SmallData, run: str, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    makers: dict[str, Callable[[str], object]] = {
        "PLAIN": lambda url: embed_queries(data, url),
        "OTHER": lambda url: embed_queries(data, url, parents={"queries": "0" * 64}),
        "SPOILT": lambda url: spoilt(data, url),
    }
    if options.get("queries") in makers:
        url = str(tmp_path / "embeddings")
        makers[str(options["queries"])](url)
        options = {**options, "queries": url}
    with pytest.raises(InputError, match=message):
        cluster(data.layout.root, run, options=check(ClusterOptions, options))


def spoilt(data: SmallData, url: str) -> None:
    queries = open_manifest(data.layout.queries("train"))
    x = np.ones((queries.rows, D), np.float16)
    x[7, 2] = np.nan
    edges = np.cumsum([0] + [shard.rows for shard in queries.shards])
    shards = [
        pa.Table.from_arrays(
            [pa.array(np.arange(low, high)), matrix_array(x[low:high], pa.float16())], schema=arrow.embeddings(D)
        )
        for low, high in itertools.pairwise(edges)
    ]
    write_table(url, "embeddings", shards, queries.row_group_rows or 1, parents={"queries": queries.digest})


def test_parts_too_small_for_equal_clusters_are_refused() -> None:
    assert make_layout([128, 63], 64, 64, 64, 0).full == (2, 0)
    with pytest.raises(InputError, match="size=64: a part of 37 queries is too small for clusters of 50 and 49"):
        make_layout([100, 37], 64, 64, 64, 0)


def test_a_run_without_a_dump_is_told_so(data: SmallData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no query embeddings to cluster. A run with order.cluster > 1"):
        cluster(data.layout.root, str(tmp_path))


# The pure parts


@given(st.integers(1, 300), st.integers(1, 4), st.integers(0, 3), st.integers(0, 4))
def test_every_part_of_the_tree_takes_its_share_of_the_sample(
    count: int, dimension: int, seed: int, levels: int
) -> None:
    sample = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    part = assign_parts(grow_tree(sample, 1 << levels, seed), sample, 0)
    sizes = np.bincount(part, minlength=1 << levels)
    assert sizes.sum() == count
    if levels == 1:
        assert sizes.max() - sizes.min() <= 1
    # A point finds its part alone.
    for start in range(0, count, 50):
        assert assign_parts(grow_tree(sample, 1 << levels, seed), sample[start : start + 1], start) == part[start]


def test_points_that_are_all_the_same_spread_over_the_parts() -> None:
    same = np.ones((800, 3), np.float32)
    sizes = np.bincount(assign_parts(grow_tree(same[:100], 8, 0), same, 0), minlength=8)
    np.testing.assert_array_equal(sizes, np.full(8, 100))


@given(st.integers(1, 400), st.integers(2, 20), st.integers(1, 40), st.integers(1, 100))
def test_a_layout_has_a_place_for_every_row_and_tells_where_clusters_are(
    count: int, size: int, group: int, shard: int
) -> None:
    layout = make_layout([count], size, group, shard, 0)
    shards, places = layout.positions(0)
    rows, sizes = layout.first[shards] + places, np.diff(layout.first).tolist()
    assert sorted(rows) == list(range(count))
    assert sizes == np.bincount(shards).tolist()
    assert layout.clusters == -(-count // size)
    starts = np.concatenate([np.arange(n) * layout.rows for n in [layout.full[0]]])
    tail = layout.full[0] * layout.rows + np.arange(layout.short[0]) * (layout.rows - 1)
    expected = {
        frozenset(rows[a : a + n].tolist())
        for edges, n in ((starts, layout.rows), (tail, layout.rows - 1))
        for a in edges
    }
    members, first = set(), 0
    for size in sizes:
        for low in range(0, size, layout.row_group_rows):
            length = min(layout.row_group_rows, size - low)
            number = int(clusters_per_group(np.array([length]), layout.rows, 0)[0])
            edges = first + low + np.arange(number + 1) * length // number
            members |= {frozenset(range(a, b)) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)}
        first += size
    assert members == expected


@given(st.integers(0, 150), st.integers(1, 16), st.integers(0, 4), st.integers(0, 2))
def test_the_order_has_the_clusters_and_their_halves_gather_near_points(
    count: int, size: int, halvings: int, seed: int
) -> None:
    x = np.random.default_rng(seed).integers(0, 4, (count, 3)).astype(np.float32)
    smallest = max(1, size >> halvings)
    order, starts = balanced_order(x, size, smallest, seed)
    assert sorted(order) == list(range(count))
    whole, edges = balanced_order(x, size, size, seed)
    assert starts.tolist() == edges.tolist()
    for low, high in itertools.pairwise(starts.tolist()):
        assert {*order[low:high].tolist()} == {*whole[low:high].tolist()}


def test_halves_of_a_cluster_are_nearer_than_its_rows_at_random() -> None:
    draw = np.random.default_rng(0)
    x = (draw.standard_normal((64, 8))[draw.integers(0, 64, 2048)] + 0.2 * draw.standard_normal((2048, 8))).astype(
        np.float32
    )
    order, _ = balanced_order(x, 128, 16)
    coarse, _ = balanced_order(x, 128, 128)
    spread = [float(x[some].reshape(-1, 16, 8).var(1).sum(1).mean()) for some in (order, coarse)]
    assert spread[0] < 0.5 * spread[1]


def test_row_groups_of_short_clusters_tell_how_many_they_hold() -> None:
    layout = make_layout([10 * 16 * 16 + 1] * 6, 16, 64, 4096, 0)  # 15 short ones of each part
    short = np.diff(layout.first[layout.first >= sum(layout.full) * 16])
    assert len(short)
    for rows in short:
        assert rows <= layout.row_group_rows
        assert clusters_per_group(np.array([rows]), 16, 0)[0] * 15 == rows
