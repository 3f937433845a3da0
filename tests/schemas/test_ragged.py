"""Ragged rows against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import ragged as module
from schemas.ragged import Ragged, SparseRows, is_repeated

rows_of_ids = st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=5)


def ragged(rows: list[list[int]], lead: int = 0) -> Ragged:
    """`lead` foreign values stand before the first row, as in a slice of a longer Arrow array."""
    values = np.array([99] * lead + [value for row in rows for value in row], dtype=np.int32)
    return Ragged(values, np.cumsum([lead, *map(len, rows)]))


@pytest.mark.parametrize("few", [0, 100])  # by binary search, and entry by entry
@given(rows=rows_of_ids, lead=st.integers(0, 3), width=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_contains_is_membership_row_by_row(few: int, rows: list[list[int]], lead: int, width: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(-1, 14, (len(rows), width))
    expected = [[int(value) in row for value in line] for row, line in zip(rows, ids, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW", few)
        np.testing.assert_array_equal(ragged(rows, lead).contains(ids), expected)


def test_pads_in_the_values_match_nothing() -> None:
    # Without care, -1 in row 1 would have the key of the greatest id in row 0.
    assert not Ragged(np.array([-1, 2]), np.array([0, 0, 2])).contains(np.array([[5], [-1]])).any()


def test_ids_of_a_hundred_million_labels_do_not_overflow() -> None:
    ids = np.array([[120_000_000], [119_999_999]], dtype=np.int32)
    rows = Ragged(np.array([120_000_000, 7], dtype=np.int32), np.array([0, 1, 2]))
    assert rows.contains(ids).tolist() == [[True], [False]]


@given(rows_of_ids, st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_filtered_ranking_keeps_the_best_that_are_left(rows: list[list[int]], width: int, k: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.permutation(13)[:width] for _ in rows])
    ids[generator.random(ids.shape) < 0.1] = -1
    scores = -np.sort(-generator.random(ids.shape).astype(np.float32), axis=1)
    kept, kept_scores = ragged(rows).filter_ranking(ids, scores, k)
    for row, line, line_scores, got, got_scores in zip(rows, ids, scores, kept, kept_scores, strict=True):
        left = [(i, s) for i, s in zip(line, line_scores, strict=True) if i >= 0 and i not in row][:k]
        left += [(-1, -np.inf)] * (k - len(left))
        assert list(zip(got, got_scores, strict=True)) == left
    assert kept.dtype == ids.dtype
    assert kept_scores.dtype == np.float32


def test_longest_row() -> None:
    values = np.zeros(60)
    assert Ragged(values, np.array([3, 3, 54, 60])).longest == 51
    assert Ragged(values, np.array([0])).longest == 0


def test_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="one row for each ragged row"):
        Ragged(np.array([1]), np.array([0, 1])).contains(np.array([[1], [2]]))


def test_ragged_rows_are_padded_behind() -> None:
    part = Ragged(np.array([0, 5, 6, 7, 9], np.int32), np.array([1, 3, 3, 4]))
    for rows in (part, Ragged.from_lists([[5, 6], [], [7]])):
        np.testing.assert_array_equal(rows.padded(), [[5, 6], [-1, -1], [7, -1]])
        assert rows.padded().dtype == np.int64
    assert Ragged.from_lists([]).padded().shape == (0, 0)


@given(rows_of_ids, st.integers(0, 3), st.data())
def test_rows_are_taken_sliced_thinned_and_joined(rows: list[list[int]], lead: int, data: st.DataObject) -> None:
    column = ragged(rows, lead)
    weighted = SparseRows(column.values, column.values / 2, column.offsets)

    def assert_rows(got: Ragged, weights: SparseRows, expected: list[list[int]]) -> None:
        for part in (got, Ragged(weights.ids, weights.offsets), Ragged(2 * weights.values, weights.offsets)):
            assert [part.slice(row, row + 1).entries.tolist() for row in range(part.rows)] == expected
            assert part.counts.tolist() == [*map(len, expected)]
            assert part.row_of().tolist() == [row for row, entries in enumerate(expected) for _ in entries]

    assert_rows(column, weighted, rows)
    order = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1))), np.int64)
    assert_rows(column.take(order), weighted.take(order), [rows[row] for row in order])
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert_rows(column.slice(start, stop), weighted.slice(start, stop), rows[start:stop])
    even = column.values % 2 == 0
    assert_rows(column.keep(even), weighted.keep(even), [[value for value in row if value % 2 == 0] for row in rows])
    joined = Ragged.join([column, column.slice(start, stop)])
    assert [joined.slice(row, row + 1).entries.tolist() for row in range(joined.rows)] == rows + rows[start:stop]


@given(st.lists(st.lists(st.integers(-1, 5), min_size=4, max_size=4), max_size=4))
def test_an_id_that_stands_further_in_front_is_found(rows: list[list[int]]) -> None:
    expected = [[value in row[:place] for place, value in enumerate(row)] for row in rows]
    ids = np.array(rows, np.int64).reshape(-1, 4)
    np.testing.assert_array_equal(is_repeated(ids), np.array(expected, bool).reshape(-1, 4))
