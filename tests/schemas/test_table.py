"""Tables: rows, row groups and joins against the same read from memory."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import arrow
from schemas.errors import TableError
from schemas.manifest import Manifest, Shard
from schemas.shard_files.shards import write_table
from schemas.table import Table

KIND = arrow.embeddings(4, "float32")


def embeddings(rows: int, seed: int = 0, first_id: int = 0) -> pa.Table:
    flat = pa.array(np.random.default_rng(seed).random(4 * rows, np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(flat, 4)
    return pa.Table.from_arrays([pa.array(np.arange(first_id, first_id + rows)), vectors], schema=KIND)


def publish(url: str, rows: pa.Table, sizes: list[int], group: int, **fields: object) -> Table:
    edges = np.cumsum([0, *sizes])
    shards = [rows.slice(start, size) for start, size in zip(edges, sizes, strict=False)]
    write_table(url, "embeddings", shards, group, **fields)
    return Table.open(url, "embeddings")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_rows_by_range_by_group_and_by_number(sizes: list[int], group: int, data: st.DataObject) -> None:
    rows = embeddings(sum(sizes))
    table = publish("memory://tables/read", rows, sizes, group)
    numbers = st.integers(0, table.rows)
    start, stop = sorted((data.draw(numbers), data.draw(numbers)))
    batches = list(table.batches(start=start, stop=stop))
    assert pa.concat_tables([KIND.empty_table(), *batches]).equals(rows.slice(start, stop - start))
    assert all(batch.num_rows for batch in batches)
    assert [batch.num_rows for batch in table.batches()] == np.diff(table.groups.first).tolist()
    for number, first in enumerate(table.groups.first[:-1].tolist()):
        read = table.read_group(number, ["query_id"])
        assert read["query_id"].to_pylist() == list(range(first, int(table.groups.first[number + 1])))
    wanted = data.draw(st.lists(st.integers(0, max(0, table.rows - 1)), max_size=6)) if table.rows else []
    assert table.rows_at(np.array(wanted, np.int64))["query_id"].to_pylist() == sorted({*wanted})
    assert sum(len(vectors) for _, vectors in table.vectors()) == table.rows
    assert (table.dimension, table.columns, table.id_column) == (4, ["query_id", "vector"], "query_id")


@given(st.lists(st.integers(0, 25), max_size=6), st.integers(1, 9))
def test_row_groups_by_arithmetic(sizes: list[int], group: int) -> None:
    expected = [
        (index, number, min(group, rows - number * group))
        for index, rows in enumerate(sizes)
        for number in range(-(-rows // group))
    ]
    listed = [[size for index, _, size in expected if index == shard] for shard in range(len(sizes))]
    for groups in ([None] * len(sizes), listed):  # by the table's size, and as the shards list them
        shards = tuple(
            Shard(path=f"p{i}", rows=rows, bytes=0, sha256="0" * 64, groups=groups[i] and tuple(groups[i]))
            for i, rows in enumerate(sizes)
        )
        manifest = Manifest(kind="queries", shards=shards, rows=sum(sizes), row_group_rows=group)
        got = Table("", manifest).groups
        assert list(zip(got.shard.tolist(), got.group.tolist(), np.diff(got.first).tolist(), strict=True)) == expected
        assert got.first[-1] == sum(sizes)


def test_a_table_is_found_and_travels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    url = str(tmp_path / "table")
    assert Table.find(url) is None
    table = publish(url, embeddings(7), [7], 3)
    assert Table.find(url, "embeddings") == table == pickle.loads(pickle.dumps(table))
    assert len(pickle.dumps(table)) == len(pickle.dumps((table.groups, table)[1])), "what is cached stays here"
    with pytest.raises(TableError, match="expected a table of kind vectors"):
        Table.find(url, "vectors")
    with pytest.raises(ValueError, match="rows in"):
        table.rows_at(np.array([7]))
    with pytest.raises(TableError, match="has no column scores"):
        table.width("scores")


def test_tables_that_are_aligned_are_joined_as_a_zip() -> None:
    rows = publish("memory://tables/rows", embeddings(9), [5, 4], 2)
    parents = {"queries": rows.digest}
    other = publish("memory://tables/other", embeddings(9, seed=1), [5, 4], 2, parents=parents)
    other.require_aligned(rows, "Make it again.")
    pairs = [pair for shard in (0, 1) for pair in rows.aligned_with(other, shard, ["query_id"])]
    assert pa.concat_tables([left for left, _ in pairs])["query_id"].to_pylist() == list(range(9))
    assert pa.concat_tables([right for _, right in pairs]).equals(embeddings(9, seed=1))
    with pytest.raises(TableError, match="built from a queries table"):
        rows.require_aligned(other, "")
    cut_otherwise = publish("memory://tables/cut", embeddings(9, seed=1), [5, 4], 3, parents=parents)
    with pytest.raises(TableError, match=r"not aligned with .*\. Mine it again"):
        cut_otherwise.require_aligned(rows, "Mine it again.")
    moved = publish("memory://tables/moved", embeddings(9, first_id=1), [5, 4], 2, parents=parents)
    with pytest.raises(TableError, match="the column query_id differs from the column of memory://tables/rows"):
        list(rows.aligned_with(moved, 0))
