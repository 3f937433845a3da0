"""Shares of a split by the hash of the key: as brute force finds them; through the order, the stream, and a run."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError, TableError
from schemas.hashing import hash_strings
from schemas.layout import RunLayout
from schemas.manifest import Manifest, publish
from schemas.shard_files import shards as shard_files
from schemas.shard_files.parquet import list_column
from schemas.shard_files.shards import Sink, write_table
from schemas.shares import ALL_ROWS, RowShare, seed_of
from schemas.table import Table
from tests.builders import SmallData, build_data, in_hash_order
from tests.laws import assert_exact_resume, assert_same_global_batches, batch_rows
from tests.training import assert_resumes, silent, train, with_sections
from trainer.checkpoints import latest_checkpoint
from trainer.evaluation.evaluate import HOLDOUT, SplitScorer, open_split
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import Model, load_model
from trainer.stream import JoinedStream, open_queries, open_sources
from trainer.stream.order import EpochOrder

SHARES = st.one_of(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]), st.floats(0, 1))


def place_of(table: Table) -> np.ndarray:
    """The place of each row's key among the hashes that a whole split has, in [0, 1)."""
    keys = [key for group in table.batches(["key"]) for key in group["key"].to_pylist()]
    return (hash_strings(pa.array(keys, pa.string()), seed_of(table)) >> np.uint64(32)).astype(np.float64) / 2**32


def ids_of(part: RowShare, table: Table) -> list[int]:
    """Ids of the rows of a share, from all keys."""
    place = place_of(table)
    return np.flatnonzero((place >= part.start) & (place < part.stop)).tolist()


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A table of a version: parts of any sizes and numbers of shards, some without rows, and some keys in two parts."""
    keys, parts, shards = st.integers(0, 400), list[dict[str, Any]](), list[pa.Table]()
    for number in range(draw(st.integers(1, 3))):
        some = np.array(
            [f"k{key}" for key in draw(st.sets(keys, max_size=draw(st.sampled_from([0, 3, 40, 200]))))], object
        )
        hashes, count = hash_strings(pa.array(some, pa.string()), 0), draw(st.integers(1, 4))
        order, first = np.argsort(hashes, kind="stable"), len(shards)
        for shard in range(count):
            mine = order[(hashes % np.uint64(count))[order] == shard]
            if len(mine):
                rows = {"query_id": pa.array(np.arange(len(mine))), "key": pa.array(some[mine], pa.string())}
                shards.append(pa.table(rows))
        if len(shards) > first:
            parts.append({"name": f"p{number}", "first": first, "stop": len(shards)})
    shards = shards or [pa.table({"query_id": pa.array([], pa.int64()), "key": pa.array([], pa.string())})]
    rows = [sum(shard.num_rows for shard in shards[part["first"] : part["stop"]]) for part in parts]
    stated = [{**part, "table": ".", "digest": "", "rows": count} for part, count in zip(parts, rows, strict=True)]
    publish("memory://shares", Manifest(kind="data"))
    url, groups = "memory://shares/queries/train", draw(st.integers(1, 50))
    write_table(url, "queries", shards, groups, draw(st.sampled_from(SINKS)), parameters={"parts": stated})
    return Table.open(url)


SINKS: tuple[Sink, ...] = ("parquet", "webdataset")


@given(tables(), st.lists(SHARES, max_size=3))
def test_shares_are_the_rows_whose_keys_hash_into_the_range(table: Table, shares: list[float]) -> None:
    edges = [0.0, *sorted(shares), 1.0]
    parts = [RowShare(*edge) for edge in itertools.pairwise(edges)]
    for part in parts:
        assert part.ids(table).tolist() == ids_of(part, table)
        assert part.rows(table) == len(ids_of(part, table))
    assert sorted(itertools.chain(*(part.ids(table).tolist() for part in parts))) == list(range(table.rows))


@given(tables(), SHARES, SHARES, st.integers(0, 100))
def test_a_budget_is_allotted_to_the_parts_in_proportion(table: Table, one: float, other: float, limit: int) -> None:
    part = RowShare(*sorted((one, other)))
    every, taken = part.ids(table), part.ids(table, limit)
    assert len(taken) == min(limit, len(every))
    edges = np.cumsum([0, *([each.rows for each in table.parts] or [table.rows])])
    whole, some = (np.histogram(ids, edges)[0] for ids in (every, taken))
    assert (np.abs(some - len(taken) * whole / max(1, len(every))) <= 1).all()
    for low, high in itertools.pairwise(edges.tolist()):  # of each part the beginning
        mine = [ids[(ids >= low) & (ids < high)].tolist() for ids in (taken, every)]
        assert mine[0] == mine[1][: len(mine[0])]
    read = [key for group in part.batches(table, ["key"], limit) for key in group["key"].to_pylist()]
    keys = [key for group in table.batches(["key"]) for key in group["key"].to_pylist()]
    assert read == [keys[row] for row in taken]
    costs = np.arange(len(every)) % 7 + 1.0
    count = part.fitting(table, costs, limit)
    assert costs[np.isin(every, part.ids(table, count))].sum() <= limit
    assert count == len(every) or costs.sum() > limit


@given(st.floats(0.001, 0.5), st.floats(0.01, 1))
def test_no_share_that_is_left_reaches_into_what_is_held_out(holdout: float, share: float) -> None:
    options = Recipe.model_validate({"data": {"holdout": holdout, "share": share}}).data
    assert options.training_rows.start == 0
    assert options.training_rows.stop <= options.held_out_rows.start < options.held_out_rows.stop == 1


def test_a_table_in_another_order_is_refused(data: SmallData) -> None:
    table = open_queries(data.layout, "train")
    shards = [rows.sort_by([("key", "descending")]) for rows in [table.read()]]
    write_table("memory://part/sorted/queries/train", "queries", shards, 7)
    publish("memory://part/sorted", Manifest(kind="data"))
    with pytest.raises(TableError, match=r"not in the order of the hashes of their keys.*Shard the data again"):
        RowShare(0.5, 1.0).rows(Table.open("memory://part/sorted/queries/train"))


def test_few_row_groups_are_read_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = pa.array([f"key {i}" for i in range(20_000)])
    table = in_hash_order(pa.table({"query_id": pa.array(np.arange(20_000)), "key": keys}))
    publish("memory://few", Manifest(kind="data"))
    write_table("memory://few/queries/train", "queries", [table], 100)
    read, original = list[int](), shard_files.read_group
    monkeypatch.setattr(shard_files, "read_group", lambda file, *rest: read.append(rest[0]) or original(file, *rest))
    opened = Table.open("memory://few/queries/train")
    for _ in range(2):
        assert RowShare(0.0, 0.9).rows(opened) + RowShare(0.9, 1.0).rows(opened) == 20_000
    assert len(read) <= 9  # of 200 row groups


@st.composite
def orders(draw: st.DrawFn) -> tuple[EpochOrder, list[int]]:
    """An order over some rows of each row group, and the ids of the rows that it deals."""
    sizes = np.array(draw(st.lists(st.integers(1, 9), min_size=1, max_size=16)), np.int64)
    dealt = np.array([sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in sizes.tolist()])
    streams = draw(st.sampled_from([1, 2, 4]))
    order = EpochOrder(
        sizes,
        streams * draw(st.integers(1, 5)),
        streams,
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2**63)),
        draw(st.integers(0, 9)),
        dealt=dealt,
    )
    first = first_rows(sizes).tolist()
    return order, [
        start + row for start, (low, high) in zip(first, dealt.tolist(), strict=False) for row in range(low, high)
    ]


def first_rows(group_rows: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)


@given(orders(), st.sampled_from([1, 2, 4]))
def test_an_epoch_deals_each_row_of_the_part_once_and_no_other(case: tuple[EpochOrder, list[int]], ranks: int) -> None:
    order, rows = case
    first, ranks = first_rows(order.group_rows), min(ranks, order.streams)
    each = order.streams // ranks
    for epoch in (order.epoch, order.epoch + 1):
        of_epoch = replace(order, epoch=epoch)
        assert of_epoch.rows == len(rows)
        parts = [
            batch_rows(of_epoch, step, range(rank * each, (rank + 1) * each), first)
            for step in range(of_epoch.steps)
            for rank in range(ranks)
        ]
        dealt = np.concatenate([*parts, np.empty(0, np.int64)])
        assert sorted(dealt.tolist()) == rows


HELD_OUT: dict[str, Any] = {
    "data": {"holdout": 0.2, "label_texts": True},
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 4, "buckets": 64, "dropout": 0.1, "residual": True},
    "negatives": {"random": 6},
    "train": {"epochs": 3},
    "checkpoint": {"every_steps": 3, "keep": 3},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://part/data")


def stream_of(data: SmallData, part: RowShare, **options: Any) -> JoinedStream:
    sources = open_sources(data.layout, "train", label_texts=True, share=part)
    return JoinedStream(sources, data.labels, batch=16, streams=8, window_groups=2, seed=5, **options)


def test_a_stream_reads_the_part_and_the_label_texts_on_any_ranks(data: SmallData) -> None:
    part, queries = RowShare(0.1, 0.8), len(data.points["train"].tokens)
    batches = assert_same_global_batches(
        lambda rank, ranks, threads: list(stream_of(data, part, rank=rank, ranks=ranks, threads=threads))
    )
    expected = [*ids_of(part, open_queries(data.layout, "train")), *range(queries, queries + data.labels)]
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == expected


def test_a_stream_of_a_part_resumes_at_every_step_and_refuses_another_part(data: SmallData) -> None:
    assert len(assert_exact_resume(lambda: stream_of(data, RowShare(0.0, 0.6)))) > 3
    state = stream_of(data, RowShare(0.0, 0.6)).state_dict()
    for other in (RowShare(0.0, 0.7), ALL_ROWS):
        with pytest.raises(InputError, match="cannot resume the stream"):
            stream_of(data, other).load_state_dict(state)


def read(data: SmallData, part: RowShare, limit: int | None = None) -> list[int]:
    table = open_queries(data.layout, "train")
    groups = part.batches(table, ["query_id"], limit)
    return [row for group in groups for row in group["query_id"].to_pylist()]


def test_a_part_is_read_in_the_order_of_storage(data: SmallData) -> None:
    for part in (ALL_ROWS, RowShare(0.0, 0.3), RowShare(0.3, 0.9), RowShare(0.5, 0.5)):
        expected = ids_of(part, open_queries(data.layout, "train"))
        assert read(data, part) == expected
        for limit in (0, 1, 7, 1000):
            assert read(data, part, limit) == expected[:limit]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Watch the row ids of all batches; the function returns those so far."""
    rows: set[int] = set()
    original = JoinedStream.__iter__

    def iterate(self: JoinedStream) -> Iterator[Any]:
        for batch in original(self):
            rows.update(batch.rows.tolist())
            yield batch

    monkeypatch.setattr(JoinedStream, "__iter__", iterate)
    return lambda: rows


def recipe(**sections: dict) -> Recipe:
    return with_sections(HELD_OUT, sections)


@pytest.mark.parametrize("share", [1.0, 0.79, 0.3])
def test_a_run_never_trains_on_what_it_holds_out_and_scores_exactly_that(
    data: SmallData, share: float, watched: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = recipe(data={"share": share})
    run = f"memory://part/{share}"
    reports: list[dict[str, float]] = []
    trainer = Trainer.start(data.layout.root, run, options, silent)
    train(trainer, on_epoch=lambda report: reports.append(report.metrics))
    queries, table = len(data.points["train"].tokens), open_queries(data.layout, "train")
    held_out = ids_of(RowShare(0.8, 1.0), table)
    trained = {row for row in watched() if row < queries}
    assert trained == {*ids_of(RowShare(0.0, min(share, 0.8)), table)}
    assert not trained & {*held_out}
    assert {row - queries for row in watched() if row >= queries} == {*range(data.labels)}
    # Validated on them without a split named.
    assert all("P@1" in metrics for metrics in reports)
    table, part = open_split(data.layout, HOLDOUT, options.data)
    columns = ["query_id", "label_ids"]
    rows = list(part.batches(table, columns))
    assert [row for group in rows for row in group["query_id"].to_pylist()] == held_out
    _, model, _ = load_model(data.layout, trainer.run)
    scored: list[list[int]] = []
    embed = Model.embed_table
    monkeypatch.setattr(Model, "embed_table", lambda self, some: scored.append(tokens_of(some)) or embed(self, some))
    scores = SplitScorer.open(data.layout, model, HOLDOUT, training_data=options.data).score()
    assert scores.queries == len(held_out)
    assert list(itertools.chain(*scored)) == [data.points["train"].tokens[row] for row in held_out]
    assert scores.metrics.result()["P@1"] == pytest.approx(reports[-1]["P@1"])
    with pytest.raises(InputError, match=r"trains on all rows of train.*data\.holdout.: 0\.02"):
        SplitScorer.open(data.layout, model, HOLDOUT)


def tokens_of(rows: Any) -> Any:
    values, offsets = list_column(rows, "input_ids")
    return [values[low:high].tolist() for low, high in itertools.pairwise(offsets)]


@pytest.mark.parametrize("stop", [2, 7])
def test_a_run_that_holds_out_rows_goes_on_to_the_same_bits(data: SmallData, stop: int) -> None:
    whole, cut = f"memory://part/whole-{stop}", f"memory://part/cut-{stop}"
    straight = Trainer.start(data.layout.root, whole, recipe(), silent)
    losses = train(straight)
    assert assert_resumes(data.layout.root, cut, recipe(), losses, stop) >= len(losses) - stop
    assert latest_checkpoint(RunLayout(cut)).table.shards == latest_checkpoint(straight.run).table.shards


@pytest.mark.parametrize(
    "options",
    [
        {"data": {"holdout": 0.1, "mix": {"train": 1.0}}},
        {"data": {"share": 0.5, "mix": {"train": 1.0}}},
        {"method": "ngame", "data": {"holdout": 0.1}, "order": {"cluster": 8}},
    ],
    ids=str,
)
def test_what_has_no_part_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"leave out data\.holdout|leave them out"):
        Recipe.model_validate(options)
