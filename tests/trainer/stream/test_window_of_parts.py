"""Windows of a version: which parts they name, and how often their rows are dealt, on any ranks and after a resume."""

import fnmatch
import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.layout import DataLayout, source_of_part
from schemas.shares import ALL_ROWS
from schemas.table import PARTS, PartTable, Table
from tests.builders import SmallData, build_data
from tests.laws import assert_every_row_by_weight, assert_exact_resume, assert_same_global_batches
from tests.pipelines.test_versions import SEQUENCE, make, rows_of
from trainer.evaluation.evaluate import label_statistics
from trainer.methods.sections import Data
from trainer.settings.data_statistics import measure
from trainer.stream import JoinedStream, Source, open_sources
from trainer.stream.sources import Replay, select_window

SHARDS = 12


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> DataLayout:
    return DataLayout(make(tmp_path_factory.mktemp("window"), SEQUENCE)[-1])


@pytest.fixture(scope="module")
def sources(version: DataLayout) -> list[Source]:
    return open_sources(version, "train", label_texts=False)


WINDOWS = [
    ("", ["0001", "0002", "0003"]),
    ("last 1", ["0003"]),
    ("last 2", ["0002", "0003"]),
    ("last 9", ["0001", "0002", "0003"]),
    ("000[13]", ["0001", "0003"]),
    (["0002"], ["0002"]),
]


@pytest.mark.parametrize(("window", "names"), WINDOWS)
def test_a_window_names_parts(sources: list[Source], window: str | list[str], names: list[str]) -> None:
    table = sources[0].table
    assert [part.name for part in table.choose_parts(window)] == names


@pytest.mark.parametrize(
    ("window", "message"), [("2026-*", "no such part"), (["x"], "has no part x; it has 0001, 0002")]
)
def test_a_window_without_a_part_is_refused(sources: list[Source], window: str | list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        select_window(sources, window)


@pytest.mark.parametrize(("window", "names"), WINDOWS)
def test_rows_of_parts_are_a_table(version: DataLayout, window: str | list[str], names: list[str]) -> None:
    table = open_sources(version, "train", label_texts=False)[0].table
    every = rows_of(version.queries("train"))
    edges = np.cumsum([0, *(part.rows for part in table.parts)])
    ids = [row for name in names for row in range(edges[int(name) - 1], edges[int(name)])]
    rows = table.of_parts(table.choose_parts(window))
    assert rows.rows == len(ids)
    if rows.manifest.id_range is not None:
        assert list(range(*rows.manifest.id_range)) == ids
    assert [(part.name, part.rows) for part in rows.parts] == [
        (part.name, part.rows) for part in table.parts if part.name in names
    ]
    frequency = np.bincount([label for row in ids for label in every[row]["label_ids"]], minlength=9)
    statistics = label_statistics(version, Data(parts=window))
    assert statistics.frequency.tolist() == frequency.tolist()
    facts = measure(version, "train", ALL_ROWS, False, window)
    assert (facts.queries, facts.pairs) == (len(ids), frequency.sum())
    assert facts.median_frequency == np.median(frequency[frequency > 0])


def test_sources_of_a_window_are_parts_by_name(sources: list[Source]) -> None:
    table = sources[0].table
    for source in select_window(sources, "last 2"):
        (part,) = (part for part in table.parts if source_of_part("queries", part.name) == source.name)
        assert table.of_parts([part]).digest == source.table.digest


# Random windows over a table whose shards are dealt to parts


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://windows", rows={"train": 90}, shards=SHARDS)


class Case(NamedTuple):
    """A window over parts that begin at shards `starts`; what is dealt of it."""

    starts: list[int]
    window: str | list[str]
    trained: list[str] | None
    times: float
    batch: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    starts = sorted({0, *draw(st.sets(st.integers(1, SHARDS - 1), max_size=6))})
    names = [f"d{number}" for number in range(len(starts))]
    some = st.lists(st.sampled_from(names), min_size=1, unique=True)
    windows = st.one_of(st.just(""), st.integers(1, 9).map("last {}".format), some, st.just("d[02468]"))
    trained = draw(st.one_of(st.none(), some))
    return Case(starts, draw(windows), trained, draw(st.floats(0.05, 1)), 8 * draw(st.integers(1, 3)))


def dealt_by(data: SmallData, case: Case) -> tuple[list[Source], list[PartTable]]:
    """Sources of the case, and the parts that its window names."""
    (queries,) = open_sources(data.layout, "train", label_texts=False)
    table = queries.table.manifest
    edges = itertools.pairwise([*case.starts, SHARDS])
    parts = [
        PartTable(f"d{number}", ".", "", sum(shard.rows for shard in table.shards[first:stop]), first, stop)
        for number, (first, stop) in enumerate(edges)
    ]
    parted = table.model_copy(update={"parameters": {PARTS: [vars(part) for part in parts]}})
    replay = None if case.trained is None else Replay(frozenset(case.trained), case.times)
    source = replace(queries, table=Table(queries.table.url, parted))
    if isinstance(case.window, list):
        named = [part for part in parts if part.name in case.window]
    elif case.window.startswith("last"):
        named = parts[-int(case.window.split()[1]) :]
    else:
        named = [part for part in parts if fnmatch.fnmatch(part.name, case.window or "*")]
    return select_window([source], case.window, replay), named


def stream(data: SmallData, sources: list[Source], epoch: int, batch: int, **options: int) -> JoinedStream:
    options = {"batch": batch, "streams": 8, "window_groups": 2, "threads": 0, **options}
    joined = JoinedStream(sources, data.labels, **options)
    joined.set_epoch(epoch)
    return joined


@given(cases())
def test_rows_of_a_window_are_dealt_once_and_those_of_an_earlier_run_less_often(data: SmallData, case: Case) -> None:
    sources, parts = dealt_by(data, case)
    epochs = [[batch.rows for batch in stream(data, sources, epoch, case.batch)] for epoch in range(4)]
    trained = case.trained or ()
    times = [case.times if part.name in trained else 1.0 for part in parts]
    assert_every_row_by_weight(epochs, [part.rows for part in parts], times)


@settings(max_examples=6)  # the laws themselves are tested on more of them in test_dataset, test_mixing, test_shares
@given(cases(), st.integers(0, 5))
def test_batches_of_a_window_are_the_same_on_any_ranks_and_after_a_resume(
    data: SmallData, case: Case, epoch: int
) -> None:
    sources, _ = dealt_by(data, case)
    assert_exact_resume(lambda: stream(data, sources, epoch, case.batch))
    assert_same_global_batches(
        lambda rank, ranks, threads: list(
            stream(data, sources, epoch, case.batch, rank=rank, ranks=ranks, threads=threads)
        )
    )
