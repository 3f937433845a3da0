"""Lists copied from pages against the lists that Arrow reads."""

import contextlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.shard_files.parquet import encode, matrix_array, read_matrix

KINDS = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float16(): np.float16, pa.float32(): np.float32}


def read(data: pa.Buffer, group: int = 0, leaf: int = 0) -> pa.Array | None:
    metadata = pq.read_metadata(pa.BufferReader(data))
    chunk = metadata.row_group(group).column(leaf)
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    kind = metadata.schema.to_arrow_schema().field(leaf).type
    return read_matrix(data.slice(start, chunk.total_compressed_size), metadata, group, leaf, kind)


def table(rows: int, width: int, kind: pa.DataType, seed: int = 0) -> pa.Table:
    values = np.random.default_rng(seed).integers(-9, 10**4, (rows, width)).astype(KINDS[kind])
    return pa.table({"lists": matrix_array(values, kind)})


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from(list(KINDS)), st.booleans(), st.integers(1, 100))
def test_lists_are_those_that_arrow_reads(rows: int, width: int, kind: pa.DataType, required: bool, group: int) -> None:
    made = table(rows, width, kind)
    if required:
        made = made.cast(pa.schema([made.schema.field(0).with_nullable(False)]))
    data = encode(made, group)
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        for number in range(file.num_row_groups):
            lists = read(data, number)
            assert lists is not None
            assert pa.chunked_array([lists]).equals(file.read_row_group(number).column(0))


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
@pytest.mark.parametrize("page", [64, 1000, 1 << 20])
def test_pages_of_any_size_and_compression(compression: str, page: int) -> None:
    made, out = table(500, 7, pa.int32()), pa.BufferOutputStream()
    pq.write_table(made, out, compression=compression, data_page_size=page, use_dictionary=False, write_batch_size=10)
    lists = read(out.getvalue())
    assert lists is None or lists.equals(made.column(0).chunk(0))  # a page may end within a list
    assert lists is not None or page < 1 << 20


def test_what_is_no_plain_page_is_left_to_arrow() -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array([1, None, 3, 4], pa.int32()), 2)
    missing = pa.array([[1, 2], None], pa.list_(pa.int32(), 2))
    for column, options in ((lists, {}), (missing, {}), (table(9, 2, pa.int32()).column(0), {"use_dictionary": True})):
        out = pa.BufferOutputStream()
        pq.write_table(pa.table({"lists": column}), out, **{"use_dictionary": False, **options})
        assert read(out.getvalue()) is None


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_bytes_raise_or_give_as_many_lists(place: int, byte: int) -> None:
    data = encode(table(64, 5, pa.int32()), 64)
    metadata = pq.read_metadata(pa.BufferReader(data))
    chunk = metadata.row_group(0).column(0)
    damaged = bytearray(data.slice(chunk.data_page_offset, chunk.total_compressed_size))
    damaged[place % len(damaged)] = byte
    kind = metadata.schema.to_arrow_schema().field(0).type
    with contextlib.suppress(ValueError, OSError):
        lists = read_matrix(pa.py_buffer(bytes(damaged)), metadata, 0, 0, kind)
        assert lists is None or len(lists) == 64
