"""The order of rows as pure arithmetic, over grids of row groups, batches, streams, ranks and windows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from tests.laws import assert_every_row_once, batch_rows
from trainer.stream.order import EpochOrder, WindowDeal, deal, streams_of_rank
from trainer.stream.sources import clusters_per_group


@st.composite
def orders(draw: st.DrawFn, tail: str | None = None) -> EpochOrder:
    """Row groups of any sizes, none too; S a power of two."""
    streams = draw(st.sampled_from([1, 2, 4, 8]))
    return EpochOrder(
        np.asarray(draw(st.lists(st.integers(1, 9), max_size=20)), np.int64),
        streams * draw(st.integers(1, 5)),
        streams,
        draw(st.integers(1, 6)),
        draw(st.integers(0, 2**63)),
        draw(st.integers(0, 100)),
        tail or draw(st.sampled_from(["keep", "drop"])),
    )


def first_rows(order: EpochOrder) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(order.group_rows)]).astype(np.int64)


def epoch(order: EpochOrder, streams: range | None = None) -> list[np.ndarray]:
    """Row ids of every batch."""
    dealt = range(order.streams) if streams is None else streams
    return [batch_rows(order, step, dealt, first_rows(order)) for step in range(order.steps)]


@given(orders(tail="keep"))
def test_keep_deals_every_row_once_in_batches_of_at_most_b(order: EpochOrder) -> None:
    batches = epoch(order)
    assert_every_row_once(batches, order.rows)
    assert all(0 < len(batch) <= order.batch for batch in batches)
    assert all(len(batch) == order.batch for batch in batches[:-1])


@given(orders(tail="drop"))
def test_drop_leaves_out_only_steps_that_some_stream_cannot_fill(order: EpochOrder) -> None:
    batches = epoch(order)
    assert all(len(batch) == order.batch for batch in batches)
    dealt = np.concatenate([*batches, np.empty(0, np.int64)])
    assert len(np.unique(dealt)) == len(dealt)
    shortest = order.rows // order.streams
    assert order.steps == shortest // order.units_per_batch
    assert order.rows - len(dealt) < order.batch + order.streams


@given(orders())
def test_windows_cover_the_streams_without_a_gap(order: EpochOrder) -> None:
    assert order.window_units % order.units_per_batch == 0
    for stream in range(order.streams):
        read = [
            (segment.group, row)
            for window in range(-(-order.rows // order.window_units))
            for segment in order.segments(stream, window)
            for row in range(segment.start, segment.stop)
        ]
        assert len(set(read)) == len(read) in {order.rows // order.streams, -(-order.rows // order.streams)}
        assert all(0 <= row < order.group_rows[group] for group, row in read)


def test_the_order_is_reproducible_and_differs_by_epoch_and_seed() -> None:
    sizes = np.full(30, 5)

    def rows(seed: int, number: int) -> list[int]:
        return np.concatenate(epoch(EpochOrder(sizes, 16, 4, 3, seed, number))).tolist()

    assert rows(1, 0) == rows(1, 0)
    orders = [rows(seed, number) for seed in range(3) for number in range(4)]
    assert all(first != other for first, other in itertools.combinations(orders, 2))


def test_a_batch_mixes_rows_from_far_apart() -> None:
    # Neighbours in storage (and so in a sorted raw file) are not neighbours in the stream.
    batch = epoch(EpochOrder(np.full(64, 16), 64, 8, 4, 0, 0))[3]
    assert len(np.unique(batch // 16)) > 8


# Rows in cluster order


@st.composite
def clustered_orders(draw: st.DrawFn) -> EpochOrder:
    """Row groups of clusters that are equal within one, as `pipelines.clustering` lays them, at any halving of them."""
    size, halvings = draw(st.integers(2, 9)), draw(st.integers(0, 2))
    most = draw(st.integers(1, 5))
    full = draw(st.lists(st.integers(1, most), min_size=1, max_size=12))
    short = draw(st.lists(st.integers(1, size - 1), max_size=2))
    rows = np.asarray([n * size for n in full] + [n * (size - 1) for n in short], np.int64)
    clusters = clusters_per_group(rows, size, halvings)
    largest = -(-size // 2**halvings)
    streams = draw(st.sampled_from([1, 2, 4]))
    share = draw(st.integers(1, 4)) * largest
    rest = draw(st.integers(1, 4)), draw(st.integers(0, 99)), draw(st.integers(0, 9))
    tail = draw(st.sampled_from(["keep", "drop"]))
    return EpochOrder(rows, share * streams, streams, *rest, tail, (), largest, clusters)


def numbered(order: EpochOrder) -> np.ndarray:
    """The cluster of each row, in storage order, by the definition: equal within one in every row group."""
    assert order.clusters is not None
    sizes = [
        np.diff(np.arange(count + 1) * rows // count)
        for rows, count in zip(order.group_rows.tolist(), order.clusters.tolist(), strict=True)
    ]
    assert all(np.ptp(some) <= 1 for some in sizes)
    return np.repeat(np.arange(order.clusters.sum()), np.concatenate(sizes))


@given(clustered_orders())
def test_a_batch_is_whole_clusters_as_many_as_fill_it(order: EpochOrder) -> None:
    batches, cluster = epoch(order), numbered(order)
    sizes = np.bincount(cluster)
    for batch in batches:
        clusters, counts = np.unique(cluster[batch], return_counts=True)
        np.testing.assert_array_equal(counts, sizes[clusters])
        assert len(clusters) <= order.batch // order.cluster
        # And a cluster's rows are next to each other.
        assert np.count_nonzero(np.diff(cluster[batch])) == max(0, len(clusters) - 1)
    if order.tail == "keep":
        assert_every_row_once(batches, order.rows)
        assert all(len(np.unique(cluster[batch])) == order.batch // order.cluster for batch in batches[:-1])
    else:
        assert all(len(np.unique(cluster[batch])) == order.batch // order.cluster for batch in batches)


@given(st.one_of(orders(), clustered_orders()), st.integers(1, 8))
def test_ranks_have_equal_steps_and_end_to_end_their_batches_are_the_global_one(order: EpochOrder, ranks: int) -> None:
    ranks = min(ranks, order.streams)
    parts = [epoch(order, streams_of_rank(order.streams, rank, ranks)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {order.steps}
    for step, batch in enumerate(epoch(order)):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), batch)


def test_smaller_clusters_are_halves_of_larger_ones() -> None:
    rows, whole = np.array([44, 11, 20, 10]), 11
    for halvings in range(3):
        larger, smaller = (
            numbered(EpochOrder(rows, 88, 1, 1, 0, 0, clusters=clusters_per_group(rows, whole, n)))
            for n in (halvings, halvings + 1)
        )
        assert len(np.unique(larger)) == sum((4, 1, 2, 1)) << halvings
        assert all(len(np.unique(smaller[larger == label])) == 2 for label in np.unique(larger))


def test_which_clusters_meet_changes_with_the_epoch() -> None:
    rows = np.full(16, 64)

    def met(number: int) -> set[frozenset[int]]:
        order = EpochOrder(rows, 32, 2, 4, 0, number, "keep", (), 8, clusters_per_group(rows, 8, 0))
        return {frozenset((batch // 8).tolist()) for batch in epoch(order)}

    assert len(met(0)) == 32
    assert len(met(0) & met(1)) <= 3


def test_a_cluster_of_one_row_is_the_order_of_rows() -> None:
    rows = np.array([5, 7, 7, 2])
    plain, ones = EpochOrder(rows, 4, 2, 2, 1, 3), EpochOrder(rows, 4, 2, 2, 1, 3, "keep", (), 1, rows)
    for expected, other in zip(epoch(plain), epoch(ones), strict=True):
        np.testing.assert_array_equal(expected, other)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 8))
def test_deal_is_taking_a_share_of_each_stream_in_turn(sizes: list[int], share: int, batches: int) -> None:
    starts = np.cumsum([0, *sizes])
    expected = [
        [
            int(starts[stream]) + row
            for stream, size in enumerate(sizes)
            for row in range(number * share, min((number + 1) * share, size))
        ]
        for number in range(batches)
    ]
    ends = [np.minimum(np.arange(batches + 1) * share, size) for size in sizes]
    order, offsets = deal(
        [WindowDeal(np.arange(size), stream_ends) for size, stream_ends in zip(sizes, ends, strict=True)]
    )
    assert [order[low:high].tolist() for low, high in itertools.pairwise(offsets)] == expected


def test_more_ranks_than_streams_are_refused() -> None:
    with pytest.raises(InputError, match=r"order.streams = 2 is less than the number of ranks, 4"):
        streams_of_rank(2, 0, 4)


@given(orders(tail="keep"), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.data())
def test_an_epoch_that_goes_on_on_other_numbers_of_ranks_deals_every_row_once(
    order: EpochOrder, ranks: list[int], data: st.DataObject
) -> None:
    stops = sorted(data.draw(st.lists(st.integers(0, order.steps), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    dealt = []
    for count, steps in zip(ranks, itertools.pairwise([0, *stops, order.steps]), strict=True):
        shares = [
            streams_of_rank(order.streams, rank, min(count, order.streams)) for rank in range(min(count, order.streams))
        ]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for step in range(*steps):
            parts = [batch_rows(order, step, share, first_rows(order)) for share in shares]
            dealt.append(np.concatenate(parts))
    assert_every_row_once(dealt, order.rows)
    for got, expected in zip(dealt, epoch(order), strict=True):
        np.testing.assert_array_equal(got, expected)
