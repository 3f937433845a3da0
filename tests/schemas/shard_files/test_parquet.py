"""Shards: exact row groups, the same bytes each time, and what goes in comes out."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import arrow, storage
from schemas.errors import StorageError, TableError
from schemas.manifest import open_manifest, publish
from schemas.shard_files.parquet import (
    ShardWriter,
    encode,
    list_array,
    list_column,
    matrix_array,
    matrix_column,
    number_column,
    open_shard,
    write_shard,
    writing_shard,
)
from schemas.shard_files.ranges import Access
from schemas.shard_files.shards import read_group, write_table
from schemas.storage import join
from schemas.table import Table
from tests.builders import build_data, ragged
from tests.schemas.flaky import FlakyFileSystem

rows_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=30)


def negatives(rows: int, width: int = 3, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    columns = [
        pa.array(np.arange(rows)),
        matrix_array(draw.integers(-1, 99, (rows, width)), pa.int32()),
        matrix_array(draw.standard_normal((rows, width)).astype(np.float16), pa.float16()),
    ]
    return pa.Table.from_arrays(columns, schema=arrow.negatives(width, pa.int32()))


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_row_groups_are_exact_however_rows_arrive(rows: int, group: int, data: st.DataObject) -> None:
    table = negatives(rows)
    out = pa.BufferOutputStream()
    encoder = ShardWriter(out, table.schema, group)
    position = 0
    while position < rows:
        count = data.draw(st.integers(1, rows - position))
        encoder.write(table.slice(position, count))
        position += count
    encoder.close()
    assert encoder.rows == rows
    content = out.getvalue()
    # The arrival of rows leaves no trace in the bytes.
    assert content.equals(encode(table, group))
    file = pa.parquet.ParquetFile(pa.BufferReader(content))
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert sizes == [min(group, rows - start) for start in range(0, rows, group)]
    assert file.read().equals(table)


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_shard_written_bit_by_bit_is_the_shard_written_at_once(tmp_path: Path, scheme: str) -> None:
    table = negatives(50)
    root = scheme + str(tmp_path)
    whole = write_shard(join(root, "whole"), 1, 3, table, 8)
    with writing_shard(join(root, "bits"), 1, 3, table.schema, 8) as file:
        for start in range(0, 50, 11):
            file.write(table.slice(start, 11))
    assert file.entry == whole
    assert storage.read_bytes(join(root, "bits", whole.path)) == storage.read_bytes(join(root, "whole", whole.path))
    with pytest.raises(ZeroDivisionError), writing_shard(join(root, "none"), 0, 1, table.schema, 8) as file:
        file.write(table.slice(1 // 0))
    assert storage.list_names(join(root, "none")) == []


@pytest.mark.parametrize("root", ["local", "memory"])
def test_a_table_comes_back_as_it_was_written(tmp_path, root: str) -> None:  # type: ignore[no-untyped-def]
    url = str(tmp_path) if root == "local" else "memory://parquet/round"
    table = negatives(23)
    written = write_table(url, "negatives", [table.slice(0, 9), table.slice(9, 0), table.slice(9)], 4)
    manifest = open_manifest(url)
    assert manifest == written
    assert pa.concat_tables(Table(url, manifest).batches()).equals(table)
    assert pa.concat_tables(Table(url, manifest).batches(["scores"])).column_names == ["scores"]
    for first, rows in Table.open(url).read_groups(range(6)):
        assert rows.equals(table.slice(first, rows.num_rows))


def test_a_table_written_again_has_the_same_bytes_and_digest() -> None:
    first, other = build_data("memory://parquet/one"), build_data("memory://parquet/other")
    for layout in ("labels", "tokenizer"):
        assert open_manifest(getattr(first.layout, layout)) == open_manifest(getattr(other.layout, layout))
    manifests = [open_manifest(data.layout.queries("train")) for data in (first, other)]
    assert manifests[0].digest == manifests[1].digest


@given(rows_of_ids, st.data())
def test_list_columns_of_slices(rows: list[list[int]], data: st.DataObject) -> None:
    table = pa.table({"ids": list_array(*ragged(rows), pa.int32())})
    low = data.draw(st.integers(0, len(rows)))
    high = data.draw(st.integers(low, len(rows)))
    values, offsets = list_column(table.slice(low, high - low), "ids")
    assert offsets.dtype == np.int64
    assert [values[offsets[i] : offsets[i + 1]].tolist() for i in range(high - low)] == rows[low:high]


@given(st.integers(0, 8), st.integers(1, 4), st.data())
def test_matrix_columns_of_slices(rows: int, width: int, data: st.DataObject) -> None:
    matrix = np.arange(rows * width).reshape(rows, width)
    table = pa.table({"m": matrix_array(matrix, pa.int64())})
    low = data.draw(st.integers(0, rows))
    np.testing.assert_array_equal(matrix_column(table.slice(low), "m"), matrix[low:])


def regions(content: bytes) -> dict[str, range]:
    """The parts of a shard's file."""
    footer = int.from_bytes(content[-8:-4], "little")
    first = pa.parquet.read_metadata(pa.BufferReader(content)).row_group(0).column(0)
    end = len(content)
    return {
        "magic": range(4),
        "chunks": range(first.data_page_offset, end - 8 - footer),
        "footer": range(end - 8 - footer, end - 8),
        "end": range(end - 8, end),
    }


@pytest.mark.parametrize("root", ["local", "memory"])
@pytest.mark.parametrize("part", ["magic", "chunks", "footer", "end"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, root: str, part: str) -> None:
    url = str(tmp_path) if root == "local" else f"memory://parquet/flips-{part}"
    table = negatives(60, seed=1)
    manifest = write_table(url, "negatives", [table], 16)
    place = join(url, manifest.shards[0].path)
    content = storage.read_bytes(place)
    bytes_of = regions(content)[part]
    for position in bytes_of[:: max(1, len(bytes_of) // 60)]:
        spoilt = bytearray(content)
        spoilt[position] ^= 1 << position % 8
        storage.write_bytes(place, bytes(spoilt))
        if part == "magic":  # nobody reads it: the table is as it was, and `verify` sees it all the same
            assert pa.concat_tables(Table(url, manifest).batches()).equals(table)
            with pytest.raises(TableError, match=re.escape(place)):
                Table(url, manifest).verify()
            continue
        with pytest.raises(TableError, match=re.escape(place)) as refusal:
            list(Table(url, manifest).batches())
        assert ("row group" in str(refusal.value)) == (part == "chunks")


def test_columns_that_are_not_read_may_be_damaged() -> None:
    url = "memory://parquet/unread"
    table = negatives(60, seed=1)
    manifest = write_table(url, "negatives", [table], 16)
    place = join(url, manifest.shards[0].path)
    content = bytearray(storage.read_bytes(place))
    with open_shard(url, manifest.shards[0]) as file:
        ((start, stop),) = file.ranges(2, ["scores"])
    content[(start + stop) // 2] ^= 1
    storage.write_bytes(place, bytes(content))
    assert pa.concat_tables(Table(url, manifest).batches(["label_ids"])).equals(table.select(["label_ids"]))
    with pytest.raises(TableError, match=re.escape(f"{place}, row group 2: damaged: the values of scores")):
        list(Table(url, manifest).batches())


def test_not_verified_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://parquet/unverified"
    table = negatives(30)
    manifest = write_table(url, "negatives", [table], 16)
    content = bytearray(storage.read_bytes(join(url, manifest.shards[0].path)))
    created = content.index(b"parquet-cpp")
    content[created] ^= 1  # who wrote it: the one part of a footer that changes nothing
    storage.write_bytes(join(url, manifest.shards[0].path), bytes(content))
    with pytest.raises(TableError, match="its footer does not match its CRC-32"):
        open_shard(url, manifest.shards[0])
    monkeypatch.setattr("schemas.shard_files.parquet.crc32", lambda _: 1 // 0)
    with open_shard(url, manifest.shards[0], Access(verify=False)) as file:
        assert pa.concat_tables(map(file.read_row_group, range(file.num_row_groups))).equals(table)


@pytest.mark.parametrize("root", ["local", "memory"])
def test_a_table_from_before_checksums_reads_by_those_of_its_pages(tmp_path: Path, root: str) -> None:
    url = str(tmp_path) if root == "local" else "memory://parquet/before"
    table = negatives(60, seed=1)
    written = write_table(url, "negatives", [table], 16)
    old = written.model_copy(update={"shards": tuple(s.model_copy(update={"checksums": None}) for s in written.shards)})
    publish(url, old)
    manifest = open_manifest(url)
    assert "checksums" not in storage.read_bytes(join(url, "_manifest.json")).decode()
    assert manifest.digest == old.digest != written.digest
    assert pa.concat_tables(Table(url, manifest).batches()).equals(table)
    place = join(url, manifest.shards[0].path)
    content = storage.read_bytes(place)
    refused = 0
    chunks = regions(content)["chunks"]
    for position in chunks[:: len(chunks) // 60]:
        spoilt = bytearray(content)
        spoilt[position] ^= 1 << position % 8
        storage.write_bytes(place, bytes(spoilt))
        try:
            assert pa.concat_tables(Table(url, manifest).batches()).equals(table), f"byte {position} of {len(content)}"
        except TableError as error:
            refused += 1
            assert place in str(error)  # noqa: PT017
    assert refused > 10


@pytest.mark.parametrize("spoil", ["", "AAA", "!!!!", "AAAAAAA="])
def test_checksums_that_are_none_are_refused(spoil: str) -> None:
    url = "memory://parquet/none"
    manifest = write_table(url, "negatives", [negatives(6)], 3)
    body = json.loads(storage.read_bytes(join(url, "_manifest.json")))
    body["shards"][0]["checksums"] = spoil
    body = {name: value for name, value in body.items() if name not in ("digest", "commit", "seal")}
    digest = storage.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    storage.write_bytes(join(url, "_manifest.json"), json.dumps({**body, "digest": digest}).encode())
    with pytest.raises(TableError, match=r"not valid at 'shards.0.checksums'"):
        open_manifest(url)
    few = manifest.shards[0].model_copy(
        update={"checksums": manifest.shards[0].checksums[:16]}
    )  # of the footer and two chunks
    with pytest.raises(TableError, match="2 checksums for 2 row groups"):
        open_shard(url, few)


def test_a_fault_of_the_network_is_retried_and_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    table = negatives(20)
    manifest = write_table("flaky://tables/t", "negatives", [table], 8)
    file = open_shard("flaky://tables/t", manifest.shards[0])
    FlakyFileSystem.fail(1)
    assert read_group(file, 0, None, "flaky://tables/t").equals(table.slice(0, 8))
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    FlakyFileSystem.fail(99)
    with pytest.raises(
        StorageError, match=r"could not read flaky://tables/t/.* after 2 attempt\(s\): Connection reset"
    ):
        read_group(file, 1, None, "flaky://tables/t")
    FlakyFileSystem.fail(0)


def test_a_column_that_is_not_there_is_named() -> None:
    manifest = write_table("memory://parquet/columns", "negatives", [negatives(3)], 2)
    with pytest.raises(TableError, match="no column label_idz"):
        list(Table("memory://parquet/columns", manifest).batches(["query_id", "label_idz"]))


@pytest.mark.parametrize("kind", ["int32", "uint64", "float16", "float64", "bool_"])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_column_of_numbers_is_that_of_arrow(kind: str, pieces: int) -> None:
    type = pa.from_numpy_dtype(kind)
    arrays = [pa.array(np.arange(9).astype(kind), type).slice(2, 3 + piece) for piece in range(pieces)]
    table = pa.table({"n": pa.chunked_array(arrays, type)})
    found, expected = number_column(table, "n"), table["n"].to_numpy()
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
    with_null = pa.table({"n": pa.array([1, None, 3])})
    np.testing.assert_array_equal(number_column(with_null, "n"), [1, np.nan, 3])
