"""Assertions of laws that several parts promise, each written once."""

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from schemas.ragged import Ragged, SparseRows
from trainer.inputs import Inputs
from trainer.stream import Batch
from trainer.stream.order import EpochOrder


def assert_equal(actual: Any, expected: Any) -> None:
    """Check that both are equal field by field, arrays bit for bit."""
    if hasattr(actual, "__dataclass_fields__"):
        assert type(actual) is type(expected)
        for name in actual.__dataclass_fields__:
            assert_equal(getattr(actual, name), getattr(expected, name))
    elif isinstance(actual, np.ndarray):
        assert isinstance(expected, np.ndarray)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    elif isinstance(actual, tuple):
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_equal(actual_item, expected_item)
    else:
        assert actual == expected


def assert_exact_resume(make: Callable[[], Any]) -> list[Any]:
    """Check that the rest of a stream is the same after its state is restored into a new iterable, before any element.

    `make()` gives an iterable with `state_dict` and `load_state_dict`. Returns the elements.
    """
    whole = make()
    states, elements = [whole.state_dict()], []
    for element in whole:
        elements.append(element)
        states.append(whole.state_dict())
    for done, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest = list(resumed)
        assert len(rest) == len(elements) - done
        for got, expected in zip(rest, elements[done:], strict=True):
            assert_equal(got, expected)
    return elements


def assert_same_global_batches(make: Callable[[int, int, int], Sequence[Batch]]) -> list[Batch]:
    """Check that ranks, which divide the streams or not, with 0 to 3 threads read, together, the batches of one rank.

    `make(rank, ranks, threads)` gives a rank's batches of an epoch. Returns the global ones.
    """
    whole = list(make(0, 1, 0))
    for ranks, threads in ((1, 1), (1, 2), (1, 3), (2, 0), (2, 3), (3, 2), (5, 0), (8, 1)):
        parts = [list(make(rank, ranks, threads)) for rank in range(ranks)]
        assert {len(part) for part in parts} == {len(whole)}
        for batch, *rank_batches in zip(whole, *parts, strict=True):
            assert_equal(concatenate(rank_batches), batch)
    return whole


def concatenate(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches in their order; candidates differ by rank, and are left out."""

    def ragged(*columns: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Return (values, ..., offsets) of all parts."""
        *values, offsets = zip(*columns, strict=True)
        lengths = np.concatenate([np.diff(column_offsets) for column_offsets in offsets])
        return *map(np.concatenate, values), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    tokens = [part.inputs.tokens for part in parts if part.inputs.tokens is not None]
    features = [part.inputs.features for part in parts if part.inputs.features is not None]
    positives, offsets = ragged(*[(part.positives, part.positive_offsets) for part in parts])
    hard = [part.hard for part in parts if part.hard is not None]
    return Batch(
        parts[0].epoch,
        parts[0].step,
        np.concatenate([part.rows for part in parts]),
        Inputs(
            Ragged(*ragged(*tokens)) if tokens else None,
            SparseRows(*ragged(*features)) if features else None,
        ),
        positives,
        offsets,
        np.concatenate(hard) if hard else None,
    )


def assert_every_row_once(rows: Sequence[np.ndarray], count: int) -> None:
    """Check that the row ids of the batches of an epoch are [0, count), each once."""
    together = np.concatenate([*rows, np.empty(0, np.int64)])
    np.testing.assert_array_equal(np.sort(together), np.arange(count))


def assert_every_row_by_weight(
    epochs: Sequence[Sequence[np.ndarray]], counts: Sequence[int], weights: Sequence[float]
) -> None:
    """Check that each row of a source comes floor(w) times in an epoch, and the right number of rows once more.

    `epochs`: row ids of the batches of epochs 0, 1, ...; `counts` and `weights` of each source. Of a source of N rows,
    k = round((w - floor(w)) * N) come once more; within each floor(N / k) epochs none of them twice.
    """
    first = 0
    total = sum(math.floor(w) * n + round((w - math.floor(w)) * n) for n, w in zip(counts, weights, strict=True))
    together = [np.concatenate([*epoch, np.empty(0, np.int64)]) for epoch in epochs]
    assert [len(rows) for rows in together] == [total] * len(together)
    for count, weight in zip(counts, weights, strict=True):
        times = np.stack([np.bincount(rows, minlength=first + count)[first : first + count] for rows in together])
        more = times - math.floor(weight)
        assert set(np.unique(more)) <= {0, 1}
        extra = round((weight - math.floor(weight)) * count)
        assert (more.sum(1) == extra).all()
        if extra:
            block = count // extra
            for start in range(0, len(more), block):
                assert more[start : start + block].sum(0).max(initial=0) <= 1
        first += count


def assert_no_thread_is_left(name: str, before: set[int], iterate: Callable[[], Iterator[Any]]) -> None:
    """Check that an iteration that stops after one element leaves no thread called `name` behind."""
    iterator = iterate()
    next(iterator)
    assert any(thread.name.startswith(name) for thread in threading.enumerate())
    del iterator
    gc.collect()
    left = [t.name for t in threading.enumerate() if t.name.startswith(name) and t.ident not in before]
    assert left == []


def batch_rows(order: EpochOrder, step: int, streams: range, first_row: np.ndarray) -> np.ndarray:
    """Row ids of batch `step` from `streams`, by the definition: the law that readers are tested against.

    `first_row` [M + 1]: id of the first row of each row group in storage order.
    """
    window, within = divmod(step, order.steps_per_window)
    parts = []
    for stream in streams:
        segments = order.segments(stream, window)
        ids = np.concatenate(
            [np.arange(s.start, s.stop) + first_row[s.group] for s in segments] or [np.empty(0, np.int64)]
        )
        rows, ends = order.take(stream, window)
        parts.append(ids[rows[ends[within] : ends[within + 1]]])
    return np.concatenate(parts)
