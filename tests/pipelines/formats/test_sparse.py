import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import from_lines
from schemas.ragged import SparseRows
from schemas.shard_files.parquet import string_bytes

NUMBER = st.integers(0, 10**18 - 1) | st.integers(0, 5)
VALUE = st.one_of(
    st.integers(-3, 100).map(str),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["1.", ".5", "+2", "1e5", "1E-3", "-0", "007", "1e-999"]),
)
GAP = st.sampled_from([" ", "  ", "\t", " \t"])
LINE = st.lists(st.tuples(NUMBER, VALUE), max_size=5)


def array(lines: list[bytes]) -> pa.LargeBinaryArray:
    return pa.array(lines, pa.large_binary())


def rows_of(ragged: SparseRows) -> list[list[tuple[int, float]]]:
    pairs = list(zip(ragged.ids.tolist(), ragged.values.tolist(), strict=True))
    return [pairs[start:end] for start, end in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


def plainly(line: bytes) -> list[tuple[int, float]]:
    """A line read in the plainest way."""
    pairs = [field.split(b":") for field in line.split()]
    return [(int(index), float(np.float32(float(value)))) for index, value in pairs]


@settings(deadline=None)
@given(st.lists(LINE, max_size=6), st.data())
def test_pairs_against_plain_reading(rows: list[list[tuple[int, str]]], data: st.DataObject) -> None:
    lines = []
    for row in rows:
        fields = [f"{index}:{value}" for index, value in row]
        ends = data.draw(st.sampled_from([("", ""), (" ", ""), ("", " "), ("\t", "  ")]))
        lines.append((ends[0] + data.draw(GAP).join(fields) + ends[1]).encode())
    ragged, wrong = from_lines.parse_sparse_pairs(array(lines))
    assert wrong == {}
    assert (ragged.offsets.dtype, ragged.ids.dtype, ragged.values.dtype) == (np.int64, np.int64, np.float32)
    for got, line in zip(rows_of(ragged), lines, strict=True):
        expected = plainly(line)
        assert [index for index, _ in got] == [index for index, _ in expected]
        assert np.allclose([value for _, value in got], [value for _, value in expected], rtol=1e-6, atol=0)


HOSTILE = st.binary(max_size=20) | st.text("0123456789:.,eE+- \t", max_size=12).map(str.encode)


@settings(deadline=None, max_examples=300)
@given(st.lists(HOSTILE, max_size=6))
def test_hostile_lines_are_rows_or_wrong_and_do_not_change_their_neighbours(lines: list[bytes]) -> None:
    for parse in (from_lines.parse_sparse_pairs, from_lines.parse_indices):
        ragged, wrong = parse(array(lines))
        together = rows_of(ragged)
        assert len(together) == len(lines)
        assert np.isfinite(ragged.values).all()
        for row, line in enumerate(lines):
            alone, wrong_alone = parse(array([line]))
            assert together[row] == rows_of(alone)[0]
            assert (row in wrong) == (0 in wrong_alone)
            assert row not in wrong or (together[row] == [] and wrong[row].isprintable())


@settings(deadline=None, max_examples=300)
@given(st.text("0123456789:.eE+- \t", max_size=16).map(str.encode))
def test_the_fast_pass_takes_exactly_what_the_careful_one_takes(line: bytes) -> None:
    assert (from_lines._pairs(*string_bytes(array([line]))) is None) == (from_lines._wrong_pair(line) is not None)
    indices = line.replace(b":", b",")
    assert (from_lines._indices(*string_bytes(array([indices]))) is None) == (
        from_lines._wrong_index(indices) is not None
    )


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"12", "got '12'"),
        (b"1:2 3", "got '3'"),
        (b"1:2 :3", "got ':3'"),
        (b"1:", "got '1:'"),
        (b"1::2", "got '1::2'"),
        (b"1:2:3", "got '1:2:3'"),
        (b"-1:2", "got '-1:2'"),
        (b"1.5:2", "got '1.5:2'"),
        (b"0x1F:2", "got '0x1F:2'"),
        (b"1:0x2", "got '1:0x2'"),
        (b"1:nan", "got '1:nan'"),
        (b"1:inf", "got '1:inf'"),
        (b"1:1_0", "got '1:1_0'"),
        (b"1:2,3:4", "got '1:2,3:4'"),
        (b"1:2\r3:4", r"got '1:2\r3:4'"),
        (b"1234567890123456789:1", "got '1234567890123456789:1'"),
        (b"1:1e39", "a value does not fit into a 32-bit float"),
        (b"1:-1e999", "a value does not fit into a 32-bit float"),
        ("१:1".encode(), r"got '\u0967:1'"),
        (b"\xff:1", r"got '\ufffd:1'"),
        (b"x" * 1000, "xxx…"),
    ],
)
def test_what_is_wrong_with_a_line(line: bytes, shown: str) -> None:
    ragged, wrong = from_lines.parse_sparse_pairs(array([b"0:1", line, b"7:2.5"]))
    assert shown in wrong.pop(1)
    assert wrong == {}
    assert rows_of(ragged) == [[(0, 1.0)], [], [(7, 2.5)]]


@pytest.mark.parametrize("pair", [(b"1:", b"2"), (b"5", b":7")])
def test_a_pair_does_not_reach_over_a_line_end(pair: tuple[bytes, bytes]) -> None:
    ragged, wrong = from_lines.parse_sparse_pairs(array([*pair, b"", b"3:4"]))
    assert sorted(wrong) == [0, 1]
    assert rows_of(ragged) == [[], [], [], [(3, 4.0)]]


@settings(deadline=None)
@given(st.lists(st.lists(NUMBER, max_size=5), max_size=6))
def test_indices_against_plain_reading(rows: list[list[int]]) -> None:
    ragged, wrong = from_lines.parse_indices(array([",".join(map(str, row)).encode() for row in rows]))
    assert wrong == {}
    assert rows_of(ragged) == [[(index, 1.0) for index in row] for row in rows]


@pytest.mark.parametrize("line", [b",1", b"1,", b"1,,2", b"1:2", b"a", b" 1", b"1 2", b"1.0", b"-1", b","])
def test_what_is_wrong_with_indices(line: bytes) -> None:
    ragged, wrong = from_lines.parse_indices(array([b"3,4", line, b""]))
    assert list(wrong) == [1]
    assert rows_of(ragged) == [[(3, 1.0), (4, 1.0)], [], []]


@settings(deadline=None)
@given(st.lists(st.text("ab ", max_size=6).map(str.encode), max_size=8), st.integers(0, 3))
def test_lines_are_cut_at_their_first_space(lines: list[bytes], offset: int) -> None:
    heads, tails = from_lines.cut_at_space(array([b"q r"] * offset + lines).slice(offset))
    for line, head, tail in zip(lines, heads.to_pylist(), tails.to_pylist(), strict=True):
        assert (head, tail) == line.partition(b" ")[::2]


ENTRIES = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-4, 4, width=16)), max_size=8),
    max_size=5,
)


def ragged(rows: list[list[tuple[int, float]]]) -> SparseRows:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    flat = [entry for row in rows for entry in row]
    return SparseRows(np.array([i for i, _ in flat], np.int64), np.array([v for _, v in flat], np.float32), offsets)


@settings(deadline=None)
@given(ENTRIES)
def test_labels_are_the_positive_ones_once_each(rows: list[list[tuple[int, float]]]) -> None:
    labels, merged = from_lines.merge_labels(ragged(rows))
    positive = [[index for index, value in row if value > 0] for row in rows]
    assert [[index for index, _ in row] for row in rows_of(labels)] == [sorted(set(row)) for row in positive]
    assert merged.tolist() == [len(row) - len(set(row)) for row in positive]


@settings(deadline=None)
@given(ENTRIES)
def test_features_named_again_add_up(rows: list[list[tuple[int, float]]]) -> None:
    for got, row in zip(rows_of(from_lines.merge_features(ragged(rows))), rows, strict=True):
        sums: dict[int, float] = {}
        for index, value in row:
            sums[index] = sums.get(index, 0.0) + value
        assert got == [(index, float(np.float32(value))) for index, value in sorted(sums.items())]


def test_sums_stay_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    (row,) = rows_of(from_lines.merge_features(ragged([[(1, largest), (1, largest)]])))
    assert row == [(1, largest)]
    assert math.isfinite(row[0][1])
