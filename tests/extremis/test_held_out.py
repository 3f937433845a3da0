"""What a run holds out depends on the keys alone: over parts, replacements, shards and updates; by a plain program."""

import json
import math
import shutil
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import extremis
from extremis import auto
from extremis.auto import write_excerpt
from pipelines.options import ShardOptions
from pipelines.shard import shard
from schemas.errors import InputError
from schemas.hashing import hash_strings
from schemas.layout import DataLayout, RunLayout
from schemas.ragged import Ragged
from schemas.shares import RowShare
from schemas.table import Table
from scoring.fitting import open_fusion
from scoring.linear import LinearRanker
from scoring.memory import Memory
from tests.schemas.test_hashing import plain
from trainer.checkpoints import open_step
from trainer.evaluation import evaluate
from trainer.methods.sections import Data
from trainer.model import load_model
from trainer.recipe_files import load_config, validate
from trainer.settings import data_statistics
from trainer.settings.resolve import resolve
from trainer.stream import JoinedStream, open_queries, open_sources
from trainer.stream.sources import Replay, select_window


def place(key: str, salt: int = 0) -> float:
    """Where a key lies among all keys, in [0, 1): as docs/decisions/0046 states the hash, without our code."""
    return (plain(key.encode(), salt) >> 32) / 2**32


def keys_of(data: Path, share: RowShare, parts: str = "") -> list[str]:
    table = open_queries(DataLayout(str(data)), "train")
    table = table.of_parts(table.choose_parts(parts)) if parts else table
    return [key for rows in share.batches(table, ["key"]) for key in rows["key"].to_pylist()]


def write_points(folder: Path, keys: list[str], word: str = "word") -> str:
    folder.mkdir(parents=True)
    rows = [{"key": key, "text": f"{word} {word}{key} {key[-1]}", "labels": [f"{word}{key[-1]}"]} for key in keys]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[list[str], ShardOptions]]:
    """Inputs of successive versions, of any sizes, with new and old keys, and how each is sharded."""
    test, chain = draw(st.sampled_from([0.0, 0.3])), []
    for number in range(draw(st.integers(2, 3))):
        keys = sorted(draw(st.sets(st.integers(0, 300), min_size=2, max_size=draw(st.sampled_from([4, 60, 250])))))
        first = {"tokenizer": "train:200", "test_share": test, "validation_share": test / 3}
        again = {"onto": f"d{number - 1}", "again": draw(st.sampled_from(["replace", "keep", "merge"]))}
        cut = {"shards": draw(st.integers(1, 4)), "row_group_rows": draw(st.sampled_from([1, 3, 50]))}
        chain.append(([f"k{key}" for key in keys], ShardOptions(**(again if number else first), **cut)))
    return chain


@given(chains(), st.lists(st.sampled_from([0.02, 0.1, 0.25, 0.5]), min_size=3, max_size=3))
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
def test_no_key_that_an_update_holds_out_has_trained_before(
    chain: list[tuple[list[str], ShardOptions]], holdouts: list[float]
) -> None:
    folder, low = Path(tempfile.mkdtemp()), chain[0][1].test_share + chain[0][1].validation_share
    try:
        held_out, trained = [], []
        for number, ((keys, options), h) in enumerate(zip(chain, sorted(holdouts, reverse=True), strict=False)):
            data, onto = folder / f"d{number}", options.onto and str(folder / options.onto)
            shard(write_points(folder / f"raw{number}", keys), str(data), options.model_copy(update={"onto": onto}))
            rows, every = Data(holdout=h), keys_of(data, RowShare())
            held_out.append({*keys_of(data, rows.held_out_rows)})
            trained.append({*keys_of(data, rows.training_rows)})
            edge = low + (1 - low) * (1 - h)
            assert held_out[-1] == {key for key in every if place(key) >= edge}
            assert (held_out[-1] | trained[-1], held_out[-1] & trained[-1]) == ({*every}, set())
            table = open_queries(DataLayout(str(data)), "train")
            for part in table.by_part():  # within 6 standard deviations
                expected, spread = h * part.rows, math.sqrt(h * (1 - h) * part.rows)
                assert abs(rows.held_out_rows.rows(part) - expected) <= 6 * spread + 1
        for before, after in combinations(range(len(held_out)), 2):
            assert not held_out[after] & trained[before]
    finally:
        shutil.rmtree(folder)


SET: dict[str, Any] = {
    "train.epochs": 2,
    "order.batch": 16,
    "order.streams": 2,
    "encoder.dimension": 8,
    "encoder.hidden": 8,
    "encoder.buckets": 64,
    "negatives.random": 8,
    "negatives.hard": 0,
    "data.label_texts": False,
    "logging.tensorboard": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, of which the second has new labels; run1 on the first, with a fusion, and run2 that goes on."""
    root = tmp_path_factory.mktemp("held-out")
    first, second = [f"a{i}" for i in range(400)], [f"a{i}" for i in range(380, 400)] + [f"b{i}" for i in range(120)]
    options = {"test_share": 0.2, "shards": 2, "row_group_rows": 20}
    shard(write_points(root / "1", first), str(root / "d1"), ShardOptions(tokenizer="train:200", **options))
    shard(write_points(root / "2", second, "neu"), str(root / "d2"), ShardOptions(onto=str(root / "d1"), shards=3))
    started = SET | {"data.holdout": 0.2}
    extremis.train("random", root / "d1", root / "run1", set=started, progress=False)
    extremis.fuse(root / "d1", root / "run1", progress=False)
    again = SET | {"data.replay": 0.5}
    extremis.run("random", root / "d2", root / "run2", from_run=root / "run1", set=again, progress=False)
    return root


def recipe_of(run: Path) -> Any:
    return validate(load_config(RunLayout(str(run)).config)["recipe"], str(run))


def test_an_update_holds_out_as_much_as_its_run_and_no_more(folder: Path) -> None:
    recipe = recipe_of(folder / "run2")
    assert (recipe.data.holdout, recipe.data.replay) == (0.2, 0.5)
    start = [f"train.start_from={folder}/run1"]
    less = resolve("random", [*start, "data.holdout=0.1"], str(folder / "d2")).recipe
    assert less.data.holdout == 0.1
    with pytest.raises(InputError, match=r"data\.holdout = 0\.3: .*run1 was trained on rows .* at most 0\.2, or leave"):
        resolve("random", [*start, "data.holdout=0.3"], str(folder / "d2"))


@pytest.mark.parametrize(("data", "run"), [("d1", "run1"), ("d2", "run2"), ("d2", "run1")])
def test_what_is_scored_is_what_a_plain_program_finds(
    folder: Path, data: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[list[str]] = []
    report = evaluate.SplitScores.report

    def watch(scores: Any) -> dict:
        keys = open_queries(DataLayout(f"{folder}/{data}"), "train").rows_at(scores.ids, ["key"])["key"].to_pylist()
        scored.append(keys)
        return report(scores)

    monkeypatch.setattr(evaluate.SplitScores, "report", watch)
    result = extremis.evaluate(folder / data, folder / run, split="holdout", progress=False)
    stored: dict[str, str] = {}  # the file that has a key's newest row
    for version in ("d1", "d2")[: int(data[1])]:
        for file in sorted(Path(folder / version).rglob("queries/train/part-*.parquet")):
            stored |= dict.fromkeys(pq.read_table(file, columns=["key"])["key"].to_pylist(), str(file))
    expected = {key for key in stored if place(key) >= 0.2 + 0.8 * 0.8}
    assert sorted(scored[0]) == sorted(expected)
    assert result.queries == len(expected) > 50
    assert data == "d1" or sum(key.startswith("b") for key in expected) > 10


def test_the_ranker_that_an_update_carries_has_not_seen_what_it_holds_out(folder: Path) -> None:
    rankers = {}
    for run, data in (("run1", "d1"), ("run2", "d2")):
        checkpoint = open_step(RunLayout(f"{folder}/{run}"))
        assert checkpoint is not None
        rankers[run] = open_fusion(f"{folder}/{data}", f"{folder}/{run}", checkpoint)
    table = rankers["run1"].table
    held_out = {*keys_of(folder / "d1", RowShare(0.8, 1.0))}
    assert len({shard.path for shard in table.shards} & {"linear.safetensors", "linear-trained.safetensors"}) == 2
    trained, whole = LinearRanker.read(table, "linear-trained.safetensors"), LinearRanker.read(table)
    carried = rankers["run2"].ranker("test")
    assert held_out
    assert trained is not None
    assert whole is not None
    assert carried is not None
    assert np.array_equal(carried.weights.values, trained.weights.values)
    assert not np.array_equal(carried.weights.values, whole.weights.values)


@pytest.mark.parametrize("parts", ["0002", "", "last 1"])
def test_a_window_of_parts_trains_on_all_but_what_is_held_out(folder: Path, parts: str) -> None:
    rows = Data(holdout=0.2, parts=parts)
    layout = DataLayout(f"{folder}/d2")
    sources = open_sources(layout, "train", label_texts=False, share=rows.training_rows)
    sources = select_window(sources, parts, None if parts else Replay(frozenset(["0001"]), 0.9))
    stream = JoinedStream(sources, Table.open(layout.labels).rows, batch=16, streams=4)
    ids = np.concatenate([batch.rows for batch in stream])
    dealt = [key for source in sources for batch in source.table.batches(["key"]) for key in batch["key"].to_pylist()]
    trained = {dealt[row] for row in ids.tolist()}
    assert trained <= {*keys_of(folder / "d2", rows.training_rows, parts)}
    assert not trained & {*keys_of(folder / "d2", rows.held_out_rows)}
    assert not parts or trained == {*keys_of(folder / "d2", rows.training_rows, parts)}
    assert any(key.startswith("b") for key in trained)


def test_budgets_take_their_share_of_each_part(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = DataLayout(f"{folder}/d2")
    new = np.flatnonzero([key.startswith("neu") for key in Table.open(layout.labels).read(["key"])["key"].to_pylist()])

    def share_of_new(labels: Ragged) -> float:
        return float(np.isin(labels.entries, new).mean())

    fitted: list[Ragged] = []
    monkeypatch.setattr(LinearRanker, "fit", lambda points, *rest: fitted.append(points.labels.slice(0, rest[2])) or 1)
    LinearRanker.of(layout, Data(holdout=0.2), ["input_ids"], budget=20_000)
    recipe, model, _ = load_model(layout, RunLayout(f"{folder}/run2"))
    memory = Memory.build(model, layout, recipe.data, budget=4_000)
    assert 20 < fitted[0].rows < 200
    assert 20 < memory.trained == len(memory.vectors) < 200
    assert 0.15 < share_of_new(fitted[0]) < 0.5  # of the bytes; texts of parts differ in length
    assert 0.15 < share_of_new(memory.labels) < 0.35
    seen: list[dict[str, int]] = []
    batches = RowShare.batches

    def watch(self: RowShare, table: Table, columns: Any = None, limit: int | None = None) -> Any:
        read: dict[str, int] = {}
        for rows in batches(self, table, ["key", *(columns or [])], limit):
            for key in rows["key"].to_pylist():
                read[key[0]] = read.get(key[0], 0) + 1
            yield rows
        seen.append(read)

    monkeypatch.setattr(RowShare, "batches", watch)
    monkeypatch.setattr(data_statistics, "SAMPLED_ROWS", 100)
    data_statistics._measure.cache_clear()
    data_statistics.measure(layout, "train", RowShare(), label_texts=False)
    monkeypatch.setattr(auto, "SCANNED_ROWS", 90)
    write_excerpt(layout, str(tmp_path / "excerpt"), 10_000)
    for read in seen:
        assert 0.15 < read["b"] / sum(read.values()) < 0.35  # 96 of about 416 rows
    monkeypatch.undo()
    table = open_queries(DataLayout(str(tmp_path / "excerpt")), "train")
    hashes = hash_strings(table.read(["key"])["key"], 0)
    assert (hashes[1:] >= hashes[:-1]).all()
    assert table.rows == 90
    keys = table.read(["key"])["key"].to_pylist()
    assert RowShare(0.5, 1.0).rows(table) == sum(place(key) >= 0.2 + 0.8 * 0.5 for key in keys)


def test_train_counts_labels_without_a_row_that_it_trains_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = open_queries(DataLayout(f"{folder}/d2"), "train")
    rows = table.read(["key", "label_ids"]).to_pylist()
    used = {label for row in rows if place(row["key"]) < 0.2 + 0.8 * 0.05 for label in row["label_ids"]}
    labels = Table.open(DataLayout(f"{folder}/d2").labels).rows
    extremis.train("random", folder / "d2", tmp_path / "run", set=SET | {"data.share": 0.05, "train.epochs": 1})
    assert 0 < len(used) < labels
    assert f"{labels - len(used)} of {labels} labels have no row that this run trains on" in capsys.readouterr().err
