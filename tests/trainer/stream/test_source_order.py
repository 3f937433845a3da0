"""Batches of one source each: by the definition row by row, for any sizes and weights, and through the stream."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from schemas.errors import InputError
from schemas.randomness import Purpose, generator, torch_seed
from tests.builders import SmallData, build_data
from tests.laws import (
    assert_equal,
    assert_every_row_by_weight,
    assert_exact_resume,
    assert_same_global_batches,
    batch_rows,
)
from trainer.schedule import ClusterSchedule
from trainer.stream import Batch, JoinedStream, Source, by_shares, open_sources
from trainer.stream.order import EpochOrder, OrderBySource, WeightedGroups, streams_of_rank

WEIGHTS = st.one_of(st.sampled_from([0.5, 1.0, 1.5, 3.0]), st.floats(0.01, 4).map(lambda w: round(w, 3)))


@st.composite
def orders(draw: st.DrawFn, tail: str = "keep") -> OrderBySource:
    """One to four sources of any row groups, of which parts are dealt, and of any weights."""
    sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4))
    groups = np.asarray([size for group_sizes in sizes for size in group_sizes], np.int64)
    streams = draw(st.integers(1, 5))
    return OrderBySource(
        groups,
        streams * draw(st.integers(1, 5)),
        streams,
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2**62)),
        draw(st.integers(0, 20)),
        tail,
        tuple(WeightedGroups(len(group_sizes), draw(WEIGHTS)) for group_sizes in sizes),
    )


def first_rows(order: EpochOrder) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(order.group_rows)]).astype(np.int64)


def batches(order: EpochOrder, streams: range | None = None) -> list[np.ndarray]:
    own = range(order.streams) if streams is None else streams
    return [batch_rows(order, step, own, first_rows(order)) for step in range(order.steps)]


def bounds_of(order: EpochOrder) -> np.ndarray:
    """Id of the first row of each source, and N at the end."""
    return first_rows(order)[np.cumsum([0, *(share.groups for share in order.mix)])]


def sources_of(order: EpochOrder, rows: Sequence[np.ndarray]) -> list[set[int]]:
    return [set((np.searchsorted(bounds_of(order), some, side="right") - 1).tolist()) for some in rows]


def slowly(order: OrderBySource) -> list[list[int]]:
    """Row ids of every batch, by the definition: each source's rows in lists, dealt in turns."""
    first = first_rows(order).tolist()
    share, group = order.batch // order.streams, 0
    sequences: list[list[list[int]]] = []  # rows by source and stream
    for number, each in enumerate(order.mix):
        seed = torch_seed(order.seed, Purpose.SOURCE, number)
        sizes = order.group_rows[group : group + each.groups]
        alone = EpochOrder(sizes, order.batch, order.streams, 1, seed, order.epoch, mix=(each,))
        rows = [first[group + g] + row for g, start, stop in alone.pieces.tolist() for row in range(start, stop)]
        cuts = [stream * len(rows) // order.streams for stream in range(order.streams + 1)]
        sequences.append([rows[low:high] for low, high in itertools.pairwise(cuts)])
        group += each.groups
    counts = [math.ceil(max(map(len, streams)) / share) for streams in sequences]
    turns = generator(order.seed, Purpose.TURNS, order.epoch).permutation(np.repeat(np.arange(len(counts)), counts))
    dealt: list[list[int]] = []
    for window, low in enumerate(range(0, len(turns), order.steps_per_window)):
        steps = turns[low : low + order.steps_per_window].tolist()
        shuffled = {}
        for number, streams in enumerate(sequences):
            seed, count = torch_seed(order.seed, Purpose.SOURCE, number), steps.count(number) * share
            for stream, rows in enumerate(streams):
                some, streams[stream] = rows[:count], rows[count:]
                draw = generator(seed, Purpose.WINDOW, order.epoch, stream, window)
                shuffled[number, stream] = [some[i] for i in draw.permutation(len(some))]
        for number in steps:
            batch = []
            for stream in range(order.streams):
                batch += shuffled[number, stream][:share]
                shuffled[number, stream] = shuffled[number, stream][share:]
            dealt.append(batch)
    return dealt


@given(orders())
def test_the_order_is_the_definition_carried_out_row_by_row(order: OrderBySource) -> None:
    assert [batch.tolist() for batch in batches(order)] == slowly(order)


@given(orders())
def test_a_batch_is_of_one_source_and_rows_come_as_often_as_weights_say(order: OrderBySource) -> None:
    epochs = [batches(replace(order, epoch=epoch)) for epoch in range(4)]
    counts, weights = np.diff(bounds_of(order)).tolist(), [share.weight for share in order.mix]
    assert_every_row_by_weight(epochs, counts, weights)
    assert len({len(epoch) for epoch in epochs}) == 1
    for number, epoch in enumerate(epochs):
        assert sources_of(order, epoch) == [{turn} for turn in replace(order, epoch=number).turns.tolist()]
        # All batches are full but the last of each source, and of two where streams differ by a row.
        assert sum(len(batch) < order.batch for batch in epoch) <= 2 * len(counts)


@given(orders(tail="drop"))
def test_drop_deals_full_batches_of_one_source(order: OrderBySource) -> None:
    dealt = batches(order)
    assert all(len(batch) == order.batch for batch in dealt)
    assert all(len(sources) == 1 for sources in sources_of(order, dealt))


@given(orders(), st.integers(1, 5))
def test_ranks_have_equal_steps_and_end_to_end_their_batches_are_the_global_one(
    order: OrderBySource, ranks: int
) -> None:
    ranks = min(ranks, order.streams)
    parts = [batches(order, streams_of_rank(order.streams, rank, ranks)) for rank in range(ranks)]
    for step, batch in enumerate(batches(order)):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), batch)


def test_turns_differ_by_epoch_and_by_seed() -> None:
    mix = (WeightedGroups(20, 1.0), WeightedGroups(20, 1.0))
    turns = {
        tuple(OrderBySource(np.full(40, 8), 8, 4, 2, seed, epoch, mix=mix).turns.tolist())
        for seed in range(3)
        for epoch in range(4)
    }
    assert len(turns) == 12
    # Sources of equal sizes are not dealt in equal orders.
    first = OrderBySource(np.full(40, 8), 8, 4, 2, 0, 0, mix=mix)
    rows, source = np.concatenate(batches(first)), first.turns.repeat(8)
    assert (rows[source == 0] != rows[source == 1] - 160).any()


# Through the stream


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://by-source", rows={"train": 64, "market": 45})


MIX = {"market": 1.5, "train": 1.0, "labels": 2.0}


def sources_with(data: SmallData, mix: dict[str, float]) -> list[Source]:
    return open_sources(data.layout, "train", False, mix=mix)


def stream(data: SmallData, mix: dict[str, float], epoch: int = 0, **options: Any) -> JoinedStream:
    defaults = {"batch": 16, "streams": 8, "window_groups": 2, "threads": 0, "batches": "by_source"}
    joined = JoinedStream(sources_with(data, mix), data.labels, **{**defaults, **options})
    joined.set_epoch(epoch)
    return joined


def test_a_stream_deals_batches_of_one_source(data: SmallData) -> None:
    epochs: list[list[Batch]] = [list(stream(data, MIX, epoch)) for epoch in range(3)]
    assert_every_row_by_weight([[b.rows for b in epoch] for epoch in epochs], [45, 64, 30], [1.5, 1.0, 2.0])
    positives = data.points["market"].positives + data.points["train"].positives + data.label_points.positives
    for batch in epochs[0]:
        assert len(set(np.searchsorted([45, 109], batch.rows, side="right").tolist())) == 1
        for row, low, high in zip(batch.rows, batch.positive_offsets, batch.positive_offsets[1:], strict=False):
            assert batch.positives[low:high].tolist() == positives[row]


def test_threads_and_ranks_change_nothing(data: SmallData) -> None:
    assert_same_global_batches(
        lambda rank, ranks, threads: stream(data, MIX, 3, rank=rank, ranks=ranks, threads=threads)
    )


def test_a_stream_resumes_exactly(data: SmallData) -> None:
    assert_exact_resume(lambda: stream(data, MIX, 4))


def test_a_state_of_other_batches_is_refused(data: SmallData) -> None:
    states = {batches: stream(data, MIX, batches=batches).state_dict() for batches in ("mixed", "by_source")}
    with pytest.raises(InputError, match=r"cannot resume the stream: batches was None when .* is 'by_source' now"):
        stream(data, MIX).load_state_dict(states["mixed"])
    with pytest.raises(InputError, match="cannot resume the stream: batches was 'by_source' when"):
        stream(data, MIX, batches="mixed").load_state_dict(states["by_source"])
    with pytest.raises(InputError, match="leave out clusters, or batches"):
        stream(data, MIX, clusters=ClusterSchedule(2))


# Shares


@given(st.lists(st.tuples(st.integers(20, 5000), st.floats(0.05, 5)), min_size=1, max_size=5))
def test_rows_of_an_epoch_come_in_the_shares_that_are_asked(sizes: list[tuple[int, float]]) -> None:
    given = [Source(f"s{n}", _Sized(rows), weight=weight) for n, (rows, weight) in enumerate(sizes)]  # type: ignore[arg-type]
    try:
        weighed = by_shares(given)
    except InputError as error:
        assert "once; expected at most 1000 times" in str(error)  # noqa: PT017
        return
    assert min(source.weight for source in weighed) == 1
    mix = tuple(WeightedGroups(1, source.weight) for source in weighed)
    order = OrderBySource(np.array([rows for rows, _ in sizes]), 4, 2, 1, 0, 0, mix=mix)
    wanted = np.array([weight for _, weight in sizes])
    got = np.bincount(order.turns, minlength=len(sizes))
    # Of rows to one row each; of batches to one batch each.
    dealt = np.array([source.weight * source.rows for source in weighed])
    np.testing.assert_allclose(dealt / dealt.sum(), wanted / wanted.sum())
    assert (np.abs(got - dealt / order.batch) <= 1.5).all()


class _Sized:
    """Stands for a table of so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


def test_a_share_that_deals_rows_too_often_is_refused(data: SmallData) -> None:
    with pytest.raises(
        InputError, match=r"source market: with this share, an epoch uses each of its 45 rows [\d,]+ times"
    ):
        by_shares(sources_with(data, {"market": 1000, "train": 0.5}))


# Other shares at a checkpoint


@pytest.mark.parametrize("batches", ["mixed", "by_source"])
@pytest.mark.parametrize("workers", [0, 2])
def test_other_weights_count_from_the_next_epoch_on(data: SmallData, batches: str, workers: int) -> None:
    later = {**MIX, "market": 0.5}
    before = stream(data, MIX, 1, batches=batches)
    whole = list(before)
    state = before.state_dict(after=whole[2])
    resumed = stream(data, later, 1, batches=batches)
    resumed.load_state_dict(state)
    if not workers:
        assert resumed.state_dict() == state  # and so the rest goes on after a second end, too
    loader = DataLoader(resumed, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    assert_equal(tuple(loader), tuple(whole[3:]))
    resumed.set_epoch(2)
    assert_equal(tuple(loader), tuple(stream(data, later, 2, batches=batches)))


def test_a_state_of_other_sources_is_refused_and_changes_nothing(data: SmallData) -> None:
    state = stream(data, MIX).state_dict()
    fewer = stream(data, {"market": 1.0, "train": 1.0})
    own = fewer.state_dict()
    with pytest.raises(InputError, match="cannot resume the stream: rows was"):
        fewer.load_state_dict(state)
    with pytest.raises(InputError, match="cannot resume the stream: mix was"):
        fewer.load_state_dict({**own, "mix": [["train", 1.0], ["market", 1.0]]})
    with pytest.raises(InputError, match="cannot resume the stream: seed was"):
        fewer.load_state_dict({**own, "seed": 5, "mix": [["market", 2.0], ["train", 1.0]]})
    assert fewer.state_dict() == own
