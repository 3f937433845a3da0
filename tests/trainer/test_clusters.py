"""Training by clusters of queries: what a batch holds, resuming, ranks, dumps, and which table an epoch takes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.cluster import ClusterOptions, cluster
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest, publish
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.builders import SmallData, build_data
from tests.pipelines.test_cluster import cluster_ids, embed_queries
from tests.ranks import on_ranks
from tests.training import Killed, silent, train, with_sections
from trainer.group import ALONE, Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.schedule import ClusterSchedule
from trainer.stream import JoinedStream, open_sources

EPOCHS, SIZE = 5, 8
BASE: dict[str, Any] = {
    "order": {"batch": 32, "streams": 4, "window_groups": 2, "threads": 1, "cluster": 2, "cluster_doubles_every": 2},
    "encoder": {"dimension": 8, "buckets": 64, "dropout": 0.1, "normalize": True, "lr": 0.02},
    "method": "ngame",
    "head": {"label_batch": 7},
    "loss": {"kind": "triplet"},
    "refresh": {"start": 2, "every": 2},
    "train": {"epochs": EPOCHS, "threads": 1},
    "checkpoint": {"every_steps": 3, "keep": 9},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(
        str(tmp_path_factory.mktemp("clusters") / "data"), rows={"train": 250, "test": 20}, row_group_rows=16
    )


@pytest.fixture(scope="module")
def tables(data: SmallData) -> str:
    """A run whose tables for the epochs 2 and 4 are there already."""
    run = RunLayout(str(Path(data.layout.root).parent / "tables"))
    for epoch in (2, 4):
        url = str(Path(data.layout.root).parent / f"embeddings-{epoch}")
        embed_queries(data, url, seed=epoch)
        cluster(data.layout.root, run.root, options=ClusterOptions(queries=url, for_epoch=epoch, size=SIZE, smallest=2))
    return run.root


def recipe(**sections: dict[str, Any]) -> Recipe:
    return with_sections(BASE, sections)


def stream_of(data: SmallData, url: str, rank: int = 0, ranks: int = 1, **order: Any) -> JoinedStream:
    sources = [source.with_clusters(url) for source in open_sources(data.layout, "train", label_texts=False)]
    options = {"batch": 32, "streams": 4, "window_groups": 1, "clusters": ClusterSchedule(2, 1), "seed": 3, **order}
    return JoinedStream(sources, data.labels, rank=rank, ranks=ranks, **options)


def test_batches_are_whole_clusters_that_grow_with_the_epochs(data: SmallData, tables: str) -> None:
    url = RunLayout(tables).clusters(2, "queries")
    cluster_of, stream = cluster_ids(open_manifest(url)), stream_of(data, url)
    orders = []
    for epoch in range(4):
        stream.set_epoch(epoch)
        size = stream.order.cluster
        assert size == (2, 4, 8, 8)[epoch]  # twice as many would be more than a stream gives to a batch
        rows = [batch.rows for batch in stream]
        assert sorted(np.concatenate(rows)) == list(range(250))
        for batch in rows:
            assert len(np.unique(cluster_of[batch])) <= 32 // size
            if size == SIZE:
                assert np.isin(cluster_of, cluster_of[batch]).sum() == len(batch)
        orders.append(np.concatenate(rows).tolist())
    assert orders[2] != orders[3]


def test_rows_are_those_of_the_table_and_a_resumed_stream_goes_on(data: SmallData, tables: str) -> None:
    url = RunLayout(tables).clusters(2, "queries")
    before, keys = (
        [key for group in Table.open(each).batches() for key in group["key"].to_pylist()]
        for each in (data.layout.queries("train"), url)
    )
    places = {key: row for row, key in enumerate(before)}
    stream = stream_of(data, url)
    stream.set_epoch(2)
    batches, states = [], []
    for batch in stream:
        batches.append(batch)
        states.append(stream.state_dict())
        assert batch.inputs.tokens is not None
        positives = np.split(batch.positives, batch.positive_offsets[1:-1])
        for row, labels in zip(batch.rows, positives, strict=True):
            assert labels.tolist() == data.points["train"].positives[places[keys[row]]]
    for step, state in enumerate(states):
        other = stream_of(data, url)
        other.load_state_dict(state)
        rest = [batch.rows.tolist() for batch in other]
        assert rest == [batch.rows.tolist() for batch in batches[step + 1 :]]
    with pytest.raises(InputError, match="clusters was"):
        stream_of(data, url, clusters=ClusterSchedule(4, 1)).load_state_dict(states[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_end_to_end_deal_what_one_deals(data: SmallData, tables: str, ranks: int) -> None:
    url = RunLayout(tables).clusters(4, "queries")
    streams = [stream_of(data, url), *(stream_of(data, url, rank, ranks) for rank in range(ranks))]
    for stream in streams:
        stream.set_epoch(1)
    whole, *parts = ([batch.rows for batch in stream] for stream in streams)
    assert [batch.tolist() for batch in whole] == [np.concatenate(some).tolist() for some in zip(*parts, strict=True)]


def test_clusters_that_cannot_be_dealt_are_refused(data: SmallData, tables: str) -> None:
    url = RunLayout(tables).clusters(2, "queries")
    with pytest.raises(InputError, match=r"clusters of 8 rows .* halved down to 2 rows, but never have 16"):
        list(stream_of(data, url, batch=64, clusters=ClusterSchedule(16)))
    (source,) = open_sources(data.layout, "train", label_texts=False)
    with pytest.raises(TableError, match=r"does not have the rows of .* in cluster order|was built from a"):
        source.with_clusters(data.layout.queries("test"))
    for wrong, message in (
        ({"cluster": 3}, r"order.cluster = 3 does not divide order.batch / order.streams = 8"),
        ({"cluster": 16}, r"order.cluster = 16 does not divide"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(order=wrong)
    with pytest.raises(ValueError, match=r"negatives.hard"):
        recipe(negatives={"hard": 2})
    with pytest.raises(ValueError, match=r"leave out .*data.mix, data.label_texts and order.batches"):
        recipe(data={"label_texts": True})


# Runs


def run_at(tables: str, path: Path) -> str:
    shutil.copytree(tables, path)
    return str(path)


def test_stopped_and_resumed_it_is_the_run_that_was_never_stopped(data: SmallData, tables: str, tmp_path: Path) -> None:
    root, runs = data.layout.root, [run_at(tables, tmp_path / name) for name in ("straight", "killed")]
    straight = train(Trainer.start(root, runs[0], recipe(), silent))
    stops = (5, 19, 29)  # in random order, within clusters, and after another table
    for resume, stop in zip((False, True, True), stops, strict=True):
        trainer = (Trainer.resume if resume else Trainer.start)(root, runs[1], recipe(), silent)
        with pytest.raises(Killed):
            on_step_stop(trainer, stop)
    resumed = train(Trainer.resume(root, runs[1], recipe(), silent))
    assert resumed == straight[-len(resumed) :]
    assert len(resumed) < len(straight) - 20
    # What each epoch dumps is aligned with the table that it trained on.
    for epoch, made_for in ((0, None), (2, 2)):
        results = [open_manifest(RunLayout(run).embeddings(epoch, "queries")) for run in runs]
        assert results[0] == results[1]
        url = data.layout.queries("train") if made_for is None else RunLayout(runs[0]).clusters(made_for, "queries")
        queries = open_manifest(url)
        assert results[0].parents == {"queries": queries.digest}
        assert [shard.rows for shard in results[0].shards] == [shard.rows for shard in queries.shards]
        parameters = results[0].parameters
        assert parameters["clusters"] == {"size": 8, "smallest": 2}
        assert (parameters["epoch"], parameters["use_from"], parameters["split"]) == (epoch, epoch + 2, "train")
    assert not storage.exists(RunLayout(runs[0]).vectors(0))


def on_step_stop(trainer: Trainer, stop: int) -> None:
    """Train until global step `stop`."""

    def on_step(step: int, total: int, loss: float) -> None:
        if step == stop:
            raise Killed

    for _ in trainer.train(on_step):
        pass


def test_embeddings_of_a_dump_are_those_of_its_rows(data: SmallData, tables: str, tmp_path: Path) -> None:
    run = run_at(tables, tmp_path / "run")
    options = recipe(encoder={"dropout": 0.0, "lr": 1e-9, "dense_lr": 1e-9})
    trainer = Trainer.start(data.layout.root, run, options, silent)
    train(trainer)
    url, rows = RunLayout(run).embeddings(2, "queries"), RunLayout(run).clusters(2, "queries")
    x = np.concatenate([matrix_column(group, "vector") for group in Table.open(url).batches()])
    expected = [trainer.model.embed_table(group).numpy() for group in Table.open(rows).batches()]
    np.testing.assert_allclose(x, np.concatenate(expected), atol=2e-3)


def test_each_epoch_takes_the_newest_table_and_says_so(data: SmallData, tables: str, tmp_path: Path) -> None:
    run = run_at(tables, tmp_path / "run")
    said: list[str] = []
    trainer = Trainer.start(data.layout.root, run, recipe(train={"epochs": 7}), said.append)
    adopted = []
    train(trainer, on_epoch=lambda report: adopted.append((report.adoption.table_epoch, report.adoption.late)))
    assert adopted == [(None, False), (None, False), (2, False), (2, False), (4, False), (4, False), (4, True)]
    assert [line for line in said if not line.startswith("device: ")] == [
        "epoch 0: dumps 250 embeddings, for table 2",
        "epoch 2: orders 250 rows by table 2",
        "epoch 2: dumps 250 embeddings, for table 4",
        "epoch 4: orders 250 rows by table 4",
        "epoch 4: dumps 250 embeddings, for table 6",
        "epoch 6: the table of clusters due at epoch 6 is not finished yet; continuing with the table of epoch 4",
    ]
    # Another table in the place of one that was trained on is seen.
    place = RunLayout(run).clusters(4, "queries")
    publish(place, open_manifest(place).model_copy(update={"quality": {"spoilt": 1}}))
    storage.remove(RunLayout(run).finished)
    storage.remove(RunLayout(run).checkpoint(7 * 8), recursive=True)
    with pytest.raises(TableError, match="was trained on another version of this table"):
        train(Trainer.resume(data.layout.root, run, recipe(train={"epochs": 7}), silent))


def test_clusters_made_beforehand_are_used_from_their_epoch_on(data: SmallData, tables: str, tmp_path: Path) -> None:
    run = RunLayout(run_at(tables, tmp_path / "run"))
    shutil.move(run.clusters(2, "queries"), Path(run.clusters(0, "queries")).parent / "queries")
    adopted: list[int | None] = []
    trainer = Trainer.start(data.layout.root, run.root, recipe(train={"epochs": 3}), silent)
    train(trainer, on_epoch=lambda report: adopted.append(report.adoption.table_epoch))
    assert adopted == [0, 0, 0]


def train_on(group: Group, data: str, run: str, options: Recipe) -> list[float]:
    return train(Trainer.start(data, run, options, silent, group))


def test_two_ranks_train_as_one(data: SmallData, tables: str, tmp_path: Path) -> None:
    options, root = recipe(encoder={"dropout": 0.0}, train={"epochs": 3}), data.layout.root
    alone = train_on(ALONE, root, run_at(tables, tmp_path / "one"), options)
    results = on_ranks(2, train_on, root, run_at(tables, tmp_path / "two"), options)
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0], alone, rtol=1e-4)
    digests = [
        [open_manifest(RunLayout(str(tmp_path / run)).embeddings(epoch, "queries")).parents for epoch in (0,)]
        for run in ("one", "two")
    ]
    assert digests[0] == digests[1]
