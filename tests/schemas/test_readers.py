"""Other tools open the folder of a Parquet table as it is, by the call that their users type (docs/concepts.md)."""

from collections.abc import Callable
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest

from schemas import arrow
from schemas.layout import MANIFEST
from schemas.shard_files.shards import write_table

ROWS = 9


def by_datasets(folder: str) -> int:
    import datasets

    cache = str(Path(folder).parent / "cache")
    return datasets.load_dataset(folder, cache_dir=cache)["train"].num_rows


def by_duckdb(folder: str) -> int:
    import duckdb

    [[rows]] = duckdb.sql(f"select count(*) from '{folder}/*.parquet'").fetchall()
    return int(rows)


def by_polars(folder: str) -> int:
    import polars

    return polars.read_parquet(f"{folder}/*.parquet").height


def by_polars_scan(folder: str) -> int:
    import polars

    return int(polars.scan_parquet(folder, hidden_file_prefix="_").select(polars.len()).collect().item())


READERS: dict[str, Callable[[str], int]] = {
    "pyarrow": lambda folder: pyarrow.parquet.read_table(folder).num_rows,
    "pandas": lambda folder: len(pandas.read_parquet(folder)),
    "datasets": by_datasets,
    "duckdb": by_duckdb,
    "polars": by_polars,
    "polars, a scan": by_polars_scan,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_parquet_opens_a_table(tmp_path: Path, reader: str) -> None:
    folder = tmp_path / "labels"
    schema = arrow.labels(pa.uint16())
    row = {"key": "k", "text": "t", "input_ids": [1, 2], "frequency": 3}
    rows = pa.Table.from_pylist([{"label_id": number, **row} for number in range(ROWS)], schema=schema)
    write_table(str(folder), "labels", [rows.slice(0, 5), rows.slice(5)], 2)
    assert sorted(path.name for path in folder.iterdir())[0] == MANIFEST
    assert READERS[reader](str(folder)) == ROWS
