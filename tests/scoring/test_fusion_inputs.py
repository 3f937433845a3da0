"""A fusion of any rows: without names, titles, tokens or texts; of few rows; and of a mix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extremis
from schemas.layout import DataLayout, RunLayout
from schemas.ragged import Ragged
from scoring import fitting
from scoring.exported import Exported
from scoring.fitting import fit_fusion, open_fused
from scoring.fusion import FusionTrees, ShortlistScores
from scoring.options import FitOptions
from tests.builders import build_data
from tests.scoring.fused_run import RECIPE, Row, draw_rows, label_rows, write_data
from trainer.evaluation.ranking import Ranking
from trainer.inputs import Inputs, open_queries, scored_columns
from trainer.model import load_model

ROWS, LABELS = 150, 30
OF_WORDS, OF_NAMES = {"words", "neighbours"}, {"name", "name weight", "name stems"}
OF_TEXTS = {"text", "points", *OF_WORDS, *OF_NAMES, "name in neighbours", "name in title", "name in words"}


def texts(folder: Path, change: Callable[[int, Row], Row] = lambda _, row: row) -> str:
    rows, labels = draw_rows(ROWS, LABELS), label_rows(LABELS)
    return write_data(
        folder, *([change(*each) for each in enumerate(table)] for table in (rows, labels)), test_share=0.1
    )


def with_vector(number: int, row: Row) -> Row:
    return {**row, "vector": np.random.default_rng(number).normal(size=4).round(3).tolist()}


def on_one_line(_: int, row: Row) -> Row:
    return {**row, "text": row["text"].replace("\n", " ")}


def without_names(number: int, row: Row) -> Row:
    return row if "labels" in row else {**row, "text": "" if number % 2 else row["text"]}


def small(folder: Path, **sizes: Any) -> str:
    return build_data(
        str(folder / "data"), rows={"train": ROWS, "val": 40, "test": 20}, labels=LABELS, **sizes
    ).layout.root


# How the data is made, settings of a run, and the scores beside those of vectors.
CASES: dict[str, tuple[Callable[[Path], str], dict[str, Any], set[str]]] = {
    "titles": (texts, {}, OF_TEXTS),
    "one line": (lambda folder: texts(folder, on_one_line), {}, OF_TEXTS),
    "some labels without a name": (lambda folder: texts(folder, without_names), {}, OF_TEXTS),
    "tokens": (small, {}, OF_TEXTS - {"name in title"}),
    "features": (
        lambda folder: small(folder, features=20, with_tokens=False),
        {"encoder.inputs": "features"},
        {"text", "points", *OF_WORDS},
    ),
    "vectors": (lambda folder: texts(folder, with_vector), {"encoder.inputs": "dense"}, {"text", "points"}),
    "both": (lambda folder: texts(folder, with_vector), {"encoder.inputs": "tokens+dense"}, OF_TEXTS),
    "label encoder": (texts, {"recipe": "dexml-sampled"}, OF_TEXTS - {"text"}),
    "few rows": (texts, {"data.holdout": 0.05}, OF_TEXTS),
    "a mix": (small, {"data.mix.train": 1.0, "data.mix.labels": 1.0, "data.holdout": 0.0}, {"text"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fusion_has_the_scores_that_its_rows_have(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, changes, expected = CASES[name]
    data, run, seen = make(tmp_path), str(tmp_path / "run"), dict[str, Any]()
    stated = RECIPE | changes
    recipe = stated.pop("recipe", "random")
    if recipe != "random":  # it has no negatives of this name
        del stated["negatives.random"]
    extremis.train(recipe, data, run, set=stated, progress=False)
    score_shortlists = fitting.score_shortlists

    def watch(*arguments: Any) -> tuple[ShortlistScores, Ragged]:
        scored, relevant = score_shortlists(*arguments)
        seen.update(by={*scored.by}, right=relevant.contains(scored.ids))
        return scored, relevant

    monkeypatch.setattr(fitting, "score_shortlists", watch)
    monkeypatch.setattr(fitting, "FEWEST_FOR_TREES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(FusionTrees, "can_fit", lambda *_: False)
        facts = fit_fusion(data, run, FitOptions(shortlist=10))[0].parameters
        assert facts["by"] == "weights"
        assert "trees" not in facts["metrics"]
    assert seen["by"] == {"vector", *expected}
    with monkeypatch.context() as patch:
        patch.setattr(FusionTrees, "fuse", lambda *_: seen["right"])  # trees appear to be better
        assert fit_fusion(data, run, FitOptions(shortlist=10))[0].parameters["by"] == "trees"
    model, layout = load_model(DataLayout(data), RunLayout(run))[1:], DataLayout(data)
    fused = open_fused(data, run, model[1], model[0], "test")
    assert isinstance(fused.fusion, FusionTrees)
    columns = {column for column in fused.fusion.trees.columns if not column.endswith((" rank", " gap"))}
    assert columns == {"vector", "weights", "training points", *expected}
    table = open_queries(layout, "test")
    rows = next(iter(table.batches(scored_columns(table, model[0].columns))))
    inputs = Inputs.of(rows, model[0].columns)
    x, none = model[0].embed(inputs), Ragged.empty(rows.num_rows)
    scores, ids = Ranking.of(model[0], rerank=fused).top_k(x, 5, none, None, inputs)
    assert np.isfinite(scores).all()
    extremis.evaluate(data, run, progress=False)
    if name != "both":  # an export would ask for the model of the vectors
        extremis.export(data, run, tmp_path / "export", progress=False)
        found, of_export = Exported.open(str(tmp_path / "export")).serving.rank(inputs, 5)
        np.testing.assert_allclose(found, scores, atol=1e-4)
        np.testing.assert_array_equal(of_export, ids)
