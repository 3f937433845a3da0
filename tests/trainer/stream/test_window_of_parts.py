"""Windows of a version: which parts they name, and how often their rows are dealt."""

from collections import Counter

import numpy as np
import pytest

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.versions.version import parts_of
from tests.pipelines.test_versions import SEQUENCE, make
from trainer.stream import JoinedStream, Source, open_sources
from trainer.stream.window_of_parts import choose_parts, in_window


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    data = make(tmp_path_factory.mktemp("window"), SEQUENCE)[-1]
    return open_sources(DataLayout(data), "train", label_texts=False)


@pytest.mark.parametrize(
    ("window", "names"),
    [
        ("", ["0001", "0002", "0003"]),
        ("last 1", ["0003"]),
        ("last 2", ["0002", "0003"]),
        ("last 9", ["0001", "0002", "0003"]),
        ("000[13]", ["0001", "0003"]),
        (["0002"], ["0002"]),
    ],
)
def test_a_window_names_parts(sources: list[Source], window: str | list[str], names: list[str]) -> None:
    assert [part.name for part in choose_parts(sources[0].table, window)] == names


@pytest.mark.parametrize(
    ("window", "message"), [("2026-*", "no such part"), (["x"], "has no part x; it has 0001, 0002")]
)
def test_a_window_without_a_part_is_refused(sources: list[Source], window: str | list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        in_window(sources, window, 0.0)


def dealt(sources: list[Source], epochs: int, ranks: int = 1) -> list[list[int]]:
    """Row ids of each epoch, those of all ranks laid end to end by step."""
    rows = []
    for epoch in range(epochs):
        streams = [JoinedStream(sources, 9, batch=4, streams=2, rank=rank, ranks=ranks) for rank in range(ranks)]
        for stream in streams:
            stream.set_epoch(epoch)
        steps = zip(*streams, strict=True)
        rows.append([row for step in steps for batch in step for row in batch.rows.tolist()])
    return rows


def test_a_window_deals_the_rows_of_its_parts_once(sources: list[Source]) -> None:
    window = in_window(sources, "last 2", 0.0)
    total = sum(part.rows for part in parts_of(sources[0].table.manifest)[1:])
    assert [sorted(rows) for rows in dealt(window, 2)] == [list(range(total))] * 2


def test_older_parts_are_dealt_less_often(sources: list[Source]) -> None:
    window = in_window(sources, "", 1.0)
    edges = np.cumsum([0, *(source.rows for source in window)])
    epochs = 8
    counts = Counter(row for rows in dealt(window, epochs) for row in rows)
    for age, part in enumerate(reversed(range(len(window)))):
        rows = window[part].rows
        times = sum(counts[row] for row in range(edges[part], edges[part + 1]))
        assert times == epochs * round(rows * 0.5**age)


def test_batches_of_a_window_are_the_same_on_any_number_of_ranks(sources: list[Source]) -> None:
    window = in_window(sources, "", 2.0)
    assert dealt(window, 2) == dealt(window, 2, ranks=2)
