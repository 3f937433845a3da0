"""Dumps that a crash does not change, and one decision an epoch about which table to use."""

import json
import threading
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelines.mining.inputs import complete_dumps
from schemas import storage
from schemas.errors import ExtremisError, InputError, TableError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest, unpublish
from schemas.shard_files.parquet import matrix_column
from schemas.storage import join
from schemas.table import Table
from tests.builders import SmallData, build_data, build_negatives, write_negatives
from tests.schemas.flaky import LateFileSystem
from trainer.methods.recipe import Recipe
from trainer.refresh.adoption import Adoption, adopt, follow
from trainer.refresh.dump import EmbeddingCollector, dump_is_published
from trainer.stream import Source, open_sources

D, EPOCH, BATCH = 3, 4, 10
LATE = f"{LateFileSystem.protocol}://refresh/runs"


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://refresh/data")


@pytest.fixture(scope="module")
def sources(data: SmallData) -> list[Source]:
    return open_sources(data.layout, "train", label_texts=True)


# Dumps


@dataclass
class Epoch:
    """The embeddings of an epoch's rows, and the batches in which the training meets them."""

    sources: list[Source]
    x: np.ndarray = field(init=False)
    batches: list[np.ndarray] = field(init=False)
    vectors: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(0)
        rows = sum(source.rows for source in self.sources)
        self.x = draw.standard_normal((rows, D)).astype(np.float32)
        self.batches = np.array_split(draw.permutation(rows), -(-rows // BATCH))
        self.vectors = torch.from_numpy(draw.standard_normal((30, D)).astype(np.float32))

    def collector(self, run: RunLayout) -> EmbeddingCollector:
        return EmbeddingCollector(run, EPOCH, self.sources, D)

    def collect(self, collector: EmbeddingCollector, first: int, last: int) -> None:
        for rows in self.batches[first:last]:
            collector.add(rows, torch.from_numpy(self.x[rows]))

    def publish(self, collector: EmbeddingCollector) -> None:
        collector.publish(self.vectors, len(self.vectors), {"use_from": EPOCH + 2, "table_width": 5})

    def dump(self, run: RunLayout) -> tuple[str, ...]:
        """Digests of what was published: they cover every byte."""
        tables = [run.embeddings(EPOCH, source.name) for source in self.sources] + [run.vectors(EPOCH)]
        for url in tables:
            Table.open(url).verify()
        return tuple(open_manifest(url).digest for url in tables)


@pytest.fixture
def epoch(sources: list[Source]) -> Epoch:
    return Epoch(sources)


def run_at(name: str) -> RunLayout:
    return RunLayout(join("memory://refresh/runs", name))


def uninterrupted(epoch: Epoch, name: str) -> RunLayout:
    run = run_at(name)
    collector = epoch.collector(run)
    epoch.collect(collector, 0, len(epoch.batches))
    epoch.publish(collector)
    return run


def test_a_dump_is_aligned_with_each_source(epoch: Epoch) -> None:
    run = uninterrupted(epoch, "aligned")
    first = 0
    for source in epoch.sources:
        manifest, queries = open_manifest(run.embeddings(EPOCH, source.name), "embeddings"), source.table.manifest
        assert [shard.rows for shard in manifest.shards] == [shard.rows for shard in queries.shards]
        assert manifest.row_group_rows == queries.row_group_rows
        assert manifest.parents == {"queries": queries.digest}
        rows = pa.concat_tables(Table(run.embeddings(EPOCH, source.name), manifest).batches())
        np.testing.assert_array_equal(rows.column("query_id"), np.arange(source.rows))
        expected = epoch.x[first : first + source.rows].astype(np.float16)
        np.testing.assert_array_equal(matrix_column(rows, "vector"), expected)
        first += source.rows
    vectors = open_manifest(run.vectors(EPOCH), "vectors")
    rows = pa.concat_tables(Table(run.vectors(EPOCH), vectors).batches())
    np.testing.assert_array_equal(matrix_column(rows, "vector"), epoch.vectors.numpy())
    assert vectors.id_range == (0, 30)
    assert vectors.parameters["sources"] == ["queries", "labels"]
    assert vectors.parameters["use_from"] == EPOCH + 2


def test_a_dump_is_there_once_its_vectors_are(epoch: Epoch) -> None:
    run = uninterrupted(epoch, "order")
    assert dump_is_published(run, EPOCH)
    unpublish(run.vectors(EPOCH))
    assert not dump_is_published(run, EPOCH)


@pytest.mark.parametrize("every", [1, 3])
def test_a_crash_after_any_step_changes_no_byte_of_the_dump(epoch: Epoch, every: int) -> None:
    expected = epoch.dump(uninterrupted(epoch, "straight"))
    for crash in range(len(epoch.batches)):
        run = run_at(f"crash-{every}-{crash}")
        collector = epoch.collector(run)
        saved = 0
        for step in range(crash):
            epoch.collect(collector, step, step + 1)
            if (step + 1) % every == 0:
                collector.save_part(step + 1, collector.take_fresh())
                saved = step + 1
        resumed = epoch.collector(run)
        if saved:
            resumed.restore(saved)
        epoch.collect(resumed, saved, len(epoch.batches))
        epoch.publish(resumed)
        assert epoch.dump(run) == expected
        assert storage.list_names(run.parts(EPOCH)) == []


def test_a_part_whose_checkpoint_was_never_finished_is_made_again(epoch: Epoch) -> None:
    expected = epoch.dump(uninterrupted(epoch, "straight"))
    run = run_at("orphan")
    collector = epoch.collector(run)
    epoch.collect(collector, 0, 3)
    collector.save_part(3, collector.take_fresh())
    for rows in epoch.batches[3:5]:  # a part that no checkpoint knows, with what must not be taken
        collector.add(rows, torch.full((len(rows), D), 9.0))
    collector.save_part(5, collector.take_fresh())
    resumed = epoch.collector(run)
    resumed.restore(3)
    epoch.collect(resumed, 3, 4)
    resumed.save_part(4, resumed.take_fresh())
    epoch.collect(resumed, 4, len(epoch.batches))
    epoch.publish(resumed)
    assert epoch.dump(run) == expected


def test_a_damaged_part_is_named(epoch: Epoch) -> None:
    run = run_at("damaged")
    collector = epoch.collector(run)
    epoch.collect(collector, 0, 3)
    collector.save_part(3, collector.take_fresh())
    place = join(run.parts(EPOCH), "step-00000003.rank-00000.parquet")
    content = storage.read_bytes(place)
    flipped = bytearray(content)
    flipped[20] ^= 4
    for damaged in (content[:-9], bytes(flipped), b""):
        storage.write_bytes(place, damaged)
        with pytest.raises(
            TableError, match=r"step-00000003\.rank-00000\.parquet: damaged: .*Remove the last checkpoint of the run"
        ):
            epoch.collector(run).restore(3)


# Adoption


class Run:
    """A run whose tables appear one by one; tables from epoch 3 on, every other epoch."""

    def __init__(self, name: str, data: SmallData, sources: list[Source], **refresh: object) -> None:
        self.layout, self.data, self.sources = run_at(name), data, sources
        self.recipe = Recipe.model_validate(
            {"negatives": {"hard": 2}, "refresh": {"start": 3, "every": 2, **refresh}, "train": {"epochs": 12}}
        )
        self.said: list[str] = []

    def mine(self, epoch: int, seed: int = 0, names: tuple[str, ...] = ("queries", "labels")) -> None:
        for source in self.sources:
            if source.name in names:
                points = self.data.points["train"] if source.name == "queries" else self.data.label_points
                url = self.layout.negatives(epoch, source.name)
                build_negatives(url, source.table.manifest, points.positives, self.data.labels, 2, seed=seed)

    def adopt(self, epoch: int) -> Adoption:
        decision, joined = adopt(self.layout, self.recipe, self.sources, epoch, self.said.append)
        for source in joined:
            if decision.table_epoch is None:
                assert source.negatives is None
            else:
                assert source.negatives.url == self.layout.negatives(decision.table_epoch, source.name)
                assert source.negatives.manifest.digest == decision.digests[source.name]
        return decision


def test_epochs_before_the_first_table_are_not_late(data: SmallData, sources: list[Source]) -> None:
    run = Run("early", data, sources)
    for epoch in range(3):
        assert run.adopt(epoch) == Adoption(epoch, None, {}, False)
    assert run.said == []


def test_a_table_that_the_store_does_not_list_yet_is_found(data: SmallData, sources: list[Source]) -> None:
    run = Run("unlisted", data, sources, stale="wait", wait_seconds=600)
    run.layout = RunLayout(join(LATE, "unlisted"))
    run.mine(3)
    assert storage.list_names(run.layout.negatives_root) == []
    assert run.adopt(3).table_epoch == 3
    assert run.adopt(4).table_epoch == 3
    run.mine(5)
    assert run.adopt(5).table_epoch == 5


def test_a_dump_that_the_store_does_not_list_yet_is_found(epoch: Epoch) -> None:
    run = RunLayout(join(LATE, "dumped"))
    collector = epoch.collector(run)
    epoch.collect(collector, 0, len(epoch.batches))
    epoch.publish(collector)
    assert storage.list_names(run.dumps) == []
    assert list(complete_dumps(run.root)) == [EPOCH]


def test_the_newest_finished_table_up_to_the_epoch_is_taken(data: SmallData, sources: list[Source]) -> None:
    run = Run("newest", data, sources)
    for epoch in (3, 5, 7):
        run.mine(epoch, seed=epoch)
    adoptions = {epoch: run.adopt(epoch) for epoch in range(3, 9)}
    assert [adoptions[epoch].table_epoch for epoch in range(3, 9)] == [3, 3, 5, 5, 7, 7]
    assert [adoptions[epoch].age for epoch in range(3, 9)] == [2, 3, 2, 3, 2, 3]
    assert not any(decision.late for decision in adoptions.values())
    assert run.said == []


def test_a_late_table_is_told_and_the_older_one_is_used(data: SmallData, sources: list[Source]) -> None:
    run = Run("late", data, sources)
    assert run.adopt(3) == Adoption(3, None, {}, True, True)
    assert "due at epoch 3 is not finished yet; continuing with random negatives only" in run.said[-1]
    run.mine(3)
    assert (run.adopt(4).table_epoch, run.adopt(4).late) == (3, False)
    run.mine(5, names=("queries",))  # one of two sources is no finished table
    assert (run.adopt(5).table_epoch, run.adopt(5).late) == (3, True)
    assert "due at epoch 5 is not finished yet; continuing with the table of epoch 3" in run.said[-1]
    assert len(run.said) == 2  # a decision taken before is not told again


def test_a_decision_stands_whatever_appears_later(data: SmallData, sources: list[Source]) -> None:
    run = Run("stands", data, sources)
    run.mine(3)
    first, late = run.adopt(3), run.adopt(5)
    assert late.table_epoch == 3
    run.mine(5)
    assert run.adopt(5) == late
    assert run.adopt(3) == first
    assert run.adopt(6).table_epoch == 5


def test_a_decision_is_written_alike_by_the_run_and_by_one_that_resumes_it(
    data: SmallData, sources: list[Source]
) -> None:
    run = Run("alike", data, sources)
    run.mine(3)
    made, read = run.adopt(3), run.adopt(3)
    assert len(made.digests) > 1
    assert json.dumps(asdict(made)) == json.dumps(asdict(read))


def test_a_table_that_changed_or_went_since_is_refused(data: SmallData, sources: list[Source]) -> None:
    run = Run("changed", data, sources)
    run.mine(3, seed=0)
    run.adopt(3)
    run.mine(3, seed=1)
    with pytest.raises(TableError, match=r"negatives/epoch-0003/queries: epoch 3 was trained on another version"):
        run.adopt(3)
    unpublish(run.layout.negatives(3, "queries"))
    with pytest.raises(TableError, match=r"negatives/epoch-0003/queries"):
        run.adopt(3)


def test_waiting_takes_the_table_as_soon_as_it_is_there(data: SmallData, sources: list[Source]) -> None:
    run = Run("waits", data, sources, stale="wait", wait_seconds=60)
    miner = threading.Timer(0.5, run.mine, [3])
    began = time.monotonic()
    miner.start()
    decision = run.adopt(3)
    miner.join()
    assert 0.5 <= time.monotonic() - began < 30
    assert (decision.table_epoch, decision.late) == (3, False)
    assert run.said == []


def test_waiting_ends(data: SmallData, sources: list[Source]) -> None:
    run = Run("gives-up", data, sources, stale="wait", wait_seconds=0.3)
    began = time.monotonic()
    assert run.adopt(3).late
    assert 0.3 <= time.monotonic() - began < 10


def test_without_hard_negatives_rather_than_with_old_ones(data: SmallData, sources: list[Source]) -> None:
    run = Run("random-only", data, sources, stale="random-only")
    run.mine(3)
    assert [run.adopt(epoch).table_epoch for epoch in (3, 4)] == [3, 3]
    decision = run.adopt(5)
    assert (decision.table_epoch, decision.late, decision.stale, decision.digests) == (None, True, True, {})
    assert "due at epoch 5 is not finished yet; continuing with random negatives only" in run.said[-1]
    run.mine(5)
    assert (run.adopt(6).table_epoch, run.adopt(6).stale) == (5, False)


def test_stopping_rather_than_old_ones(data: SmallData, sources: list[Source]) -> None:
    run = Run("stops", data, sources, stale="stop")
    for message in ("there is no older table", "the table of epoch 3 is 4 epochs old"):
        epoch = 3 if message.startswith("there is no") else 5
        with pytest.raises(
            ExtremisError, match=f"due at epoch {epoch} .*{message}, and refresh.max_age allows 3.*--watch"
        ) as e:
            run.adopt(epoch)
        assert e.value.exit_status == 3
        assert not storage.exists(run.layout.adoption(epoch))  # a resumed run asks again
        run.mine(epoch)
        assert run.adopt(epoch).table_epoch == epoch


@pytest.mark.parametrize("stale", ["warn", "wait", "random-only", "stop"])
def test_a_table_may_be_as_old_as_is_allowed(data: SmallData, sources: list[Source], stale: str) -> None:
    run = Run(f"allowed-{stale}", data, sources, stale=stale, max_age=6, wait_seconds=600)
    run.mine(3)
    adoptions = [run.adopt(epoch) for epoch in range(3, 8)]
    assert [decision.table_epoch for decision in adoptions] == [3] * 5
    assert [decision.age for decision in adoptions] == [2, 3, 4, 5, 6]
    assert [decision.late for decision in adoptions] == [False, False, True, True, True]
    assert not any(decision.stale for decision in adoptions)
    if stale == "warn":
        assert run.adopt(8).stale


def test_how_old_and_how_new_a_table_is(data: SmallData, sources: list[Source]) -> None:
    run = Run("staleness", data, sources)
    for source, share in zip(run.sources, (0.5, 0.8), strict=True):
        table = np.zeros((source.rows, 2), np.int64)
        quality = {"overlap_with_previous": share, "recall_at_k": 1 - share / 10}
        facts = {"quality": quality, "parameters": {"step": 70}}
        write_negatives(run.layout.negatives(3, source.name), source.table.manifest, table, data.labels, **facts)
    decision = run.adopt(3)
    assert (decision.dumped_at, decision.staleness(110)["age_steps"]) == (70, 40)
    rows = [source.rows for source in run.sources]
    assert decision.overlap == pytest.approx((0.5 * rows[0] + 0.8 * rows[1]) / sum(rows))
    assert decision.recall == pytest.approx(1 - decision.overlap / 10)
    assert run.adopt(3) == decision  # as recorded


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"refresh": {"start": 1}, "negatives": {"hard": 3}}, r"refresh.start = 1 is too early: .*Set 2 or more"),
        ({"refresh": {"max_age": 1}}, "every table is at least 2 epochs"),
        ({"refresh": {"by": "labels"}, "data": {"label_texts": False}}, "set data.label_texts = true"),
        ({"refresh": {"by": "labels", "source": "in-trainer"}}, "refresh.by"),
        ({"refresh": {"source": "in-trainer", "every_steps": 5, "rebuild_steps": 5}}, "is not below"),
        ({"train": {"positive_ratio": 2}, "loss": {"kind": "softmax"}}, "works only with loss.kind = 'bce'"),
        ({"negatives": {"curriculum": True}}, "needs negatives.hard > 0"),
    ],
)
def test_what_cannot_be(body: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe.model_validate(body)


def test_other_ranks_follow_the_decision_once_it_is_taken(data: SmallData, sources: list[Source]) -> None:
    run = Run("followed", data, sources)
    run.mine(3)
    first = threading.Timer(0.3, run.adopt, [3])
    first.start()
    decision, joined = follow(run.layout, run.recipe, sources, 3, seconds=60)
    first.join()
    run.mine(4)  # newer, but the decision stands
    assert (decision, joined[0].negatives) == (run.adopt(3), follow(run.layout, run.recipe, sources, 3)[1][0].negatives)
    assert decision.table_epoch == 3


def test_a_decision_that_nobody_takes_is_not_awaited_for_ever(data: SmallData, sources: list[Source]) -> None:
    run = Run("unled", data, sources)
    with pytest.raises(InputError, match=r"epoch-0003\.json: no decision about epoch 3 after 0\.2 seconds\. Is rank 0"):
        follow(run.layout, run.recipe, sources, 3, seconds=0.2)
