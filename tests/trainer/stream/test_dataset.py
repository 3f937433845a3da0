"""The joined stream against a plain reading of the tables, for any threads and ranks, and at every step."""

import gc
import itertools
import re
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.manifest import open_manifest
from schemas.ragged import offsets_of
from schemas.shard_files.shards import Sink
from schemas.storage import join
from tests.builders import Rows, SmallData, build_data, build_negatives, value_of, write_negatives
from tests.laws import (
    assert_equal,
    assert_every_row_once,
    assert_exact_resume,
    assert_no_thread_is_left,
    assert_same_global_batches,
    batch_rows,
)
from trainer.input_kinds import InputKind
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import Batch, JoinedStream, Source, open_sources
from trainer.stream.row_groups import RowGroups
from trainer.stream.window import Decoding, Window

THREAD = "extremis-stream"
FORMS: list[tuple[str, Sink, InputKind]] = [
    ("local", "parquet", "tokens"),
    ("memory", "parquet", "features"),
    ("local", "webdataset", "both"),
    ("memory", "webdataset", "tokens"),
]


@dataclass
class World:
    """DATA, the sources over it joined with a table for the queries only, and all rows end to end."""

    data: SmallData
    sources: list[Source]
    tokens: Rows
    positives: Rows
    hard: np.ndarray
    features: Rows
    inputs: InputKind

    def stream(self, sources: list[Source] | None = None, **options) -> JoinedStream:
        options = {
            "batch": 16,
            "streams": 8,
            "window_groups": 2,
            "seed": 5,
            "threads": 0,
            "inputs": self.inputs,
            **options,
        }
        return JoinedStream(sources or self.sources, self.data.labels, **options)


@pytest.fixture(params=FORMS, ids=" ".join, scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    place, sink, inputs = request.param
    root = str(tmp_path_factory.mktemp("data")) if place == "local" else f"memory://stream/{sink}"
    return make(join(root, "data"), join(root, "negatives"), sink, inputs)


@pytest.fixture(scope="module")
def one() -> World:
    """A world of one form, for what is the same in all of them."""
    return make("memory://stream/one/data", "memory://stream/one/negatives")


def make(root: str, negatives: str, sink: Sink = "parquet", inputs: InputKind = "tokens") -> World:
    data = build_data(root, sink=sink, features=25, with_tokens=inputs != "features")
    queries, labels = open_sources(data.layout, "train", label_texts=True, inputs=inputs)
    points = data.points["train"]
    hard = build_negatives(negatives, queries.table.manifest, points.positives, data.labels, 4)
    return World(
        data,
        [queries.with_negatives(negatives), labels],
        points.tokens + data.label_points.tokens,
        points.positives + data.label_points.positives,
        np.concatenate([hard, np.full((data.labels, 4), -1)]),
        points.features + data.label_points.features,
        inputs,
    )


def test_a_batch_is_the_rows_that_the_order_names_read_one_by_one(world: World) -> None:
    stream = world.stream()
    batches = list(stream)
    assert len(batches) == len(stream) == stream.steps
    assert_every_row_once([batch.rows for batch in batches], len(world.tokens))
    first_row = offsets_of(stream.order.group_rows)
    for step, batch in enumerate(batches):
        assert (batch.epoch, batch.step) == (0, step)
        np.testing.assert_array_equal(batch.rows, batch_rows(stream.order, step, range(8), first_row))
        if world.inputs != "features":
            assert lists(*batch.inputs.tokens) == [world.tokens[row] for row in batch.rows]
        if world.inputs != "tokens":
            ids, values, offsets = batch.inputs.features
            assert lists(ids, offsets) == [world.features[row] for row in batch.rows]
            assert lists(values, offsets) == [value_of(world.features[row]) for row in batch.rows]
        assert lists(batch.positives, batch.positive_offsets) == [world.positives[row] for row in batch.rows]
        np.testing.assert_array_equal(batch.hard, world.hard[batch.rows])


@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_ranks_and_threads_change_nothing(world: World, tail: str) -> None:
    whole = assert_same_global_batches(
        lambda rank, ranks, threads: world.stream(rank=rank, ranks=ranks, threads=threads, tail=tail)
    )
    assert len(whole) == world.stream(tail=tail).steps > 3


@pytest.mark.parametrize("threads", [0, 2])
def test_resume_is_exact_at_every_step(world: World, threads: int) -> None:
    def in_epoch_3() -> JoinedStream:
        stream = world.stream(threads=threads)
        stream.set_epoch(3)
        return stream

    elements = assert_exact_resume(in_epoch_3)
    assert len(elements) == in_epoch_3().steps > 3


@pytest.mark.parametrize("threads", [0, 2])
def test_a_window_goes_with_its_last_batch_and_waits_for_no_garbage_collection(one: World, threads: int) -> None:
    gc.collect()
    gc.disable()
    try:
        stream = one.stream(window_groups=1, threads=threads)
        assert sum(1 for _ in stream) == stream.steps
        assert stream.order.windows > 1
        left = [thing for thing in gc.get_objects() if isinstance(thing, Decoding | Window)]
    finally:
        gc.enable()
    assert not left


def test_the_state_is_the_same_on_every_rank_and_resumes_on_another_number_of_them(one: World) -> None:
    first = one.stream(rank=0, ranks=2)
    last = one.stream(rank=1, ranks=2)
    next(iter(first)), next(iter(last))
    assert first.state_dict() == last.state_dict()
    alone = one.stream()
    alone.load_state_dict(first.state_dict())
    assert_equal(next(iter(alone)), list(one.stream())[1])


def test_epochs_differ_and_both_deal_every_row(one: World) -> None:
    stream, seen = one.stream(), []
    for epoch in range(2):
        stream.set_epoch(epoch)
        batches = [batch.rows for batch in stream]
        assert_every_row_once(batches, stream.rows)
        seen.append(np.concatenate(batches).tolist())
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seed", {"seed": 6}),
        ("batch", {"batch": 8}),
        ("streams", {"streams": 4}),
        ("window_groups", {"window_groups": 3}),
        ("tail", {"tail": "drop"}),
    ],
)
def test_a_state_of_another_order_is_refused(one: World, name: str, change: dict) -> None:
    with pytest.raises(InputError, match=f"cannot resume the stream: {name} was"):
        one.stream(**change).load_state_dict(one.stream().state_dict())


def test_a_state_of_other_tables_is_refused(one: World) -> None:
    bare = [source.with_negatives(None) for source in one.sources]
    with pytest.raises(InputError, match="negatives was"):
        one.stream(bare).load_state_dict(one.stream().state_dict())
    # As many rows, but others.
    layout = build_data("memory://other", seed=1, features=25).layout
    other = open_sources(layout, "train", label_texts=True)
    with pytest.raises(InputError, match="tables was"):
        one.stream(other).load_state_dict(one.stream(bare).state_dict())


def test_without_a_table_nothing_is_joined(one: World) -> None:
    bare = [source.with_negatives(None) for source in one.sources]
    assert all(batch.hard is None for batch in one.stream(bare))


def test_fewer_rows_than_streams_still_give_every_rank_as_many_steps() -> None:
    data = build_data("memory://few", rows={"train": 3}, shards=1)
    sources = open_sources(data.layout, "train", label_texts=False)
    parts = [list(JoinedStream(sources, data.labels, batch=8, streams=8, rank=r, ranks=4)) for r in range(4)]
    assert {len(part) for part in parts} == {1}
    assert_every_row_once([part[0].rows for part in parts], 3)


def test_a_data_loader_hands_the_batches_on(one: World) -> None:
    loader = DataLoader(one.stream(threads=1), batch_size=None, num_workers=0)
    for got, other in zip(loader, one.stream(), strict=True):
        assert isinstance(got, Batch)
        assert torch.equal(torch.as_tensor(got.rows), torch.as_tensor(other.rows))
        assert_equal(got.hard, other.hard)


def test_negatives_of_other_queries_are_refused_by_name(one: World) -> None:
    other = build_data("memory://others", seed=2)
    with pytest.raises(TableError, match="from a queries table") as refusal:
        open_sources(other.layout, "train", False)[0].with_negatives(one.sources[0].negatives.url)
    assert one.sources[0].negatives.url in str(refusal.value)
    assert other.layout.queries("train") in str(refusal.value)


def test_misaligned_negatives_are_refused(one: World) -> None:
    queries = one.sources[0]
    table = one.hard[: queries.rows]
    write_negatives("memory://groups", queries.table.manifest, table, one.data.labels, row_group_rows=6)
    with pytest.raises(TableError, match="not aligned with"):
        queries.with_negatives("memory://groups")


def test_more_ranks_than_streams_are_refused_with_a_remedy(one: World) -> None:
    with pytest.raises(
        InputError, match=r"less than the number of ranks, 9, .* Raise order\.streams, or use fewer ranks"
    ):
        one.stream(ranks=9)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("table", ["queries", "negatives"])
@pytest.mark.parametrize("sink", ["parquet", "webdataset"])
def test_a_shard_that_is_gone_is_named_and_no_thread_left(tmp_path: Path, sink: Sink, table: str, threads: int) -> None:
    """Shards that are damaged are in test_damage.py."""
    small = make(str(tmp_path / "data"), str(tmp_path / "negatives"), sink)
    source = small.sources[0]
    url = source.table.url if table == "queries" else source.negatives.url
    shard = join(url, open_manifest(url).shards[1].path)
    storage.remove(shard)
    with pytest.raises(TableError, match=re.escape(shard)):
        list(small.stream(threads=threads))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_damaged_row_group_is_left_out_and_counted_when_asked(tmp_path: Path, threads: int) -> None:
    small = make(str(tmp_path / "data"), str(tmp_path / "negatives"))
    whole = list(small.stream())
    url = small.sources[0].table.url
    storage.remove(join(url, (gone := open_manifest(url).shards[1]).path))
    stream = small.stream(threads=threads, damaged="skip")
    kept = list(stream)
    assert len(kept) == len(whole)
    assert stream.skipped_rows == gone.rows > 0
    first = open_manifest(url).shards[0].rows
    lost = range(first, first + gone.rows)
    for batch, before in zip(kept, whole, strict=True):
        good = [i for i, row in enumerate(before.rows.tolist()) if row not in lost]
        np.testing.assert_array_equal(batch.rows, before.rows[good])
        np.testing.assert_array_equal(batch.hard, before.hard[good])
        assert lists(*batch.inputs.tokens) == [small.tokens[row] for row in batch.rows]
        assert lists(batch.positives, batch.positive_offsets) == [small.positives[row] for row in batch.rows]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_candidates_planned_in_threads_are_those_of_the_batch(world: World, threads: int) -> None:
    plan = Planner(Negatives(random=9, hard=3), world.data.labels, seed=4)
    for batch, bare in zip(world.stream(threads=threads, plan=plan), world.stream(), strict=True):
        assert_equal(batch.candidates, plan(bare))
        assert_equal(replace(batch, candidates=None), bare)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_row_group_that_a_window_cuts_is_read_once(
    world: World, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[int] = Counter()

    def counted(self: RowGroups, group: int) -> pa.Table:
        read[group] += 1
        return original(self, group)

    original = RowGroups.read
    monkeypatch.setattr(RowGroups, "read", counted)
    stream = world.stream(streams=1, threads=threads)
    list(stream)
    assert set(read) == set(range(len(stream.order.group_rows)))
    assert set(read.values()) == {1}


def test_an_iteration_that_is_given_up_leaves_no_thread(one: World) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    assert_no_thread_is_left(THREAD, before, lambda: iter(one.stream(threads=3)))


def lists(values: np.ndarray, offsets: np.ndarray) -> Rows:
    return [values[low:high].tolist() for low, high in itertools.pairwise(offsets)]
