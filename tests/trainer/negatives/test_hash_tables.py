"""HashTables against a dictionary of lists; reservoirs against the uniform law."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from schemas.ragged import Ragged
from trainer.negatives.lsh import HashTables

ROWS, TABLES, BUCKETS, CAPACITY = 12, 2, 3, 3
CODES = st.lists(st.integers(0, BUCKETS - 1), min_size=TABLES, max_size=TABLES)
NOTHING = np.empty(0, np.int64)


@st.composite
def histories(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Codes of all rows, and moves of some."""
    first = np.array([draw(CODES) for _ in range(ROWS)], np.uint8)
    moves = []
    for _ in range(draw(st.integers(0, 6))):
        rows = np.array(sorted(draw(st.sets(st.integers(0, ROWS - 1), max_size=6))), np.int64)
        moves.append((rows, np.array([draw(CODES) for _ in rows], np.uint8).reshape(-1, TABLES)))
    return first, moves


def filled(history: tuple, capacity: int) -> HashTables:
    first, moves = history
    buckets = HashTables(ROWS, TABLES, BUCKETS, capacity)
    buckets.insert(0, first[:5], 1)
    buckets.insert(5, first[5:], 2)
    for number, (rows, codes) in enumerate(moves):
        buckets.move(rows, codes, 3 + number)
    return buckets


def contents(buckets: HashTables) -> dict[tuple[int, int], list[int]]:
    return {
        (table, code): buckets.arrays.slots[table, code, : buckets.arrays.held[table, code]].tolist()
        for table in range(TABLES)
        for code in range(BUCKETS)
    }


@given(histories())
def test_moved_rows_lie_where_a_rebuild_puts_them(history: tuple) -> None:
    moved = filled(history, ROWS)  # nothing overflows
    codes = history[0].copy()
    for rows, new in history[1]:
        codes[rows] = new
    rebuilt = HashTables(ROWS, TABLES, BUCKETS, ROWS)
    rebuilt.insert(0, codes, 9)
    np.testing.assert_array_equal(moved.codes, rebuilt.codes)
    np.testing.assert_array_equal(moved.arrays.members, rebuilt.arrays.members)
    buckets, expected = ({key: sorted(rows) for key, rows in contents(tables).items()} for tables in (moved, rebuilt))
    assert buckets == expected


@given(histories())
def test_a_full_bucket_holds_some_of_its_members_each_once(history: tuple) -> None:
    buckets = filled(history, CAPACITY)
    for (table, code), rows in contents(buckets).items():
        members = np.flatnonzero(buckets.codes[:, table] == code).tolist()
        assert buckets.arrays.members[table, code] == len(members)
        assert len(rows) <= CAPACITY
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(members)
    assert (buckets.arrays.held <= buckets.arrays.members).all()
    assert (buckets.arrays.owed >= 0).all()
    if not history[1]:
        np.testing.assert_array_equal(buckets.arrays.held, np.minimum(buckets.arrays.members, CAPACITY))


def test_a_reservoir_is_a_uniform_sample_through_deletions() -> None:
    """Each of the rows in a bucket is held equally often, after some of 20 left and some came."""
    rows, capacity, runs = 20, 6, 3000
    counts = np.zeros(rows)
    pairs = np.zeros((rows, rows))
    for run in range(runs):
        buckets = HashTables(rows, 1, 2, capacity)
        buckets.insert(0, (np.arange(rows) >= 14).astype(np.uint8)[:, None], 3 * run)
        leave, come = np.array([0, 3, 5, 9]), np.array([14, 15, 16])
        buckets.move(leave, np.ones((4, 1), np.uint8), 3 * run + 1)
        buckets.move(come, np.zeros((3, 1), np.uint8), 3 * run + 2)
        held = buckets.arrays.slots[0, 0, : buckets.arrays.held[0, 0]]
        counts[held] += 1
        pairs[np.ix_(held, held)] += 1
    inside = np.flatnonzero(buckets.codes[:, 0] == 0)
    assert counts.sum() == counts[inside].sum()
    assert chisquare(counts[inside]).pvalue > 1e-3
    # Pairs too: a sample may be fair row by row and still go together.
    upper = pairs[np.ix_(inside, inside)][np.triu_indices(len(inside), 1)]
    assert abs(upper / upper.mean() - 1).max() < 0.25


@st.composite
def queries(draw: st.DrawFn) -> tuple[np.ndarray, list[list[int]]]:
    count = draw(st.integers(0, 4))
    codes = np.array([draw(CODES) for _ in range(count)], np.uint8).reshape(-1, TABLES)
    return codes, [draw(st.lists(st.integers(0, ROWS - 1), max_size=4, unique=True)) for _ in range(count)]


@given(histories(), queries(), st.integers(0, 5), st.permutations(range(TABLES)))
def test_a_query_finds_the_union_of_its_buckets_without_what_it_is_not_to_have(
    history: tuple, batch: tuple, most: int, order: list
) -> None:
    buckets, (codes, without) = filled(history, CAPACITY), batch
    excluded = Ragged(np.array([row for rows in without for row in rows], np.int64), np.cumsum([0, *map(len, without)]))
    results, offsets = buckets.find(codes, np.array(order), excluded, most)
    for query, excluded_rows in enumerate(without):
        lists = [contents(buckets)[table, codes[query, table]] for table in order]
        union = [row for row in dict.fromkeys(row for rows in lists for row in rows) if row not in excluded_rows]
        assert results[offsets[query] : offsets[query + 1]].tolist() == (union[:most] if most else union)
    assert len(offsets) == len(codes) + 1


@given(histories())
def test_tables_from_a_state_go_on_as_those_that_it_is_of(history: tuple) -> None:
    whole = filled(history, CAPACITY)
    loaded = HashTables(ROWS, TABLES, BUCKETS, CAPACITY)
    loaded.insert(0, np.ones((ROWS, TABLES), np.uint8), 5)  # something to forget
    loaded.load({name: array.copy() for name, array in whole.state().items()})
    for buckets in (whole, loaded):
        buckets.move(np.arange(3), history[0][5:8], 77)
    assert contents(loaded) == contents(whole)
    for name in ("codes", "held", "members", "owed"):
        np.testing.assert_array_equal(getattr(loaded.arrays, name), getattr(whole.arrays, name))


def test_a_state_has_no_room_for_what_buckets_do_not_hold() -> None:
    large = HashTables(4, 2, 1 << 15, 128)
    large.insert(0, np.arange(8, dtype=np.int16).reshape(4, 2), 1)
    assert sum(array.nbytes for array in large.state().values()) < 1000


@pytest.mark.parametrize("rows", [3, 4])
def test_another_shape_of_state_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="codes are"):
        HashTables(4, 1, 2, 2).load(HashTables(rows, 1, 2, 3).state())


def test_rows_beyond_31_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="less than 2"):
        HashTables(1 << 31, 1, 2, 2)
