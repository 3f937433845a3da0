"""A day: a version is sharded, a run goes on from yesterday's, and is evaluated, exported and asked."""

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import extremis
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from scoring.fitting import open_fusion
from scoring.memory import Memory
from tests.command import ROOT
from tests.days import TINY
from tests.pipelines.test_versions import NAMES, SEQUENCE, make, rows_of
from tests.training import silent
from trainer.checkpoints import latest_checkpoint
from trainer.group import ALONE, Group
from trainer.model import (
    DataSizes,
    embed_texts,
    find_checkpoint,
    initialise_from_run,
    load_encoder,
    load_model,
    open_texts,
)
from trainer.model import Model as TrainedModel
from trainer.recipe_files import load_recipe
from trainer.settings.resolve import resolve
from trainer.settings.versions import FEW_PASSES, MIN_TIME
from trainer.setup import open_replay
from trainer.stream import open_sources
from trainer.stream.sources import select_window


def weights(run: Path) -> torch.Tensor:
    checkpoint = latest_checkpoint(RunLayout(str(run)))
    assert checkpoint is not None
    return checkpoint.vectors("weight").float()


class Half(Group):
    """One of two ranks, which asks nothing of the other."""

    ranks = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def begun(days: Path, data: str, group: Group = ALONE, more: Mapping[str, str] = {}, **train: Any) -> TrainedModel:
    """A model of the recipe on `data`, as it begins with run0."""
    changes = [*(f"{key}={str(value).lower()}" for key, value in {**TINY, **more}.items())]
    changes += [f"train.{key}={value!r}" for key, value in {"start_from": f"{days}/run0", **train}.items()]
    recipe, layout = load_recipe("random", changes), DataLayout(f"{days}/{data}")
    facts = DataSizes.of(layout)
    model = TrainedModel.build(recipe, facts.vocabulary, facts.labels, facts.features, group)
    assert initialise_from_run(model, layout, recipe, silent)
    return model


def test_labels_of_the_run_keep_vectors_and_optimizer_state(days: Path) -> None:
    _, checkpoint = find_checkpoint(DataLayout(f"{days}/data0"), RunLayout(f"{days}/run0"))
    model, known = begun(days, "data1", start_optimizer=1), checkpoint.labels
    for name, rows in model.head.rows().items():
        assert torch.equal(rows[:known], checkpoint.vectors(name))
    assert not model.head.rows()["square"][known:].any()
    before, after = checkpoint.tensors("encoder-optimizer"), model.encoder.optimizer_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_another_optimizer_starts_without_state(days: Path) -> None:
    changes = {"classifier.optimizer": "adam", "encoder.optimizer": "adam"}
    model = begun(days, "data1", more=changes, start_optimizer=1)
    state = {**model.head.rows(), **model.encoder.optimizer_tensors()}
    assert not any(state[name].any() for name in ("first", "second", "count", "embedding.first"))


def estimated(model: TrainedModel, layout: DataLayout, known: int, texts: bool) -> tuple[dict[int, torch.Tensor], Any]:
    """What vectors are estimated by, label by label, and the mean of it; of the points that were added, or texts."""
    table = Table.open(layout.queries("train"))
    groups = table.of_parts([table.parts[-1]]).batches()
    points = [(model.embed_table(group)[:, :8], group["label_ids"].to_pylist()) for group in groups]
    x, ids = torch.cat([z for z, _ in points]), [row for _, rows in points for row in rows]
    if texts:
        z = torch.cat([z for _, z in embed_texts(model, layout, 0, len(model.head.vectors))])
        return dict(enumerate(z)), (z.mean(0), x.mean(0))
    named = {
        label: torch.stack([x[i] for i, row in enumerate(ids) if label in row]) for label in {*itertools.chain(*ids)}
    }
    return {label: rows.mean(0) for label, rows in named.items()}, (x.mean(0), x.mean(0))


@pytest.mark.parametrize("texts", [False, True])
def test_new_labels_begin_where_trained_ones_are_to_their_points_or_texts(days: Path, texts: bool) -> None:
    before = weights(days / "run0")
    known, layout = len(before), DataLayout(f"{days}/data1")
    model = begun(days, "data1", new_labels="texts" if texts else "points")
    v, (mean, query) = estimated(model, layout, known, texts)
    fitted = sorted(label for label in v if label < known)
    across = torch.cat([v[label] - mean for label in fitted])
    slope = torch.linalg.lstsq(across[:, None], torch.cat([before[label, :8] for label in fitted])[:, None]).solution
    level = torch.stack([before[label, :8] @ query + before[label, 8] for label in fitted]).median()
    new = [label for label in v if label >= known]
    assert new
    for label in new:
        expected = slope.clamp(min=0).squeeze() * (v[label] - mean)
        row = model.head.vectors[label].float()
        torch.testing.assert_close(row[:8], expected, atol=1e-4, rtol=1e-3)
        assert float(row[:8] @ query + row[8]) == pytest.approx(float(level), abs=1e-3)


@pytest.mark.parametrize("new", ["points", "texts"])
def test_vectors_begin_alike_on_any_number_of_ranks(days: Path, new: str) -> None:
    whole = begun(days, "data1", new_labels=new).head.vectors
    halves = [begun(days, "data1", Half(rank), new_labels=new).head.vectors for rank in range(2)]
    torch.testing.assert_close(torch.cat(halves), whole)


def test_new_labels_may_begin_as_in_any_run(days: Path) -> None:
    known, model = len(weights(days / "run0")), begun(days, "data1", new_labels="initial")
    assert (model.head.vectors[known:, :8] == 0).all()


def test_the_encoder_is_that_of_the_run_but_for_features_that_no_row_of_it_had(days: Path) -> None:
    _, checkpoint = find_checkpoint(DataLayout(f"{days}/data0"), RunLayout(f"{days}/run0"))
    tensors, before = begun(days, "data1").encoder.tensors(), checkpoint.tensors("encoder")
    had = before["feature_weights"] > 0
    assert torch.equal(tensors["feature_weights"][had], before["feature_weights"][had])
    admitted = ~had & (tensors["feature_weights"] > 0)
    assert admitted.any()
    assert (tensors["embedding"][admitted] == 0).all()
    assert torch.equal(tensors["embedding"][~admitted], before["embedding"][~admitted])
    for name in before.keys() - {"feature_weights", "embedding"}:
        assert torch.equal(tensors[name], before[name])


def test_a_refresh_shows_new_rows_half_as_often_and_old_ones_less(days: Path) -> None:
    data, changes = f"{days}/data2", [f"train.start_from={str(days / 'run1')!r}"]
    whole = resolve("random", (), data).recipe
    recipe = resolve("random", changes, data).recipe
    assert recipe.train.epochs == -(-whole.train.epochs // 2)
    rows = [part.rows for part in Table.open(DataLayout(data).queries("train")).parts]
    dealt = recipe.train.epochs * (rows[-1] + recipe.data.replay * sum(rows[:-1]))
    share = rows[-1] / sum(rows)
    assert dealt / (whole.train.epochs * sum(rows)) == pytest.approx(MIN_TIME + share, rel=0.05)
    run = extremis.train("random", data, days / "run2", from_run=days / "run1", progress=False)
    assert len(run.epochs) == recipe.train.epochs


@pytest.mark.parametrize("epochs", [2, 40])
def test_a_refresh_with_few_passes_over_old_rows_keeps_the_optimizers_state(
    days: Path, tmp_path: Path, epochs: int
) -> None:
    (tmp_path / "recipe.toml").write_text(f'extends = "random"\n[train]\nepochs = {epochs}\n')
    changes = [f"train.start_from={str(days / 'run1')!r}"]
    recipe = resolve(str(tmp_path / "recipe.toml"), changes, f"{days}/data2").recipe
    assert recipe.train.start_optimizer == (recipe.train.epochs * recipe.data.replay < FEW_PASSES) == (epochs == 2)
    whole = resolve("random", [*changes, f"train.epochs={epochs - 1}"], f"{days}/data2").recipe
    assert whole.train.start_optimizer == (epochs == 2)


def test_a_refresh_has_hard_negatives_from_the_first_step(days: Path) -> None:
    data, changes = f"{days}/data2", [f"train.start_from={str(days / 'run1')!r}", "negatives.hard=3"]
    recipe = resolve("random", changes, data).recipe
    assert (recipe.refresh.source, recipe.refresh.start) == ("in-trainer", 0)
    stated = resolve("random", [*changes, "refresh.source=table", "refresh.start=2", "train.epochs=5"], data).recipe
    assert (stated.refresh.source, stated.refresh.start, stated.train.epochs) == ("table", 2, 5)
    assert stated.data.replay == 1


DUAL: dict[str, Any] = {name: TINY[name] for name in TINY if name.startswith(("train", "order", "encoder"))}
DUAL |= {"negatives.hard": 2, "negatives.width": 3}


def test_a_refreshed_dual_encoder_has_a_table_by_the_run_before_from_the_first_step(days: Path, tmp_path: Path) -> None:
    layout, before, replayed = DataLayout(f"{days}/data2"), tmp_path / "run1", {**DUAL, "data.replay": 0.5}
    extremis.train("dexml-sampled", days / "data1", before, set={**DUAL, "negatives.hard": 0}, progress=False)
    run = extremis.run("dexml-sampled", layout.root, tmp_path / "run2", from_run=before, set=replayed, progress=False)
    assert [epoch["table_epoch"] for epoch in run.epochs] == [0] * len(run.epochs)
    assert [epoch["late"] for epoch in run.epochs] == [False] * len(run.epochs)

    changes = [f"{key}={value}" for key, value in replayed.items()]
    recipe = resolve("dexml-sampled", [*changes, f"train.start_from={str(before)!r}"], layout.root).recipe
    facts, texts = DataSizes.of(layout), open_texts(layout, recipe)
    model = TrainedModel.build(recipe, facts.vocabulary, facts.labels, texts=texts)
    assert initialise_from_run(model, layout, recipe, silent)
    of_run = RunLayout(str(tmp_path / "run2"))
    for source in select_window(open_sources(layout, "train", True), "", open_replay(layout, recipe)):
        rows, table = source.table.read(), Table.open(of_run.negatives(0, source.name), "negatives").read()
        own = rows.column("label_ids" if "label_ids" in rows.column_names else "label_id").to_pylist()
        scores = (model.embed_table(rows).half().float() @ model.head.vectors.float().T).numpy()
        for hard, score, positives in zip(table.column("label_ids").to_pylist(), scores, own, strict=True):
            score[positives] = -np.inf
            found = [label for label in hard if label >= 0]
            np.testing.assert_allclose(score[found], np.sort(score)[::-1][: len(found)], atol=2e-3)
            assert len({*found}) == min(3, np.isfinite(score).sum())


@pytest.mark.parametrize(
    ("recipe", "changes", "start", "replays"),
    [
        (str(ROOT / "papers/rae/rae.toml"), [], 0, False),
        ("dexml-sampled", ["negatives.hard=2"], 0, False),  # a dual encoder forgets what it is shown less often
        ("dexml-sampled", ["negatives.hard=2", "refresh.start=2"], 2, False),
        ("random", ["negatives.hard=3", "refresh.source=table"], 0, True),
        ("random", ["negatives.hard=3", "refresh.source=table", "refresh.every=2"], 0, False),  # tables of epochs
        ("random", ["negatives.hard=3", "refresh.by=labels", "data.label_texts=true"], 0, False),
        ("ngame", ["order.cluster=2"], 2, False),  # clusters are of no earlier run
    ],
)
def test_which_refreshes_begin_with_a_table(
    recipe: str, changes: list[str], start: int, replays: bool, days: Path
) -> None:
    stated = [*_sizes(recipe), *changes, f"train.start_from={str(days / 'run1')!r}"]
    settled = resolve(recipe, stated, f"{days}/data2").recipe
    assert settled.tables is not None
    assert settled.tables.start == start
    assert (settled.data.replay < 1) == replays
    assert settled.table_epochs() == [e for e in range(start, settled.train.epochs, settled.tables.every) if e != 1]


def _sizes(recipe: str) -> list[str]:
    changes = ["order.batch=8", "order.streams=2", "encoder.dimension=8", "encoder.hidden=8", "encoder.buckets=64"]
    rates = [] if recipe == "random" else ["encoder.lr=0.01", "encoder.dense_lr=0.01"]
    return [*changes, *rates]


@pytest.mark.parametrize("start", ["0", "1"])
def test_a_run_from_nothing_has_no_table_before_epoch_2(start: str) -> None:
    with pytest.raises(
        InputError, match=rf"refresh.start = {start} is too early: .*Set 2 or more, or 0 with train.start_from"
    ):
        load_recipe("dexml-sampled", [*_sizes("dexml"), f"refresh.start={start}"])


def test_a_refresh_keeps_the_fusion_of_the_run_before_with_a_memory_of_its_own(days: Path, tmp_path: Path) -> None:
    before = shutil.copytree(days / "run1", tmp_path / "run1")
    extremis.fuse(days / "data1", before, split="train", progress=False)
    extremis.train("random", days / "data2", tmp_path / "run2", from_run=before, progress=False)
    data, layout = str(days / "data2"), DataLayout(f"{days}/data2")
    recipe, model, checkpoint = load_model(layout, RunLayout(str(tmp_path / "run2")))
    carried = open_fusion(data, str(tmp_path / "run2"), checkpoint)
    _, earlier = find_checkpoint(DataLayout(f"{days}/data1"), RunLayout(str(before)))
    known = open_fusion(f"{days}/data1", str(before), earlier)
    assert carried.fusion == known.fusion
    memory, older, own = carried.memory(), known.memory(), Memory.build(model, layout, recipe.data)
    assert memory is not None
    assert older is not None
    np.testing.assert_array_equal(memory.vectors, own.vectors)
    assert not np.array_equal(memory.vectors, older.vectors)
    assert extremis.evaluate(data, tmp_path / "run2", split="train", progress=False).scores == "fused"


def test_a_run_of_other_data_is_refused(days: Path, tmp_path: Path) -> None:
    make(tmp_path, SEQUENCE[:1])
    with pytest.raises(InputError, match="trained on different data"):
        extremis.train("random", tmp_path / "data0", tmp_path / "run", from_run=days / "run1", progress=False)


def test_a_model_of_another_make_is_refused(days: Path, tmp_path: Path) -> None:
    changes = {**TINY, "encoder.dimension": 16}
    with pytest.raises(InputError, match=r"differs: encoder.dimension is 8 in that run, 16 in this run"):
        extremis.train("random", days / "data1", tmp_path / "run", from_run=days / "run0", set=changes, progress=False)


def test_retired_labels_are_never_predicted_by_an_export(days: Path, tmp_path: Path) -> None:
    extremis.export(days / "data1", days / "run1", tmp_path / "export", index="none", progress=False)
    retired = {row["key"] for row in rows_of(f"{days}/data1/labels") if row["retired"]}
    for prediction in extremis.load(tmp_path / "export").predict(["text 1", "t3 u9"], max_labels=9):
        keys = {label.key for label in prediction.labels}
        assert retired
        assert not keys & retired
        assert keys == set(NAMES) - retired


def test_data_lists_shows_and_drops_versions(days: Path, tmp_path: Path) -> None:
    root = tmp_path / "moved"
    shutil.copytree(days, root)
    listed = extremis.data("list", root, progress=False).versions
    assert [each["data"] for each in listed] == ["data0", "data1", "data2"]
    assert [each["needs"] for each in listed] == [[], ["data0"], ["data0", "data1"]]
    shown = extremis.data("show", root / "data2", progress=False)
    assert [part["part"] for part in shown.parts] == ["0001", "0002", "0003"]
    assert shown.parts[2]["rows"]["train"] == 1
    with pytest.raises(InputError, match=r"files of this data are needed by .*data1, .*data2\. Drop"):
        extremis.data("drop", root / "data0", progress=False)
    extremis.data("drop", root / "data2", progress=False)
    extremis.data("drop", root / "data1", progress=False)
    assert [each["data"] for each in extremis.data("list", root, progress=False).versions] == ["data0"]
    shutil.rmtree(root / "data0")
    with pytest.raises(InputError, match="no data set or export here"):
        extremis.data("drop", root / "data1", progress=False)


def test_what_is_gone_is_told(days: Path, tmp_path: Path) -> None:
    shutil.copytree(days / "data1", tmp_path / "data1")
    (version,) = extremis.data("list", tmp_path, progress=False).versions
    assert "part 0001" in version["fault"]


def test_embeddings_and_negatives_are_aligned_with_a_version(days: Path, tmp_path: Path) -> None:
    out = extremis.embed(days / "data1", days / "run1", tmp_path / "x", split="train", progress=False)
    assert out
    table, embeddings = Table.open(f"{days}/data1/queries/train"), Table.open(f"{tmp_path}/x")
    assert embeddings.shard_sizes == table.shard_sizes
    model = load_encoder(DataLayout(f"{days}/data1"), RunLayout(f"{days}/run1"))
    for queries, embedded in zip(table.batches(), embeddings.batches(), strict=True):
        assert queries["query_id"].to_pylist() == embedded["query_id"].to_pylist()
        x = np.array(embedded["vector"].to_pylist(), np.float32)
        assert np.allclose(x, model.embed_table(queries).numpy(), atol=2e-2)
