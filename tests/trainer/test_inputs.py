"""Inputs of an encoder: rows by number, and the titles of their tokens."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.shard_files.parquet import list_array
from tests.builders import ragged
from trainer.inputs import Inputs

TABLE = st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=4), st.integers(0, 4)), max_size=9)


def table_of(rows: list[tuple[list[int], int]], titled: bool) -> pa.Table:
    tokens, titles = [row for row, _ in rows], [title for _, title in rows]
    columns = {
        "input_ids": list_array(*ragged(tokens), pa.uint16()),
        "dense": pa.array([[float(n)] for n in titles], pa.list_(pa.float16(), 1)),
        **({"title_tokens": pa.array(titles, pa.int32())} if titled else {}),
    }
    return pa.table(columns)


@given(TABLE, st.booleans(), st.data())
def test_parts_of_inputs_are_those_of_parts_of_the_table(
    rows: list[tuple[list[int], int]], titled: bool, data: st.DataObject
) -> None:
    table = table_of(rows, titled)
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=2, max_size=2)))
    some = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    whole = Inputs.of(table)
    for part, expected in (
        (whole.slice(start, stop), Inputs.of(table.slice(start, stop - start))),
        (whole.take(np.array(some, np.int64)), Inputs.of(table.take(pa.array(some, pa.int64())))),
    ):
        assert (part.rows, part.titles is not None) == (expected.rows, titled)
        np.testing.assert_array_equal(part.tokens.padded(), expected.tokens.padded())
        np.testing.assert_array_equal(part.dense, expected.dense)
        np.testing.assert_array_equal(part.titles, expected.titles)


@pytest.mark.parametrize(("columns", "titles"), [(None, [1]), (["input_ids"], [1]), (["dense"], None), ([], None)])
def test_titles_come_with_token_ids(columns: list[str] | None, titles: list[int] | None) -> None:
    inputs = Inputs.of(table_of([([3, 4], 1)], titled=True), columns)
    assert (inputs.titles if titles is None else inputs.titles.tolist()) == titles
