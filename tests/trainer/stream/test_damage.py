"""Damage of every kind in every part of every file: named, or not of what training reads; never trained on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas import storage
from schemas.errors import TableError
from schemas.layout import MANIFEST
from schemas.manifest import open_manifest, publish
from schemas.shard_files import webdataset
from schemas.shard_files.shards import Sink, open_shard
from schemas.storage import join
from schemas.table import Table
from tests.builders import build_data, build_negatives
from tests.laws import assert_equal
from trainer.stream import Batch, JoinedStream, ReadOptions, open_sources

TABLES = {"parquet": ("queries", "negatives"), "webdataset": ("queries",)}
CASES = [(sink, table, root) for sink in TABLES for table in TABLES[sink] for root in ("local", "memory")]


@dataclass
class World:
    """DATA and negatives at `root`, and the batches of an epoch over them."""

    root: str
    sink: Sink

    def __post_init__(self) -> None:
        data = build_data(join(self.root, "data"), sink=self.sink, rows={"train": 40}, shards=2, labels=20, features=9)
        self.layout, self.labels = data.layout, data.labels
        queries = open_manifest(self.url("queries"))
        build_negatives(self.url("negatives"), queries, data.points["train"].positives, data.labels, 4)
        self.clean = self.batches()

    def url(self, table: str) -> str:
        return join(self.root, "negatives") if table == "negatives" else self.layout.queries("train")

    def batches(self, threads: int = 0) -> list[Batch]:
        """Read the batches that training would see; everything is opened anew."""
        queries = open_sources(self.layout, "train", label_texts=False, inputs="both")[0]
        source = queries.with_negatives(self.url("negatives"))
        stream = JoinedStream(
            [source], self.labels, inputs="both", batch=16, streams=4, threads=threads, reading=ReadOptions(threads=2)
        )
        return list(stream)

    def is_named_or_unread(self, place: str, table: str) -> str:
        """Return how damage at `place` shows; fail where it is trained on, or where the error does not name it."""
        try:
            batches = self.batches()
        except TableError as error:
            message = str(error)
            assert place in message, message
            assert "\n" not in message
            return message
        assert_equal(tuple(batches), tuple(self.clean))
        with pytest.raises(TableError, match=re.escape(place)):
            Table.open(self.url(table)).verify()
        return "unread"


@pytest.fixture(params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, str]:
    """A world, and the table in it that is damaged."""
    sink, table, root = request.param
    monkeypatch.setattr(storage, "ATTEMPTS", 1)  # what is cut off is asked for again, as it may be the network
    return World(str(tmp_path) if root == "local" else f"memory://damage-{sink}-{table}", sink), table


def shard_of(world: World, table: str) -> tuple[str, bytes]:
    entry = open_manifest(world.url(table)).shards[1]
    place = join(world.url(table), entry.path)
    return place, storage.read_bytes(place)


def flips(content: bytes, part: range, count: int) -> Iterator[bytes]:
    """`content` with one bit flipped, at `count` places of `part`."""
    for position in part[:: max(1, len(part) // count)]:
        spoilt = bytearray(content)
        spoilt[position] ^= 1 << position % 8
        yield bytes(spoilt)


def parquet_parts(content: bytes) -> dict[str, range]:
    metadata = pq.read_metadata(pa.BufferReader(content))
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    columns = {metadata.row_group(1).column(n).path_in_schema: n for n in range(metadata.num_columns)}
    chunk = metadata.row_group(1).column(columns.get("label_ids.list.element", 1))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    unread = metadata.row_group(1).column(0).data_page_offset  # query_id
    return {
        "magic": range(4),
        "page header": range(start, start + 20),
        "page data": range(start + 20, start + chunk.total_compressed_size),
        "another column": range(unread, unread + 30),
        "footer": range(footer, len(content) - 8),
        "footer's length": range(len(content) - 8, len(content) - 4),
        "last magic": range(len(content) - 4, len(content)),
    }


def tar_parts(content: bytes) -> dict[str, range]:
    index = content.rindex(webdataset.END) + len(webdataset.END)
    numbers = content.index(b"\x93NUMPY")
    values = content.index(b"\n", numbers) + 1
    return {
        "tar header": range(webdataset.BLOCK),
        "npy header": range(numbers, values),
        "members": range(values, index - len(webdataset.END)),
        "end of the archive": range(index - len(webdataset.END), index),
        "index": range(index, len(content) - 20),
        "index's footer": range(len(content) - 20, len(content)),
    }


READ = {"page header", "page data", "footer", "footer's length", "last magic", "index", "index's footer"}
UNREAD = {"magic", "another column", "tar header", "npy header", "end of the archive"}


def test_a_flipped_bit_of_a_shard(case: tuple[World, str]) -> None:
    world, table = case
    place, content = shard_of(world, table)
    parts = parquet_parts(content) if place.endswith(".parquet") else tar_parts(content)
    for name, part in parts.items():
        seen = set()
        for spoilt in flips(content, part, 7):
            storage.write_bytes(place, spoilt)
            message = world.is_named_or_unread(place, table)
            seen.add(message == "unread")
            assert ("row group" in message) == (name in ("page header", "page data", "members") and message != "unread")
        assert seen in ({False} if name in READ else {True} if name in UNREAD else {False, True}, {False}, {True})
        if name in READ | UNREAD:
            assert seen == {name in UNREAD}, name


def test_a_flipped_bit_of_a_manifest(case: tuple[World, str]) -> None:
    world, table = case
    place = join(world.url(table), MANIFEST)
    content = storage.read_bytes(place)
    for spoilt in flips(content, range(len(content)), 60):
        storage.write_bytes(place, spoilt)
        with pytest.raises(TableError, match=re.escape(place)):
            world.batches()


def test_a_file_that_was_cut_off(case: tuple[World, str]) -> None:
    world, table = case
    place, content = shard_of(world, table)
    manifest = join(world.url(table), MANIFEST)
    whole = storage.read_bytes(manifest)
    for length in (0, 1, 7, len(content) // 3, len(content) - 1):
        storage.write_bytes(place, content[:length])
        assert f"damaged: {length} bytes, expected {len(content)}" in world.is_named_or_unread(place, table)
    storage.write_bytes(place, content + b"more")
    assert ("bytes, expected" in world.is_named_or_unread(place, table)) == storage.is_local(place)
    storage.write_bytes(place, content)
    for length in (0, 1, len(whole) // 2, len(whole) - 3):
        storage.write_bytes(manifest, whole[:length])
        with pytest.raises(TableError, match=re.escape(manifest)):
            world.batches()


def test_a_shard_of_another_table(case: tuple[World, str], tmp_path: Path) -> None:
    """Whole and sound in itself, and of the right length."""
    world, table = case
    place, _ = shard_of(world, table)
    data = build_data(
        "memory://damage-other", sink=world.sink, rows={"train": 40}, shards=2, labels=20, seed=7, features=9
    )
    queries = open_manifest(data.layout.queries("train"))
    build_negatives("memory://damage-other/negatives", queries, data.points["train"].positives, 20, 4, seed=9)
    url = "memory://damage-other/negatives" if table == "negatives" else data.layout.queries("train")
    other = open_manifest(url).shards[1]
    storage.write_bytes(place, storage.read_bytes(join(url, other.path)))
    assert "damaged: " in world.is_named_or_unread(place, table)
    mine = open_manifest(world.url(table))
    entry = mine.shards[1].model_copy(update={"bytes": other.bytes})
    with pytest.raises(TableError, match=re.escape(f"{place}: damaged: its ")):
        open_shard(world.url(table), entry)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("table", ["queries", "negatives"])
def test_a_table_that_goes_while_it_is_read(tmp_path: Path, table: str, threads: int) -> None:
    """Mapped files stay as they were; files not yet open are named in the error. Nothing else is ever read."""
    world = World(str(tmp_path), "parquet")
    queries = open_sources(world.layout, "train", label_texts=False, inputs="both")[0]
    source = queries.with_negatives(world.url("negatives"))
    stream = JoinedStream([source], world.labels, inputs="both", batch=16, streams=4, window_groups=1, threads=threads)
    clean = list(stream)
    stream.set_epoch(0)
    batches = iter(stream)
    seen = [next(batches)]
    for place in Path(world.url(table)).iterdir():
        storage.write_bytes(str(place), bytes(place.stat().st_size))  # made again, halfway
        place.unlink()
    try:
        seen += list(batches)
        assert len(seen) == len(clean)
    except TableError as error:
        assert "but the file is missing" in str(error)  # noqa: PT017
    assert_equal(tuple(seen), tuple(clean[: len(seen)]))


def test_a_table_that_is_cut_while_it_is_mapped_is_named(tmp_path: Path) -> None:
    """Reading the missing bytes of a map would end the process."""
    world = World(str(tmp_path), "parquet")
    source = open_sources(world.layout, "train", label_texts=False, inputs="both")[0]
    stream = JoinedStream([source], world.labels, inputs="both", batch=4, streams=1, window_groups=1, threads=0)
    batches = iter(stream)
    next(batches)
    for place in Path(world.url("queries")).glob("part-*"):
        with place.open("r+b") as file:
            file.truncate(100)
    with pytest.raises(TableError, match=r"part-.*damaged: 100 bytes, expected"):
        list(batches)


def test_a_manifest_that_is_renewed_while_its_table_is_read_changes_nothing(tmp_path: Path) -> None:
    world = World(str(tmp_path), "parquet")
    source = open_sources(world.layout, "train", label_texts=False, inputs="both")[0]
    stream = JoinedStream([source], world.labels, inputs="both", batch=4, streams=4, window_groups=1, threads=0)
    clean = list(stream)
    stream.set_epoch(0)
    batches = iter(stream)
    seen = [next(batches)]
    manifest = open_manifest(world.url("queries"))
    publish(world.url("queries"), manifest.model_copy(update={"parameters": {"other": 1}}))
    assert_equal((*seen, *batches), tuple(clean))
