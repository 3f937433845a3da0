"""Weights of sources: by the definition row by row, for any sizes and weights, and through the stream."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.randomness import Purpose, generator
from tests.builders import SmallData, build_data, build_negatives
from tests.laws import (
    assert_equal,
    assert_every_row_by_weight,
    assert_exact_resume,
    batch_rows,
)
from trainer.stream import Batch, JoinedStream, Source, open_sources
from trainer.stream.order import EpochOrder, WeightedGroups

WEIGHTS = st.one_of(
    st.sampled_from([0.5, 1.0, 1.5, 2.0, 0.25, 3.0]), st.floats(0.01, 4, allow_nan=False).map(lambda w: round(w, 3))
)


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    """One to four sources of any row groups and weights."""
    sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4))
    streams = draw(st.sampled_from([1, 2, 4]))
    return EpochOrder(
        np.asarray([size for group_sizes in sizes for size in group_sizes], np.int64),
        streams * draw(st.integers(1, 5)),
        streams,
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2**63)),
        draw(st.integers(0, 20)),
        "keep",
        tuple(WeightedGroups(len(group_sizes), draw(WEIGHTS)) for group_sizes in sizes),
    )


def first_rows(order: EpochOrder) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(order.group_rows)]).astype(np.int64)


def batches(order: EpochOrder) -> list[np.ndarray]:
    return [batch_rows(order, step, range(order.streams), first_rows(order)) for step in range(order.steps)]


def counts_of(order: EpochOrder) -> list[int]:
    stops = np.cumsum([share.groups for share in order.mix])
    return [int(part.sum()) for part in np.split(order.group_rows, stops[:-1])]


def slowly(order: EpochOrder) -> list[list[int]]:
    """Row ids of every batch, by the definition: rows in lists."""
    first, runs, group = first_rows(order).tolist(), [], 0
    for number, share in enumerate(order.mix):
        groups = [list(range(first[g], first[g + 1])) for g in range(group, group + share.groups)]
        group += share.groups
        runs += groups * math.floor(share.weight)
        rows = sum(map(len, groups))
        more = round((share.weight - math.floor(share.weight)) * rows)
        if more:
            block, part = divmod(order.epoch, rows // more)
            permuted = [
                groups[i] for i in generator(order.seed, Purpose.MIXTURE, block, number).permutation(len(groups))
            ]
            before = 0
            for run in permuted:
                kept = [row for place, row in enumerate(run, before) if part * more <= place < (part + 1) * more]
                before += len(run)
                runs += [kept] if kept else []
    sequence = [
        row for i in generator(order.seed, Purpose.ROW_GROUPS, order.epoch).permutation(len(runs)) for row in runs[i]
    ]
    total, dealt = len(sequence), []
    for stream in range(order.streams):
        rows = sequence[stream * total // order.streams : (stream + 1) * total // order.streams]
        windows = [rows[first : first + order.window_units] for first in range(0, len(rows), order.window_units)]
        shuffled = [
            [window[i] for i in generator(order.seed, Purpose.WINDOW, order.epoch, stream, w).permutation(len(window))]
            for w, window in enumerate(windows)
        ]
        dealt.append([row for window in shuffled for row in window])
    share = order.units_per_batch
    return [[row for rows in dealt for row in rows[s * share : (s + 1) * share]] for s in range(order.steps)]


@given(orders())
def test_the_order_is_the_definition_carried_out_row_by_row(order: EpochOrder) -> None:
    assert [batch.tolist() for batch in batches(order)] == slowly(order)


@given(orders())
def test_every_row_comes_as_often_as_its_weight_says(order: EpochOrder) -> None:
    epochs = [batches(replace(order, epoch=epoch)) for epoch in range(6)]
    assert_every_row_by_weight(epochs, counts_of(order), [share.weight for share in order.mix])
    assert {replace(order, epoch=epoch).steps for epoch in range(6)} == {order.steps}


@given(orders())
def test_weights_of_one_are_the_order_without_weights(order: EpochOrder) -> None:
    ones = replace(order, mix=tuple(WeightedGroups(share.groups, 1.0) for share in order.mix))
    for weighted, other in zip(batches(ones), batches(replace(order, mix=())), strict=True):
        np.testing.assert_array_equal(weighted, other)


def test_half_a_weight_deals_every_row_once_in_two_epochs() -> None:
    order = EpochOrder(np.full(12, 7), 8, 4, 2, 3, 0, "keep", (WeightedGroups(12, 0.5),))
    for block in range(3):
        pair = [row for epoch in (2 * block, 2 * block + 1) for row in slowly(replace(order, epoch=epoch))]
        assert sorted(row for batch in pair for row in batch) == list(range(84))


def test_choices_differ_by_epoch_and_by_seed() -> None:
    def chosen(seed: int, epoch: int) -> frozenset[int]:
        order = EpochOrder(np.full(40, 5), 8, 4, 2, seed, epoch, "keep", (WeightedGroups(40, 0.3),))
        return frozenset(np.concatenate(batches(order)).tolist())

    assert len({chosen(seed, epoch) for seed in range(3) for epoch in range(8)}) == 24


# Through the stream


SPLITS = {"market": 1.5, "train": 1.0, "labels": 2.0}
THIN = {"market": 0.4, "train": 1.0, "labels": 0.75}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://mixing", rows={"train": 64, "market": 45})


def joined(data: SmallData, mix: dict[str, float]) -> list[Source]:
    """Sources in the mix, each with a table."""
    sources = []
    for source in open_sources(data.layout, "train", False, mix=mix):
        points = data.label_points if source.name == "labels" else data.points[source.name]
        url = f"{data.layout.root}/negatives/{source.name}"
        build_negatives(url, source.table.manifest, points.positives, data.labels, 3)
        sources.append(source.with_negatives(url))
    return sources


def stream(data: SmallData, sources: list[Source], epoch: int = 0, **options: int) -> JoinedStream:
    joined = JoinedStream(
        sources, data.labels, **{"batch": 16, "streams": 8, "window_groups": 2, "threads": 0, **options}
    )
    joined.set_epoch(epoch)
    return joined


@pytest.mark.parametrize("mix", [SPLITS, THIN], ids=["thick", "thin"])
def test_a_mixed_stream_deals_rows_by_weight(data: SmallData, mix: dict[str, float]) -> None:
    sources = joined(data, mix)
    assert [source.name for source in sources] == ["market", "train", "labels"]
    epochs: list[list[Batch]] = [list(stream(data, sources, epoch)) for epoch in range(5)]
    assert_every_row_by_weight(
        [[batch.rows for batch in epoch] for epoch in epochs], [45, 64, 30], [mix[source.name] for source in sources]
    )
    positives = data.points["market"].positives + data.points["train"].positives + data.label_points.positives
    for batch in epochs[0]:
        for position, row in enumerate(batch.rows):
            labels = batch.positives[batch.positive_offsets[position] : batch.positive_offsets[position + 1]]
            assert labels.tolist() == positives[row]


@pytest.mark.parametrize("mix", [SPLITS, THIN], ids=["thick", "thin"])
def test_a_mixed_stream_resumes_exactly(data: SmallData, mix: dict[str, float]) -> None:
    assert_exact_resume(lambda: stream(data, joined(data, mix), 4))


def test_a_mix_of_ones_is_the_stream_without_a_mix(data: SmallData) -> None:
    mixed = open_sources(data.layout, "train", False, mix={"labels": 1.0, "train": 1.0})
    plain = open_sources(data.layout, "train", True)
    for weighted, other in zip(stream(data, mixed, 2), stream(data, plain, 2), strict=True):
        assert_equal(weighted, other)


def test_what_cannot_be_mixed_is_refused(data: SmallData) -> None:
    with pytest.raises(InputError, match="no split 'markt'; known splits: market, train"):
        open_sources(data.layout, "train", False, mix={"markt": 1.0})
    source = open_sources(data.layout, "train", False)[0]
    for weight in (0.0, -1.0, math.nan, math.inf, 1001.0):
        with pytest.raises(InputError, match="source queries: a weight of"):
            replace(source, weight=weight)
    with pytest.raises(InputError, match="two sources have the same name: queries, queries"):
        stream(data, [source, source])
