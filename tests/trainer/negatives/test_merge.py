"""Merged labels against a plain dictionary."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.tables import PAD
from trainer.negatives.merge import Merged, merge

# Few labels meet often; multiples of a power of two would share a place under a plain mask.
LABELS = st.one_of(st.integers(0, 9), st.integers(0, 9).map(lambda n: n << 30), st.integers(0, 2**63 - 1))


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[list[int]], np.ndarray]:
    """Pool, positives by query, and hard negatives with pads."""
    rows, width = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    pool = np.array(draw(st.lists(LABELS, max_size=12)), np.int64)
    positives = [draw(st.lists(LABELS, max_size=4)) for _ in range(rows)]
    hard = [[draw(st.one_of(LABELS, st.just(PAD))) for _ in range(width)] for _ in range(rows)]
    return pool, positives, np.array(hard, np.int64).reshape(rows, width)


def by_dictionary(pool: np.ndarray, positives: list[list[int]], hard: np.ndarray) -> Merged:
    drawn = Counter(pool.tolist()).items()
    places = {label: place for place, (label, _) in enumerate(drawn)}
    pairs = [
        (row, places.setdefault(label, len(places)), is_positive)
        for row, labels in enumerate(positives)
        for label, is_positive in [*((p, True) for p in labels), *((h, False) for h in hard[row].tolist() if h != PAD)]
    ]
    query, place, positive = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else ([], [], [])
    masked = [number for number, label in enumerate(place) if label < len(drawn)]
    return Merged(np.array(list(places), np.int64), [count for _, count in drawn], query, place, positive, masked, [])


def by_table(pool: np.ndarray, positives: list[list[int]], hard: np.ndarray | None) -> Merged:
    return merge(pool, *ragged(positives), hard)


def ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(itertools.chain(*rows)), np.int64), np.array([0, *itertools.accumulate(map(len, rows))])


@given(batches())
def test_every_label_once_and_every_pair_where_its_label_is(batch: tuple) -> None:
    for got, expected in zip(by_table(*batch), by_dictionary(*batch), strict=True):
        np.testing.assert_array_equal(got, expected)


@given(batches(), st.data())
def test_what_queries_draw_for_themselves_comes_once_and_is_none_of_their_others(
    batch: tuple, data: st.DataObject
) -> None:
    pool, positives, hard = batch
    width = data.draw(st.integers(0, 6))
    repeated = st.sampled_from([*itertools.chain(*positives), *hard.reshape(-1).tolist(), PAD, 3])
    query_draws = np.array(
        [[data.draw(st.one_of(LABELS, repeated)) for _ in range(width)] for _ in positives], np.int64
    )
    merged = merge(pool, *ragged(positives), hard, query_draws.reshape(len(positives), width))
    labels, kept = merged.ids[merged.place], merged.draws == 0
    without = by_table(*batch)
    np.testing.assert_array_equal(labels[kept], without.ids[without.place])
    np.testing.assert_array_equal(merged.positive[kept], without.positive)
    assert not merged.positive[~kept].any()
    assert (np.diff(merged.query) >= 0).all()
    assert len(np.unique(merged.ids)) == len(merged.ids)
    np.testing.assert_array_equal(np.flatnonzero(np.isin(labels, pool)), merged.masked)
    for row, others in enumerate(positives):
        drawn = Counter(query_draws[row].tolist())
        for label in [PAD, *others, *hard[row].tolist()]:
            drawn.pop(label, None)
        mine = ~kept & (merged.query == row)
        assert dict(zip(labels[mine].tolist(), merged.draws[mine].tolist(), strict=True)) == drawn


def test_without_a_table_there_are_only_positives() -> None:
    merged = by_table(np.array([4]), [[7, 4], []], None)
    assert (merged.ids.tolist(), merged.query.tolist(), merged.place.tolist()) == ([4, 7], [0, 0], [1, 0])
    assert merged.positive.all()


def test_threads_do_not_meet_in_each_other_s_tables() -> None:
    generator = np.random.default_rng(0)
    inputs = [
        (np.arange(9), [generator.integers(0, 50, 3).tolist() for _ in range(40)], generator.integers(0, 99, (40, 6)))
        for _ in range(200)
    ]
    with ThreadPoolExecutor(4) as pool:
        for got, batch in zip(pool.map(lambda batch: by_table(*batch), inputs), inputs, strict=True):
            for mine, its in zip(got, by_dictionary(*batch), strict=True):
                np.testing.assert_array_equal(mine, its)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="make the batch smaller"):
        by_table(np.arange(2**24), [[]], None)
