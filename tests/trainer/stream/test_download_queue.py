"""Downloads: in order, within its bound, each item once for each time that it is named, and no thread left."""

import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import threads_named
from trainer.stream.row_groups import THREAD, DownloadQueue


class Store:
    """Counts what is asked for, and how much of it at once."""

    def __init__(self, limit: int, threads: int = 3, seconds: float = 0.0) -> None:
        self.calls: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = seconds
        self.queue = DownloadQueue(self.download, lambda item: item, threads, limit)

    def download(self, item: int) -> str:
        self.calls.append(item)
        assert self.gate.wait(10)
        time.sleep(self.seconds)
        if item == 13:
            raise OSError("13 is not there")
        return f"bytes of {item}"


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 20), st.integers(1, 3), st.data())
def test_whatever_is_named_is_there_or_left_to_the_reader(
    items: list[int], limit: int, threads: int, data: st.DataObject
) -> None:
    store = Store(limit, threads)
    try:
        store.queue.request(items)
        for item in data.draw(st.permutations([*items, 10])):
            assert store.queue.take(item) in (f"bytes of {item}", None)
        assert Counter(store.calls) - Counter(items) == Counter()
        # All is taken: nothing is held, and there is room for as much again.
        calls = len(store.calls)
        store.queue.request([9])
        assert store.queue.take(9) == "bytes of 9"
        assert store.calls[calls:] == [9]
    finally:
        store.queue.close()
    assert threads_named(THREAD) == []


def test_items_read_in_the_order_they_are_named_are_each_downloaded_in_order() -> None:
    store = Store(limit=8, threads=1)
    items = [3, 5, 4, 3, 9, 2, 2, 1]
    store.queue.request(items[:5])
    store.queue.request(items[5:])
    assert [store.queue.take(item) for item in items] == [f"bytes of {item}" for item in items]
    # The second 3 came while the first was still held or after it, the second 2 with the first.
    assert store.calls in ([3, 5, 4, 3, 9, 2, 1], [3, 5, 4, 9, 2, 1])
    store.queue.close()


def test_no_more_is_begun_than_the_bound_allows() -> None:
    store = Store(limit=10, threads=9)
    store.gate.clear()
    store.queue.request([4, 5, 3, 1])
    time.sleep(0.05)
    assert sorted(store.calls) == [4, 5]
    assert store.queue.take(1) is None  # not begun: its reader gets it sooner alone
    store.gate.set()
    assert store.queue.take(4) == "bytes of 4"
    assert store.queue.take(3) == "bytes of 3"
    store.queue.request([99, 98])  # more than the bound allows: one at a time
    assert store.queue.take(5) == "bytes of 5"
    assert store.queue.take(99) == "bytes of 99"
    assert store.queue.take(98) == "bytes of 98"
    store.queue.close()


def test_an_error_reaches_whoever_takes_and_nobody_else() -> None:
    store = Store(limit=99)
    store.queue.request([13, 1, 13])
    assert store.queue.take(1) == "bytes of 1"
    for _ in range(2):
        with pytest.raises(OSError, match="13 is not there"):
            store.queue.take(13)
    store.queue.close()


def test_closed_it_has_no_thread_and_can_be_used_again() -> None:
    store = Store(limit=99, threads=2, seconds=0.01)
    for _ in range(2):
        store.queue.request(range(1, 12))
        assert store.queue.take(1) == "bytes of 1"
        assert threads_named(THREAD)
        store.queue.close()
        assert threads_named(THREAD) == []
        assert store.queue.take(2) is None
    assert len(store.calls) < 22  # what waited was called off
    store.queue.close()
