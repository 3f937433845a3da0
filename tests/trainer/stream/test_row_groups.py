"""Row groups as the stream reads them: fetched ahead or not, from any store, the same rows; each byte fetched once."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from schemas import arrow, storage
from schemas.shard_files.shards import Sink
from schemas.storage import join
from tests.builders import build_data, build_negatives
from tests.laws import assert_equal
from tests.processes import threads_named
from tests.schemas.flaky import FlakyFileSystem
from trainer.stream import JoinedStream
from trainer.stream.row_groups import THREAD, ReadOptions, RowGroups, ShardPool
from trainer.stream.sources import Source, open_sources

SINKS: list[Sink] = ["parquet", "webdataset"]


def sources_at(root: str, sink: Sink) -> tuple[list[Source], pa.DataType]:
    """Queries joined with a table, and label texts, as sources at `root`."""
    data = build_data(join(root, "data"), sink=sink, features=25)
    queries, labels = open_sources(data.layout, "train", label_texts=True, inputs="both")
    build_negatives(
        join(root, "negatives"), queries.table.manifest, data.points["train"].positives, data.labels, width=4
    )
    return [queries.with_negatives(join(root, "negatives")), labels], arrow.label_type(data.labels)


@pytest.fixture(params=SINKS)
def groups(request: pytest.FixtureRequest) -> RowGroups:
    """On a store that is not a local disk."""
    sources, label_type = sources_at(f"flaky://source/{request.param}", request.param)
    FlakyFileSystem.fail(0)
    return RowGroups(sources, label_type, "both", ReadOptions(threads=3))


def read_all(groups: RowGroups) -> list[pa.Table]:
    return [groups.read(group) for group in range(len(groups.group_rows))]


def requests() -> int:
    return FlakyFileSystem.attempts


def test_fetched_ahead_the_rows_are_the_same_and_each_is_asked_for_once(groups: RowGroups) -> None:
    plain = read_all(groups)
    alone, count = requests(), len(plain)
    again = RowGroups(*groups.__reduce__()[1])
    FlakyFileSystem.fail(0)
    again.request(range(count))
    assert read_all(again) == plain
    assert requests() == alone
    opened = 3 + 3 + 2  # shards of the queries, of their negatives, and of the labels
    rows = sum(source.rows for source in groups.sources)
    joined = len([group for group in range(count) if groups.first_row[group] < groups.sources[0].rows])
    assert alone == opened + count + joined
    assert sum(table.num_rows for table in plain) == rows
    again.close()
    assert threads_named(THREAD) == []


def test_threads_read_what_others_fetch(groups: RowGroups) -> None:
    plain = read_all(groups)
    order = [*range(len(plain))] * 3
    with ThreadPoolExecutor(4) as pool:
        groups.request(order)
        for group, table in zip(order, pool.map(groups.read, order), strict=True):
            assert table == plain[group]
    groups.close()
    assert threads_named(THREAD) == []


def test_a_read_that_is_given_up_leaves_nothing_and_does_not_wait_out_its_retries(
    groups: RowGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SLOWEST_SECONDS", 8.0)
    groups.request([0])
    groups.read(0)
    FlakyFileSystem.fail(10**6)
    groups.request(range(1, 10))
    closing = threading.Thread(target=groups.close)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    assert threads_named(THREAD) == []
    FlakyFileSystem.fail(0)
    assert groups.read(1).num_rows == groups.group_rows[1]


def test_on_a_local_disk_there_is_nothing_to_fetch(tmp_path: Path) -> None:
    sources, label_type = sources_at(str(tmp_path), "parquet")
    groups = RowGroups(sources, label_type, "both")
    groups.request(range(len(groups.group_rows)))
    assert threads_named(THREAD) == []
    assert sum(table.num_rows for table in read_all(groups)) == groups.first_row[-1]


def open_files(folder: Path) -> list[str]:
    """Files under `folder` that this process has open."""
    handles = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return [str(path) for path in (handle.resolve() for handle in handles) if folder in path.parents]


@pytest.mark.parametrize(("files", "parsed"), [(1, 1 << 30), (999, 0)])
def test_shards_are_closed_where_more_are_open_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, parsed: int
) -> None:
    sources, label_type = sources_at(str(tmp_path), "parquet")
    plain = read_all(RowGroups(sources, label_type, "both"))
    monkeypatch.setattr(ShardPool, "FILES", files)
    monkeypatch.setattr(ShardPool, "BYTES", parsed)
    groups = RowGroups(sources, label_type, "both")
    assert read_all(groups) == plain
    assert len(open_files(tmp_path)) == 1
    groups.close()
    assert open_files(tmp_path) == []


def test_pickled_it_reads_the_same(groups: RowGroups) -> None:
    plain = read_all(groups)
    assert read_all(pickle.loads(pickle.dumps(groups))) == plain


def test_forked_while_it_fetches_it_fetches_for_itself(groups: RowGroups) -> None:
    groups.request(range(5))
    plain = groups.read(0)
    child = os.fork()
    if not child:
        same = False
        try:
            groups.request([0])
            same = groups.read(0) == plain
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    groups.close()


@pytest.mark.parametrize(("streams", "window_groups"), [(8, 2), (2, 1), (1, 3)])
def test_a_stream_asks_for_each_byte_once_and_holds_nothing_back(
    groups: RowGroups, streams: int, window_groups: int
) -> None:
    """Bytes that are fetched and never read would fill the room of others."""
    plain = JoinedStream(groups.sources, 30, inputs="both", batch=8, streams=streams, window_groups=window_groups)
    FlakyFileSystem.fail(0)
    held: list[int] = []

    class Watched(RowGroups):
        def close(self) -> None:
            if self._downloads is not None:
                held.append(self._downloads._held + len(self._downloads._waiting))
            super().close()

    watched = JoinedStream(groups.sources, 30, inputs="both", batch=8, streams=streams, window_groups=window_groups)
    watched._groups = Watched(groups.sources, arrow.label_type(30), "both")
    for expected, other in zip(plain, watched, strict=True):
        assert_equal(expected, other)
    assert held == [0]
    assert threads_named(THREAD) == []
