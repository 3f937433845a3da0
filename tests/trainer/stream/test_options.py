"""Options of the public classes of the stream: any whole numbers give every row once, or one error with the reason."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from schemas.errors import InputError
from tests.builders import SmallData, build_data
from tests.laws import assert_every_row_once
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import JoinedStream, Source, open_sources
from trainer.stream.sources import RowShare

ROWS = 41


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://options", rows={"train": ROWS}, shards=2, row_group_rows=7)


@pytest.fixture(scope="module")
def source(data: SmallData) -> Source:
    return open_sources(data.layout, "train", label_texts=False)[0]


whole = some.integers(-2, 12)
numbers = some.one_of(whole, whole.map(np.int64))


@given(numbers, numbers, numbers, some.sampled_from(["keep", "drop", "kep", None]))
def test_every_row_is_dealt_once_or_the_sizes_are_refused(
    source: Source, batch: Any, streams: Any, ranks: Any, tail: Any
) -> None:
    valid = batch >= 1 and streams >= 1 and batch % streams == 0 and 1 <= ranks <= streams and tail in ("keep", "drop")
    sizes = {"batch": batch, "streams": streams, "ranks": ranks, "tail": tail}
    if not valid:
        with pytest.raises(InputError):
            JoinedStream([source], 30, **sizes)
        return
    parts = [[*JoinedStream([source], 30, rank=rank, **sizes)] for rank in range(ranks)]
    rows = [batch.rows for part in parts for batch in part]
    if tail == "keep":
        assert_every_row_once(rows, ROWS)
    assert {sum(len(part[step].rows) for part in parts) for step in range(len(parts[0]) - 1)} <= {int(batch)}
    for rank in (-1, ranks, ranks + 3):
        with pytest.raises(InputError, match="rank"):
            JoinedStream([source], 30, rank=rank, **sizes)


NO_NUMBERS = (None, True, 2.5, "x", float("nan"), [1])
WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    **{
        name: (lambda stream, value, name=name: stream(**{name: value}), (*NO_NUMBERS, *more), name)
        for name, more in {
            **dict.fromkeys(("batch", "streams", "window_groups", "ranks"), (0, -8)),
            **dict.fromkeys(("rank", "threads", "seed"), (-1,)),
        }.items()
    },
    **{
        name: (lambda stream, value, name=name: stream(**{name: value}), ("x", 3, None, *more), name)
        for name, more in {"inputs": (), "damaged": (), "batches": (), "clusters": ()}.items()
    },
    "plan": (lambda stream, value: stream(plan=value), (3, "x"), "plan"),
    "reading": (lambda stream, value: stream(reading=value), (3, "x"), "reading"),
    "unknown": (lambda stream, value: stream(**{value: 1}), ("batchs",), "batchs"),
    "labels": (lambda stream, value: stream(labels=value), (*NO_NUMBERS, 0, -1), "labels"),
    "sources": (lambda stream, value: stream(sources=value), ([], None, "x", [None], 3), "sources"),
    "epoch": (lambda stream, value: stream().set_epoch(value), (*NO_NUMBERS, -1), "epoch"),
    "state": (lambda stream, value: stream().load_state_dict(value), (None, 3, {}, {"epoch": 0}), "cannot resume"),
    "state's step": (
        lambda stream, value: stream().load_state_dict({**stream().state_dict(), "step": value}),
        (*NO_NUMBERS, -1),
        "step",
    ),
    "state's epoch": (
        lambda stream, value: stream().load_state_dict({**stream().state_dict(), "epoch": value}),
        (*NO_NUMBERS, -1),
        "epoch",
    ),
    "state's worker": (
        lambda stream, value: stream().load_state_dict({**stream().state_dict(), "worker": value}),
        (0, None),
        "belongs to worker",
    ),
    "weight": (
        lambda stream, value: Source("a", None, weight=value),
        (None, True, "x", float("nan"), 0, 1001),
        "a weight of",
    ),  # type: ignore[arg-type]
    "share": (
        lambda stream, value: Source("a", None, share=RowShare(*value)),  # type: ignore[arg-type]
        ((0.9, 0.1), (-1, 1), (0, 2), (0, float("nan")), ("a", 1), (None, 1), (False, True)),
        "0 <= start <= stop <= 1",
    ),
    "planner": (lambda stream, value: Planner(Negatives(), value), (*NO_NUMBERS, 0, -1), "labels"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_size_is_one_error_that_names_it(name: str, source: Source) -> None:
    make, values, words = WRONG[name]

    def stream(**options: Any) -> JoinedStream:
        return JoinedStream(**{"sources": [source], "labels": 30, "batch": 8, "streams": 4, **options})

    for value in values:
        with pytest.raises(InputError, match=words):
            make(stream, value)
