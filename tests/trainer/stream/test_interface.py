"""The stream in other people's hands: DataLoader workers, StatefulDataLoader, pickles, tensors."""

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from schemas.errors import InputError, TableError
from tests.builders import SmallData, batch_of, build_data, build_negatives
from tests.laws import assert_equal, assert_every_row_once
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import Batch, JoinedStream, Source, open_sources

torchdata = pytest.importorskip("torchdata.stateful_dataloader")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("interface") / "data"), features=25)


def table(data: SmallData, name: str, seed: int) -> str:
    """A negatives table for the queries."""
    url = f"{data.layout.root}-{name}"
    queries = open_sources(data.layout, "train", False)[0].table.manifest
    build_negatives(url, queries, data.points["train"].positives, data.labels, 3, seed=seed)
    return url


@pytest.fixture(scope="module")
def sources(data: SmallData) -> list[Source]:
    queries, labels = open_sources(data.layout, "train", True, "both")
    return [queries.with_negatives(table(data, "first", 0)), labels]


@pytest.fixture(scope="module")
def newer(data: SmallData, sources: list[Source]) -> list[Source]:
    return [sources[0].with_negatives(table(data, "second", 1)), sources[1]]


def test_sources_without_the_inputs_are_refused(data: SmallData, sources: list[Source]) -> None:
    with pytest.raises(InputError, match=r"no column dense, which encoder\.inputs = 'dense' needs"):
        open_stream(data, sources, inputs="dense")


def open_stream(data: SmallData, sources: list[Source], epoch: int = 1, **options: object) -> JoinedStream:
    plan = Planner(Negatives(random=7, hard=2), data.labels)
    arguments = {"inputs": "both", "batch": 8, "streams": 4, "window_groups": 2, "threads": 0, "plan": plan, **options}
    stream = JoinedStream(sources, data.labels, **arguments)
    stream.set_epoch(epoch)
    return stream


def assert_same(got: list[Batch], expected: list[Batch]) -> None:
    assert [batch.step for batch in got] == [batch.step for batch in expected]
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)


def loader(stream: JoinedStream, workers: int, kind: type = DataLoader, **options: object) -> DataLoader:
    return kind(stream, batch_size=None, num_workers=workers, **options)


@pytest.mark.parametrize(("workers", "threads"), [(0, 2), (1, 0), (2, 1), (3, 0)])
def test_workers_deal_the_order_without_workers(
    data: SmallData, sources: list[Source], workers: int, threads: int
) -> None:
    expected = list(open_stream(data, sources))
    assert len(expected) > 6
    stream = open_stream(data, sources, threads=threads)
    assert_same(list(loader(stream, workers)), expected)
    assert_every_row_once([batch.rows for batch in expected], stream.rows)


def test_a_spawned_worker_deals_it_too(data: SmallData, sources: list[Source]) -> None:
    expected = list(open_stream(data, sources))
    got = list(loader(open_stream(data, sources, threads=1), 1, multiprocessing_context="spawn"))
    assert_same(got, expected)


def test_batches_cross_processes_in_shared_memory_that_is_gone_with_them(
    data: SmallData, sources: list[Source]
) -> None:
    iterator = iter(loader(open_stream(data, sources), 2))
    processes = [os.getpid(), *(worker.pid for worker in iterator._workers)]
    batches = list(iterator)
    for batch in batches:
        arrays = (batch.rows, batch.positives, batch.hard, batch.inputs.features.values, batch.candidates.ids)
        assert all(mapped_as_shared(array) for array in arrays)
        assert max(array.ctypes.data for array in arrays) - min(array.ctypes.data for array in arrays) < 1 << 20
    assert_same(batches, list(open_stream(data, sources)))
    names = [f"torch_{process}_" for process in processes]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(names))]


def test_batches_cross_processes_without_room_in_shared_memory(data: SmallData, sources: list[Source]) -> None:
    """They were lost, without an error, and the epoch was short."""
    expected = list(open_stream(data, sources))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            if not mount_shared_memory(b"size=1m"):
                status = 2
            else:
                assert_same(list(loader(open_stream(data, sources), 1, worker_init_fn=fill_shared_memory)), expected)
                status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 2:
        pytest.skip("no file system can be mounted here")
    assert status == 0


def mount_shared_memory(options: bytes) -> bool:
    """Give this process a /dev/shm of its own."""
    libc = ctypes.CDLL(None)
    private, recursive, own_mounts = 1 << 18, 1 << 14, 0x00020000
    return (
        libc.unshare(own_mounts) == 0
        and libc.mount(b"none", b"/", None, ctypes.c_ulong(private | recursive), None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), options) == 0
    )


def fill_shared_memory(_: int) -> None:
    with contextlib.suppress(OSError), open("/dev/shm/all", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def mapped_as_shared(array: np.ndarray) -> bool:
    """Return true where the array lies in a mapping that processes share."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags = line.split()[:2]
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return flags.endswith("s")
    return False


def test_an_epoch_given_up_leaves_no_worker(data: SmallData, sources: list[Source]) -> None:
    iterator = iter(loader(open_stream(data, sources, threads=2), 2))
    next(iterator)
    workers = list(iterator._workers)
    del iterator
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_workers(
    data: SmallData, sources: list[Source], newer: list[Source], persistent: bool
) -> None:
    stream = open_stream(data, sources, epoch=0)
    batches = loader(stream, 2, persistent_workers=persistent)
    for epoch, adopted in ((0, sources), (1, None), (2, newer), (3, sources)):
        stream.set_epoch(epoch, adopted)
        expected = list(open_stream(data, {2: newer}.get(epoch, sources), epoch))
        assert_same(list(batches), expected)
    state = open_stream(data, sources, epoch=7).state_dict(after=expected[2])
    stream.load_state_dict(state)
    assert_same(list(batches), expected[3:])


def test_persistent_workers_refuse_what_they_cannot_follow(data: SmallData, sources: list[Source]) -> None:
    other = build_data(f"{data.layout.root}-other", features=25, seed=3)
    stream = open_stream(data, sources)
    batches = loader(stream, 1, persistent_workers=True)
    list(batches)
    stream.set_epoch(2, open_sources(other.layout, "train", True, "both"))
    with pytest.raises(InputError, match="set_epoch changed the tables: make a new DataLoader"):
        list(batches)


def test_persistent_workers_notice_a_table_that_changed(data: SmallData, sources: list[Source]) -> None:
    changing = [sources[0].with_negatives(table(data, "changing", 5)), sources[1]]
    stream = open_stream(data, sources)
    batches = loader(stream, 1, persistent_workers=True)
    list(batches)
    table(data, "changing", 6)
    stream.set_epoch(2, changing)
    with pytest.raises(TableError, match=r"-changing: a table changed while it was in use"):
        list(batches)


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [
        (0, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        (2, False),
        pytest.param(3, False, marks=pytest.mark.slow),
        (2, True),
    ],
)
def test_a_stateful_loader_resumes_exactly(
    data: SmallData, sources: list[Source], workers: int, persistent: bool
) -> None:
    options = {"kind": torchdata.StatefulDataLoader, "persistent_workers": persistent}
    expected = list(open_stream(data, sources, threads=0))
    for done in (0, 3, len(expected)):
        first = loader(open_stream(data, sources), workers, **options)
        iterator = iter(first)
        assert_same([next(iterator) for _ in range(done)], expected[:done])
        state = pickle.loads(pickle.dumps(first.state_dict()))
        del iterator, first
        stream = open_stream(data, sources, epoch=0)
        resumed = loader(stream, workers, **options)
        resumed.load_state_dict(state)
        assert_same(list(resumed), expected[done:])
        stream.set_epoch(2)  # the epoch after it is whole
        assert_same(list(resumed), list(open_stream(data, sources, epoch=2)))


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (2, 3)])
def test_the_state_after_a_batch_suits_any_number_of_workers(
    data: SmallData, sources: list[Source], before: int, after: int
) -> None:
    expected = list(open_stream(data, sources))
    first = open_stream(data, sources)
    for batch in loader(first, before):
        if batch.step == 4:
            break
    resumed = open_stream(data, sources, epoch=0)
    resumed.load_state_dict(first.state_dict(after=batch))
    assert_same(list(loader(resumed, after)), expected[5:])


def test_a_workers_state_elsewhere_is_refused(data: SmallData, sources: list[Source]) -> None:
    stream = open_stream(data, sources)
    with pytest.raises(
        InputError, match=r"belongs to worker 1 of 2\. Resume with the same number .* state_dict\(after=batch\)"
    ):
        stream.load_state_dict({**stream.state_dict(), "worker": 1, "workers": 2})


def test_copies_of_streams_and_batches(data: SmallData, sources: list[Source]) -> None:
    stream = open_stream(data, sources)
    expected = list(stream)
    stream.set_epoch(1)
    assert_same(list(pickle.loads(pickle.dumps(stream))), expected)
    for batch in expected:
        for same in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
            assert_equal(same, batch)
    moved = expected[0].to("cpu")
    assert torch.equal(pickle.loads(pickle.dumps(moved)).hard, moved.hard)


# Tensors


def test_a_batch_as_tensors_is_the_same_numbers(data: SmallData, sources: list[Source]) -> None:
    for batch in open_stream(data, sources):
        moved = batch.to("cpu", non_blocking=True)
        assert isinstance(moved, Batch)
        assert (moved.epoch, moved.step, len(moved)) == (batch.epoch, batch.step, len(batch))
        pairs = [
            (moved.rows, batch.rows),
            (moved.positives, batch.positives),
            (moved.positive_offsets, batch.positive_offsets),
            (moved.hard, batch.hard),
            *zip(moved.inputs.tokens, batch.inputs.tokens, strict=True),
            *zip(moved.inputs.features, batch.inputs.features, strict=True),
            *(
                (getattr(moved.candidates, name), array)
                for name, array in batch.candidates._asdict().items()
                if name != "drawn"  # for a device that merges labels
            ),
        ]
        for tensor, array in pairs:
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(tensor.numpy(), array)
        assert moved.inputs.tokens.values.dtype == torch.int64  # uint16 in storage
        assert torch.equal(moved.to("cpu").hard, moved.hard)


def rows() -> Iterator[tuple[list[list[int]], int | None, list[list[int]], list[int]]]:
    yield [[5, 6], [], [7]], None, [[5, 6], [9, 9], [7, 9]], [2, 0, 1]
    yield [[5, 6, 8], [4], [1, 2]], 2, [[5, 6], [4, 9], [1, 2]], [2, 1, 2]
    yield [[], []], None, [[9], [9]], [0, 0]
    yield [], None, [], []


@pytest.mark.parametrize(("tokens", "most", "ids", "lengths"), rows())
def test_padding(tokens: list, most: int | None, ids: list, lengths: list) -> None:
    batch = batch_of([[0]] * len(tokens), tokens=tokens)
    for some_batch in (batch, batch.to("cpu")):
        padded = some_batch.padded(pad=9, most=most, dtype=torch.int32)
        assert padded.input_ids.dtype == torch.int32
        assert (padded.input_ids.tolist(), padded.lengths.tolist()) == (ids, lengths)
        mask = [[position < length for position in range(padded.input_ids.shape[1])] for length in lengths]
        assert padded.attention_mask.tolist() == mask
    bare = Batch(0, 0, np.arange(2), type(batch.inputs)(), np.arange(0), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="has no tokens"):
        bare.padded()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_pinned_batches_reach_a_gpu(data: SmallData, sources: list[Source]) -> None:
    expected = list(open_stream(data, sources))
    for batch, other in zip(loader(open_stream(data, sources), 2, pin_memory=True), expected, strict=True):
        assert batch.hard.is_pinned()
        assert batch.candidates.ids.is_pinned()
        moved = batch.to("cuda", non_blocking=True)
        np.testing.assert_array_equal(moved.hard.cpu().numpy(), other.hard)
        np.testing.assert_array_equal(moved.inputs.tokens.values.cpu().numpy(), other.inputs.tokens.values)
