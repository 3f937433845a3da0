"""Scores of a table's negatives today against those that it stores: by brute force over what was measured."""

import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from schemas import arrow
from schemas.layout import RunLayout
from schemas.shard_files.parquet import matrix_array
from schemas.shard_files.shards import write_table
from schemas.storage import join
from schemas.table import Table
from tests.builders import SmallData, build_data
from trainer.group import ALONE
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.refresh import hardness
from trainer.refresh.hardness import measure
from trainer.stream import Batch, Source
from trainer.tracking import read_metrics

K = 3
RECIPE = Recipe.model_validate(
    {
        "data": {"label_texts": True},
        "order": {"batch": 32, "streams": 4},
        "encoder": {"dimension": 4, "buckets": 64, "feature_dropout": 0.2},
        "classifier": {"bias": True, "initial_scale": 0.5},
        "negatives": {"hard": K, "random": 5},
        "refresh": {"start": 2, "every": 1},
        "train": {"epochs": 4},
        "logging": {"tensorboard": False},
    }
)


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://hardness/data", rows={"train": 90, "test": 5})


def write_scored(url: str, source: Source, labels: int, **parameters: object) -> tuple[np.ndarray, np.ndarray]:
    """A table with scores that its rows can be told by, and pads: (label ids [N, K], scores)."""
    draw = np.random.default_rng(7)
    ids = draw.integers(0, labels, (source.rows, K))
    ids[draw.random(ids.shape) < 0.2] = -1
    scores = np.where(ids < 0, -np.inf, draw.standard_normal(ids.shape)).astype(np.float16)
    kind = arrow.label_type(labels)
    columns = [pa.array(np.arange(source.rows)), matrix_array(ids, kind), matrix_array(scores, pa.float16())]
    table = pa.Table.from_arrays(columns, schema=arrow.negatives(K, kind))
    queries = source.table.manifest
    edges = np.cumsum([0, *(shard.rows for shard in queries.shards)]).tolist()
    shards = [table.slice(low, high - low) for low, high in itertools.pairwise(edges)]
    facts = {"parents": {"queries": queries.digest}, "parameters": {"step": 2, **parameters}}
    write_table(url, "negatives", shards, queries.row_group_rows or 1, **facts)
    return ids, scores.astype(np.float64)


def scored(run: RunLayout, trainer: Trainer, epoch: int, labels: int, **parameters: object) -> list[tuple]:
    return [
        write_scored(run.negatives(epoch, source.name), source, labels, **parameters)
        for source in trainer.context.sources
    ]


@pytest.fixture
def trainers(data: SmallData, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    place = f"memory://hardness/{request.node.name}"
    return (Trainer.start(data.layout.root, join(place, str(n)), RECIPE, lambda _: None) for n in range(9))


def first_batch(trainer: Trainer, epoch: int) -> tuple[list[Source], Batch]:
    trainer.progress.epoch = epoch
    _, sources = trainer.adopt()
    trainer.stream.set_epoch(epoch, sources)
    return sources, next(iter(trainer.stream))


def test_the_mean_over_the_same_pairs(data: SmallData, trainers: Iterator[Trainer], monkeypatch) -> None:
    monkeypatch.setattr(hardness, "ROWS", 1000)
    monkeypatch.setattr(hardness, "GROUPS", 1000)
    trainer = next(trainers)
    stored = scored(trainer.run, trainer, 2, data.labels)
    sources, batch = first_batch(trainer, 2)
    result = measure(trainer.model, ALONE, sources, batch)
    ids, scores = (np.concatenate(parts)[batch.rows] for parts in zip(*stored, strict=True))
    key = (batch.epoch, batch.step)
    encoder, classifier = trainer.model.encoder, trainer.model.head
    x = classifier.extend(encoder.encode(encoder.prepare(batch.inputs, key), key)).detach().numpy()
    today = np.einsum("bd,bkd->bk", x, classifier.vectors.numpy()[ids])
    assert result["score_then"] == pytest.approx(scores[ids >= 0].mean(), rel=1e-5)
    assert result["score_now"] == pytest.approx(today[ids >= 0].mean(), rel=1e-4)
    assert result["score_drop"] == pytest.approx(result["score_then"] - result["score_now"])


def test_few_row_groups_are_read(data: SmallData, trainers: Iterator[Trainer], monkeypatch) -> None:
    trainer = next(trainers)
    scored(trainer.run, trainer, 2, data.labels)
    sources, batch = first_batch(trainer, 2)
    read: list[int] = []

    def counted(table, number, columns):
        read.append(number)
        return read_group(table, number, columns)

    read_group = Table.read_group
    monkeypatch.setattr(Table, "read_group", counted)
    monkeypatch.setattr(hardness, "GROUPS", 2)
    monkeypatch.setattr(hardness, "ROWS", 3)
    assert measure(trainer.model, ALONE, sources, batch)
    assert 1 <= len(read) <= 4


def test_label_embeddings_do_not_compare(data: SmallData, trainers: Iterator[Trainer]) -> None:
    trainer = next(trainers)
    scored(trainer.run, trainer, 2, data.labels, by="labels")
    assert measure(trainer.model, ALONE, *first_batch(trainer, 2)) == {}


def test_each_epoch_with_a_table_tells_how_old_it_is(data: SmallData, trainers: Iterator[Trainer]) -> None:
    trainer = next(trainers)
    scored(trainer.run, trainer, 2, data.labels)
    steps = trainer.stream.steps
    for _ in trainer.train():
        pass
    told = [record for record in read_metrics(trainer.run) if record["kind"] == "staleness"]
    assert [(record["epoch"], record["table_epoch"], record["age"], record["stale"]) for record in told] == [
        (2, 2, 2, False),
        (3, 2, 3, True),
    ]
    assert [record["age_steps"] for record in told] == [2 * steps - 2, 3 * steps - 2]
    assert [record["step"] for record in told] == [2 * steps + 1, 3 * steps + 1]
    assert all(record["score_drop"] == pytest.approx(record["score_then"] - record["score_now"]) for record in told)
