"""Tars: what stock readers see, what our own reads back, and what it says about damage."""

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import arrow, storage
from schemas.errors import StorageError, TableError
from schemas.layout import shard_name
from schemas.manifest import Manifest, Shard, open_manifest
from schemas.shard_files import ranges, webdataset
from schemas.shard_files.parquet import list_array
from schemas.shard_files.shards import iterate_shard, open_shard, read_group, write_table
from schemas.storage import join
from schemas.table import Table
from tests.builders import cut, ragged
from tests.schemas.flaky import FlakyFileSystem

Rows = list[list[int]]

lists = st.lists(st.integers(0, 9), max_size=5)
points = st.lists(st.tuples(st.text(max_size=5), lists, lists, st.text(max_size=700)), max_size=12)


def queries(rows: list[tuple[str, list[int], list[int], str]], first: int = 0) -> pa.Table:
    """Rows of key, tokens, labels and text as a table with everything a query may have, features like the tokens."""
    schema = arrow.queries(pa.uint16(), pa.int32(), text=True, filters=True, features=True, titles=True)
    tokens, labels = [list(row[1]) for row in rows], [list(row[2]) for row in rows]
    columns = {
        "query_id": pa.array(np.arange(first, first + len(rows))),
        "key": pa.array([row[0] for row in rows], pa.string()),
        "input_ids": list_array(*ragged(tokens), pa.uint16()),
        "title_tokens": pa.array([len(row) // 2 for row in tokens], pa.int32()),
        "feature_ids": list_array(*ragged(tokens), pa.int32()),
        "feature_values": list_array(*ragged(tokens, np.float32), pa.float32()),
        "label_ids": list_array(*ragged(labels), pa.int32()),
        "filter_label_ids": list_array(*ragged(labels[::-1]), pa.int32()),
        "text": pa.array([row[3] for row in rows], pa.string()),
    }
    return pa.table(columns, schema=schema)


def some(rows: int, seed: int = 0, first: int = 0) -> pa.Table:
    """Rows with members of every length around the edges of a block, without tokens, and with none at all."""
    draw = np.random.default_rng(seed)
    lengths = [0, 1, 92, 96, 97, 192, 193, 448, 449]
    return queries(
        [
            (
                f"ключ.{i}",
                draw.integers(0, 1 << 16, lengths[i % len(lengths)]).tolist(),
                draw.integers(0, 1 << 31, draw.integers(0, 99)).tolist(),
                "τίτλος " * (lengths[(i + 3) % len(lengths)] % 100),
            )
            for i in range(first, first + rows)
        ],
        first,
    )


def publish(url: str, table: pa.Table, shards: int = 1, group: int = 4) -> Manifest:
    return write_table(url, "queries", cut(table, shards), group, "webdataset")


def content(url: str, shard: Shard) -> bytes:
    return storage.read_bytes(join(url, shard.path))


@pytest.mark.parametrize("root", ["local", "memory"])
@settings(max_examples=40)
@given(points, st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**9))
def test_rows_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, root: str, rows: list, group: int, shards: int, first: int
) -> None:
    url = str(tmp_path_factory.mktemp("tars")) if root == "local" else "memory://webdataset/round"
    table = queries(rows, first)
    manifest = write_table(url, "queries", cut(table, shards), group, "webdataset")
    assert open_manifest(url) == manifest
    assert pa.concat_tables([table.slice(0, 0), *Table(url, manifest).batches()]).equals(table)
    for shard in manifest.shards:
        assert [part.num_rows for part in iterate_shard(url, shard)] == [
            min(group, shard.rows - start) for start in range(0, shard.rows, group)
        ]
        for columns in (["query_id", "label_ids"], ["query_id", "title_tokens"]):
            for part in iterate_shard(url, shard, columns[::-1]):
                assert part.column_names == columns


def test_the_stock_library_reads_the_same_rows_with_no_code_of_ours(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    table = some(40)
    manifest = publish(str(tmp_path), table, shards=3)
    assert [shard.path for shard in manifest.shards] == [shard_name(i, 3, "tar") for i in range(3)]
    brace = f"{tmp_path}/part-{{00000..00002}}-of-00003.tar"
    for urls in (brace, f"pipe:cat {brace}"):
        samples = list(wds.WebDataset(urls, shardshuffle=False).decode())
        assert [int(sample["__key__"]) for sample in samples] == table["query_id"].to_pylist()
        for sample, row in zip(samples, table.to_pylist(), strict=True):
            members = {name: value for name, value in sample.items() if not name.startswith("__")}
            assert {name.partition(".")[0] for name in members} == {*row} - {"query_id", "title_tokens"}
            for name, value in members.items():
                column = name.partition(".")[0]
                if name.endswith(".npy"):
                    field = table.schema.field(column).type.value_type
                    assert value.dtype == pa.array([], field).to_numpy().dtype
                    assert value.tolist() == row[column]
                else:
                    assert value == row[column]


def test_other_tar_readers_stop_at_the_end_of_the_archive(tmp_path: Path) -> None:
    table = some(9)
    shard = publish(str(tmp_path), table).shards[0]
    place = tmp_path / shard.path
    with tarfile.open(place) as archive:
        entries = archive.getmembers()
    assert len(entries) == 9 * (len(table.column_names) - 2)
    assert {(e.mtime, e.uid, e.gid, e.mode, e.type) for e in entries} == {(0, 0, 0, 0o644, tarfile.REGTYPE)}
    listed = subprocess.run(["tar", "tf", place], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == [entry.name for entry in entries]
    assert listed.stderr == ""
    assert shard.bytes == place.stat().st_size
    assert shard.sha256 == storage.sha256(place.read_bytes())


def test_a_shard_written_again_has_the_same_bytes_wherever(tmp_path: Path) -> None:
    table = some(20)
    local = publish(str(tmp_path), table)
    remote = publish("memory://webdataset/again", pa.concat_tables([table.slice(0, 3), table.slice(3)]))
    assert local == remote
    assert content(str(tmp_path), local.shards[0]) == content("memory://webdataset/again", remote.shards[0])


def test_a_row_group_is_one_read() -> None:
    table = some(20)
    manifest = publish("flaky://tars/reads", table)
    FlakyFileSystem.fail(0)
    file = open_shard("flaky://tars/reads", manifest.shards[0])
    opened = FlakyFileSystem.attempts
    for group in range(5):
        assert read_group(file, group, None, "x").equals(table.slice(group * 4, 4))
    assert FlakyFileSystem.attempts == opened + 5


def test_an_index_that_is_longer_than_the_first_look_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_TAIL", 30)
    table = some(20)
    manifest = publish("memory://webdataset/long", table)
    assert pa.concat_tables(Table("memory://webdataset/long", manifest).batches()).equals(table)


@pytest.mark.parametrize("root", ["local", "memory"])
def test_a_flipped_bit_is_seen_wherever_it_changes_what_is_read(tmp_path: Path, root: str) -> None:
    url = str(tmp_path) if root == "local" else "memory://webdataset/flips"
    table = some(12, seed=1)
    shard = publish(url, table).shards[0]
    place, whole = join(url, shard.path), content(url, shard)
    refused = []
    for position in range(0, len(whole), 397):
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        storage.write_bytes(place, bytes(spoilt))
        try:
            assert pa.concat_tables(iterate_shard(url, shard)).equals(table), f"byte {position} of {len(whole)}"
        except TableError as error:
            refused.append(str(error))
    assert all(place in error for error in refused)
    assert {error.partition("row group ")[2][:1] for error in refused} == {"", "0", "1", "2"}
    assert len(refused) > 10


def test_every_byte_of_a_value_and_all_of_the_index_count() -> None:
    url = "memory://webdataset/bytes"
    shard = publish(url, queries([("k", [1, 2, 3], [4], "text")])).shards[0]
    place, whole = join(url, shard.path), content(url, shard)
    archive = whole.rindex(b"ustar") - 257 + 2 * webdataset.BLOCK
    first = whole.index(b"\n", whole.index(b"\x93NUMPY")) + 1  # of six bytes of token ids
    for position in [*range(first, first + 6), *range(archive + len(webdataset.END), len(whole), 11)]:
        spoilt = bytearray(whole)
        spoilt[position] ^= 4
        storage.write_bytes(place, bytes(spoilt))
        with pytest.raises(TableError, match="damaged"):
            list(iterate_shard(url, shard))


@pytest.mark.parametrize("length", [0, 5, 600, 5000])
def test_what_is_no_tar_of_ours_is_refused(length: int) -> None:
    url = "memory://webdataset/foreign"
    shard = Shard(path=shard_name(0, 1, "tar"), rows=1, bytes=length, sha256="0" * 64)
    storage.write_bytes(join(url, shard.path), bytes(length))
    with pytest.raises(TableError, match=rf"{shard.path}: damaged"):
        open_shard(url, shard)


def test_a_tar_that_is_gone_or_cut_short_is_named() -> None:
    url = "memory://webdataset/gone"
    shard = publish(url, some(3)).shards[0]
    storage.write_bytes(join(url, shard.path), content(url, shard)[:-512])
    with pytest.raises(TableError, match=rf"{shard.path}: damaged: \d+ bytes, expected {shard.bytes}"):
        open_shard(url, shard)
    storage.remove(join(url, shard.path))
    with pytest.raises(TableError, match=rf"{shard.path}: the manifest names this shard, but the file is missing"):
        open_shard(url, shard)


def test_a_fault_of_the_network_is_retried_and_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    table = some(8)
    FlakyFileSystem.fail(0)
    manifest = publish("flaky://tars/faults", table)
    file = open_shard("flaky://tars/faults", manifest.shards[0])
    FlakyFileSystem.fail(1)
    assert read_group(file, 0, None, "x").equals(table.slice(0, 4))
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    FlakyFileSystem.fail(99)
    with pytest.raises(StorageError, match=r"could not read flaky://tars/faults/.* after 2 attempt"):
        read_group(file, 1, None, "x")
    FlakyFileSystem.fail(0)


@pytest.mark.parametrize("root", ["local", "memory"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.set_column(0, "query_id", pa.array([5, 6, 8, 9])), "must increase by 1"),
        (lambda t: t.set_column(0, "query_id", pa.array([10**12 + i for i in range(4)])), "12 digits"),
        (lambda t: t.append_column("more", pa.array([1.0] * 4)), "column more: expected strings, whole numbers"),
        (lambda t: t.append_column("m" * 90, t["key"]), "too long for a tar"),
    ],
)
def test_what_a_tar_does_not_hold_is_refused(
    tmp_path: Path, root: str, spoil: Callable[[pa.Table], pa.Table], message: str
) -> None:
    url = str(tmp_path / "t") if root == "local" else "memory://webdataset/refused"
    with pytest.raises(ValueError, match=message):
        webdataset.write_shard(url, 0, 1, spoil(some(4)), 2)
    assert storage.list_names(url) == []
