"""Parts of a table: by shares of [0, 1], for any row groups; through the order, the stream, and a whole run."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import list_column
from tests.builders import SmallData, build_data
from tests.laws import assert_exact_resume, assert_same_global_batches, batch_rows
from tests.training import assert_resumes, silent, train, with_sections
from trainer.checkpoints.checkpoint import latest_checkpoint
from trainer.evaluation.evaluate import SplitScorer
from trainer.evaluation.split import HOLDOUT, open_split
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import Model, load_model
from trainer.stream import JoinedStream, open_queries, open_sources
from trainer.stream.order import EpochOrder
from schemas.shares import ALL_ROWS, RowShare

SHARES = st.one_of(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]), st.floats(0, 1))
GROUPS = st.lists(st.integers(0, 9), max_size=20).map(lambda sizes: np.asarray(sizes, np.int64))


def first_rows(group_rows: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)


def ids_of(part: RowShare, group_rows: np.ndarray) -> list[int]:
    """Ids of the rows of a part."""
    first = first_rows(group_rows)
    return [
        row
        for start, (low, high) in zip(first.tolist(), part.bounds(first).tolist(), strict=False)
        for row in range(start + low, start + high)
    ]


@given(GROUPS, st.lists(SHARES, max_size=4))
def test_adjacent_parts_are_disjoint_and_together_the_whole(group_rows: np.ndarray, shares: list[float]) -> None:
    edges = [0.0, *sorted(shares), 1.0]
    parts = [ids_of(RowShare(*edge), group_rows) for edge in itertools.pairwise(edges)]
    assert sorted(row for part in parts for row in part) == list(range(int(group_rows.sum())))


@given(GROUPS, SHARES, SHARES)
def test_the_share_is_exact(group_rows: np.ndarray, one: float, other: float) -> None:
    part, total = RowShare(*sorted((one, other))), int(group_rows.sum())
    bounds = part.bounds(first_rows(group_rows))
    assert len(ids_of(part, group_rows)) == part.rows(total)
    assert abs(part.rows(total) - (part.stop - part.start) * total) < 1 + 1e-6
    assert ((bounds[:, 0] <= bounds[:, 1]) & (bounds[:, 1] <= group_rows)).all()


@given(GROUPS, st.floats(0.01, 0.5), st.floats(0.01, 1), st.floats(0, 1))
def test_no_share_that_is_left_reaches_into_what_is_held_out(
    group_rows: np.ndarray, holdout: float, share: float, kept: float
) -> None:
    options = Recipe.model_validate({"data": {"holdout": holdout, "share": share}}).data
    held_out = {*ids_of(options.held_out_rows, group_rows)}
    assert not held_out & {*ids_of(options.training_rows, group_rows)}
    assert not held_out & {*ids_of(RowShare(0.0, options.training_rows.stop * kept), group_rows)}


@st.composite
def orders(draw: st.DrawFn) -> tuple[EpochOrder, list[int]]:
    """An order over one part of some row groups, then all rows of others, and the ids of the rows that it deals."""
    queries = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    texts = draw(st.lists(st.integers(1, 9), max_size=4))
    part = RowShare(*sorted((draw(SHARES), draw(SHARES))))
    first = first_rows(np.array(queries))
    dealt = np.concatenate([part.bounds(first), ALL_ROWS.bounds(first_rows(np.array(texts, np.int64)))])
    streams = draw(st.sampled_from([1, 2, 4]))
    order = EpochOrder(
        np.array([*queries, *texts], np.int64),
        streams * draw(st.integers(1, 5)),
        streams,
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2**63)),
        draw(st.integers(0, 9)),
        dealt=dealt,
    )
    return order, [*ids_of(part, np.array(queries)), *range(first[-1], first[-1] + sum(texts))]


@given(orders(), st.sampled_from([1, 2, 4]))
def test_an_epoch_deals_each_row_of_the_part_once_and_no_other(case: tuple[EpochOrder, list[int]], ranks: int) -> None:
    order, rows = case
    first, ranks = first_rows(order.group_rows), min(ranks, order.streams)
    each = order.streams // ranks
    for epoch in (order.epoch, order.epoch + 1):
        of_epoch = replace(order, epoch=epoch)
        assert of_epoch.rows == len(rows)
        parts = [
            batch_rows(of_epoch, step, range(rank * each, (rank + 1) * each), first)
            for step in range(of_epoch.steps)
            for rank in range(ranks)
        ]
        dealt = np.concatenate([*parts, np.empty(0, np.int64)])
        assert sorted(dealt.tolist()) == rows


HELD_OUT: dict[str, Any] = {
    "data": {"holdout": 0.2, "label_texts": True},
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 4, "buckets": 64, "dropout": 0.1, "residual": True},
    "negatives": {"random": 6},
    "train": {"epochs": 3},
    "checkpoint": {"every_steps": 3, "keep": 3},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://part/data")


def stream_of(data: SmallData, part: RowShare, **options: Any) -> JoinedStream:
    sources = open_sources(data.layout, "train", label_texts=True, share=part)
    return JoinedStream(sources, data.labels, batch=16, streams=8, window_groups=2, seed=5, **options)


def test_a_stream_reads_the_part_and_the_label_texts_on_any_ranks(data: SmallData) -> None:
    part, queries = RowShare(0.1, 0.8), len(data.points["train"].tokens)
    batches = assert_same_global_batches(
        lambda rank, ranks, threads: list(stream_of(data, part, rank=rank, ranks=ranks, threads=threads))
    )
    rows = open_manifest(data.layout.queries("train"), "queries")
    expected = [*ids_of(part, group_rows(data)), *range(queries, queries + data.labels)]
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == expected
    assert part.rows(rows.rows) == len(expected) - data.labels == round(0.7 * queries)


def test_a_stream_of_a_part_resumes_at_every_step_and_refuses_another_part(data: SmallData) -> None:
    assert len(assert_exact_resume(lambda: stream_of(data, RowShare(0.0, 0.6)))) > 3
    state = stream_of(data, RowShare(0.0, 0.6)).state_dict()
    for other in (RowShare(0.0, 0.7), ALL_ROWS):
        with pytest.raises(InputError, match="cannot resume the stream"):
            stream_of(data, other).load_state_dict(state)


def group_rows(data: SmallData) -> np.ndarray:
    """Rows of each row group of the training queries, as they lie."""
    table = open_queries(data.layout, "train")
    return np.array([rows.num_rows for rows in ALL_ROWS.batches(table, ["query_id"])])


def read(data: SmallData, part: RowShare, limit: int | None = None) -> list[int]:
    table = open_queries(data.layout, "train")
    groups = part.batches(table, ["query_id"], limit)
    return [row for group in groups for row in group["query_id"].to_pylist()]


def test_a_part_is_read_in_the_order_of_storage(data: SmallData) -> None:
    for part in (ALL_ROWS, RowShare(0.0, 0.3), RowShare(0.3, 0.9), RowShare(0.5, 0.5)):
        expected = ids_of(part, group_rows(data))
        assert read(data, part) == expected
        for limit in (0, 1, 7, 1000):
            assert read(data, part, limit) == expected[:limit]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Watch the row ids of all batches; the function returns those so far."""
    rows: set[int] = set()
    original = JoinedStream.__iter__

    def iterate(self: JoinedStream) -> Iterator[Any]:
        for batch in original(self):
            rows.update(batch.rows.tolist())
            yield batch

    monkeypatch.setattr(JoinedStream, "__iter__", iterate)
    return lambda: rows


def recipe(**sections: dict) -> Recipe:
    return with_sections(HELD_OUT, sections)


@pytest.mark.parametrize("share", [1.0, 0.79, 0.3])
def test_a_run_never_trains_on_what_it_holds_out_and_scores_exactly_that(
    data: SmallData, share: float, watched: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = recipe(data={"share": share})
    run = f"memory://part/{share}"
    reports: list[dict[str, float]] = []
    trainer = Trainer.start(data.layout.root, run, options, silent)
    train(trainer, on_epoch=lambda report: reports.append(report.metrics))
    queries, sizes = len(data.points["train"].tokens), group_rows(data)
    held_out = ids_of(RowShare(0.8, 1.0), sizes)
    assert len(held_out) == round(0.2 * queries)
    trained = {row for row in watched() if row < queries}
    assert trained == {*ids_of(RowShare(0.0, min(share, 0.8)), sizes)}
    assert not trained & {*held_out}
    assert {row - queries for row in watched() if row >= queries} == {*range(data.labels)}
    # Validated on them without a split named.
    assert all("P@1" in metrics for metrics in reports)
    table, part = open_split(data.layout, HOLDOUT, options.data)
    columns = ["query_id", "label_ids"]
    rows = list(part.batches(table, columns))
    assert [row for group in rows for row in group["query_id"].to_pylist()] == held_out
    _, model, _ = load_model(data.layout, trainer.run)
    scored: list[list[int]] = []
    embed = Model.embed_table
    monkeypatch.setattr(Model, "embed_table", lambda self, some: scored.append(tokens_of(some)) or embed(self, some))
    scores = SplitScorer.open(data.layout, model, HOLDOUT, training_data=options.data).score()
    assert scores.queries == len(held_out)
    assert list(itertools.chain(*scored)) == [data.points["train"].tokens[row] for row in held_out]
    assert scores.metrics.result()["P@1"] == pytest.approx(reports[-1]["P@1"])
    with pytest.raises(InputError, match=r"trains on all rows of train.*data\.holdout=0\.02"):
        SplitScorer.open(data.layout, model, HOLDOUT)


def tokens_of(rows: Any) -> Any:
    values, offsets = list_column(rows, "input_ids")
    return [values[low:high].tolist() for low, high in itertools.pairwise(offsets)]


@pytest.mark.parametrize("stop", [2, 7])
def test_a_run_that_holds_out_rows_goes_on_to_the_same_bits(data: SmallData, stop: int) -> None:
    whole, cut = f"memory://part/whole-{stop}", f"memory://part/cut-{stop}"
    straight = Trainer.start(data.layout.root, whole, recipe(), silent)
    losses = train(straight)
    assert assert_resumes(data.layout.root, cut, recipe(), losses, stop) >= len(losses) - stop
    assert latest_checkpoint(RunLayout(cut)).table.shards == latest_checkpoint(straight.run).table.shards


@pytest.mark.parametrize(
    "options",
    [
        {"data": {"holdout": 0.1, "mix": {"train": 1.0}}},
        {"data": {"share": 0.5, "mix": {"train": 1.0}}},
        {"method": "ngame", "data": {"holdout": 0.1}, "order": {"cluster": 8}},
    ],
    ids=str,
)
def test_what_has_no_part_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"leave out data\.holdout|leave them out"):
        Recipe.model_validate(options)
