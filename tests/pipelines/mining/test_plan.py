import pytest

from pipelines.mining.inputs import EmbeddedSource, MineInputs
from pipelines.mining.plan import make_plan
from pipelines.options import MineOptions
from schemas import arrow
from schemas.errors import InputError
from schemas.manifest import Manifest, Shard, columns_of
from schemas.options import check
from schemas.table import Table

GIB = 1 << 30


def table(kind: str, rows: int, **fields) -> Manifest:
    shard = Shard(path="part-00000-of-00001.parquet", rows=rows, bytes=0, sha256="0" * 64)
    return Manifest(kind=kind, rows=rows, row_group_rows=1 << 14, shards=(shard,), **fields)


def inputs(labels: int, queries: int, dimension: int = 64, width: int | None = 50) -> MineInputs:
    vectors = Table("run/vectors", table("vectors", labels, columns=columns_of(arrow.vectors(dimension))))
    sources = [
        EmbeddedSource(name, Table(f"data/{name}", table(name, rows)), Table(f"run/{name}", table("embeddings", rows)))
        for name, rows in (("queries", queries), ("labels", min(labels, queries)))
    ]
    return MineInputs(
        "classifier",
        tuple(sources),
        vectors,
        False,
        3,
        5,
        "run/negatives/5",
        {"table_width": width},
    )


def plan(labels: int, queries: int, dimension: int = 64, **options):
    return make_plan(inputs(labels, queries, dimension), check(MineOptions, options), {})


@pytest.mark.parametrize("memory", [GIB, 4 * GIB, 8 * GIB])
@pytest.mark.parametrize("index", ["auto", "exact", "IVF4096,Flat", "IVF4096,PQ32x4fs", "HNSW32"])
def test_blocks_and_batches_follow_from_the_memory(memory, index):
    """The largest that the estimate allows; and neither N nor L changes what a worker needs."""
    small, large = (plan(n, 3 * n, index=index, memory=memory) for n in (15_000_000, 120_000_000))
    for whole_plan in (small, large):
        assert whole_plan.estimate.total <= memory
        assert whole_plan.batch >= 64
        assert sum(stop - start for start, stop in whole_plan.bounds) == whole_plan.inputs.labels
        assert max(stop - start for start, stop in whole_plan.bounds) <= whole_plan.block_rows
    assert len(large.bounds) > 1
    assert large.estimate.total > 0.85 * memory


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 250 << 20}, ['memory="250.0MiB"', "need", "Give memory=", "or more"]),
        ({"memory": GIB, "block_rows": 10_000_000}, ["blocks of 6,000,000 vectors", "smaller block_rows"]),
        ({"memory": GIB, "query_batch": 10**6}, ["1,000,000 queries at a time", "queries"]),
    ],
)
def test_a_plan_that_cannot_fit_says_what_it_needs(options, words):
    with pytest.raises(InputError) as refusal:
        plan(12_000_000, 10**7, **options)
    for word in words:
        assert word in str(refusal.value)
    needed = str(refusal.value).split('Give memory="')[1].split('" or more')[0]
    assert plan(12_000_000, 10**7, **{**options, "memory": needed}).inputs.labels == 12_000_000


@pytest.mark.parametrize("options", [{}, {"index": "exact"}, {"index": "IVF4096,Flat"}, {"ranges": 3}, {"margin": 0.1}])
@pytest.mark.parametrize("memory", [GIB, 4 * GIB, 64 * GIB])
def test_scratch_is_no_more_than_the_table_in_the_fewest_passes(options, memory):
    """As the formula counts; indexes that alone are more than half of it leave half to the candidates."""
    rows = 300_000_000
    made = plan(120_000_000, rows, memory=memory, **options)
    needs, passes = made.needs(rows), -(-rows // made.pass_rows(rows))
    tables, candidates, indexes = (needs.get(what, 0) for what in ("tables", "candidates", "indexes"))
    assert (candidates == 0) is made.has_one_group
    assert candidates + indexes <= max(tables, tables / 2 + indexes)
    assert 1.01 * candidates * passes >= rows * made.row_bytes
    if passes > 1:
        fewer = -(-rows // (passes - 1)) * made.row_bytes
        assert fewer + indexes > tables


def test_few_rows_are_one_pass_rather_than_that_all_vectors_are_read_again():
    made = plan(100_000_000, 200_000, memory=4 * GIB)
    assert not made.has_one_group
    assert 200_000 * made.row_bytes > made.table_bytes(200_000)
    assert made.pass_rows(200_000) == 200_000


def test_blocks_are_in_memory_together_as_far_as_they_fit():
    for gib in (2, 4, 16):
        made = plan(50_000_000, 10**6, index="exact", memory=gib * GIB, block_rows=1_000_000, query_batch=1024)
        sizes = [stop - first for first, stop in made.groups]
        assert sum(sizes) == 50
        assert max(sizes) - min(sizes) <= 1
        assert made.estimate.total <= gib * GIB
        larger = -(-50 // (len(sizes) - 1)) if len(sizes) > 1 else 51
        assert made.has_one_group or made.estimate.total + (larger - max(sizes)) * 4 * 64 * 10**6 > gib * GIB


def test_label_ranges_are_cut_into_blocks_of_their_own():
    made = plan(1000, 10, ranges=3, block_rows=120)
    assert made.parameters()["ranges"] == [[0, 333], [333, 666], [666, 1000]]
    assert made.columns == 150
    assert made.range_of == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert [made.bounds[i] for i in (0, 2, 3, 8)] == [(0, 111), (222, 333), (333, 444), (888, 1000)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 40}, r"window=40: the ranks \[0, 40\) are fewer than K=50.*window=50 or more"),
        ({"skip_top": 10, "window": 55}, r"window=60 or more"),
        ({"ranges": 2000}, "expected at most 1000, the number of labels"),
        ({"index": "NOPE"}, "index 'NOPE' cannot be built"),
        ({"memory": "8 apples"}, "memory: expected a number with a unit, .* got '8 apples'"),
        ({"margin": -1}, "margin: .*greater than or equal to 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        plan(1000, 10, **options)


@pytest.mark.parametrize(
    ("text", "expected"), [("8GiB", 8 << 30), ("500MB", 500_000_000), (" 1.5 gib ", 3 << 29), ("4096", 4096)]
)
def test_sizes_are_read(text, expected):
    assert check(MineOptions, {"memory": text}).memory == expected
