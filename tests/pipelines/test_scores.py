"""Scores of negatives: rows that limits leave short, and the order of scores in tables."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.arrays import mine_arrays
from pipelines.mining.filters import rows_of_table
from pipelines.mining.inputs import require_finite
from pipelines.options import ArrayOptions
from schemas import arrow
from schemas.errors import InputError, TableError
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from search.topk import pack
from tests.command import call

CASES = Path(__file__).parents[1] / "cases"
SHORT, LARGE = CASES / "margin-empty", CASES / "float16-scores"


def positives_of(folder: Path) -> dict[int, list[int]]:
    own: dict[int, list[int]] = {}
    for query, document in np.loadtxt(folder / "pos.csv", int, delimiter=",", skiprows=1):
        own.setdefault(query, []).append(document)
    return own


def read(out: str) -> tuple[np.ndarray, np.ndarray]:
    rows = Table.open(f"{out}/queries").read()
    return matrix_column(rows, "label_ids"), matrix_column(rows, "scores")


@pytest.mark.parametrize(
    ("names", "limits"),
    [
        (("q", "d"), {"margin": 0.1}),
        (("q", "d"), {"relative_margin": 0.05}),
        (("q", "d"), {"max_score": 0.3}),
        (("q1000", "d1000"), {"max_score": 100.0}),
        (("q", "d"), {"margin": 0.1, "max_score": 0.2, "skip_top": 7}),
    ],
)
def test_rows_get_the_negatives_that_they_have(tmp_path: Path, names: tuple[str, str], limits: dict) -> None:
    queries, documents = (SHORT / f"{name}.npy" for name in names)
    options = ["--positives", SHORT / "pos.csv", "--width", 50]
    for name, value in limits.items():
        options += [f"--{name.replace('_', '-')}", value]
    done = call("mine", queries, documents, "--out", tmp_path / "out", *options, "--json")
    label_ids, got = read(str(tmp_path / "out"))
    scores = np.load(queries).astype(np.float64) @ np.load(documents).astype(np.float64).T
    positives, short = positives_of(SHORT), 0
    for row, line in enumerate(scores):
        own, limit = positives.get(row, []), limits.get("max_score", np.inf)
        ranked = [label for label in np.argsort(-line, kind="stable") if label not in own]
        if own and {"margin", "relative_margin"} & {*limits}:
            weakest = line[own].min()
            margin = limits.get("margin", 0) + limits.get("relative_margin", 0) * abs(weakest)
            limit = min(limit, weakest - margin)
        expected = [label for label in ranked[limits.get("skip_top", 0) :] if line[label] < limit][:50]
        short += len(expected) < 50
        assert label_ids[row].tolist() == expected + [-1] * (50 - len(expected))
        np.testing.assert_allclose(got[row, : len(expected)], line[expected], rtol=1e-5, atol=1e-6 * abs(line).max())
    assert (f"{short:,} rows have fewer than 50 negatives: give " in done.err) is (short > 0), done.err
    assert done.json["tables"]["queries"]["counters"]["padded_rows"] == short


def test_large_scores_keep_their_order(tmp_path: Path) -> None:
    mined, merged = str(tmp_path / "mined"), str(tmp_path / "merged")
    options = ArrayOptions(positives=str(LARGE / "pos.csv"), out=mined, width=5)
    mine_arrays(str(LARGE / "q.npy"), str(LARGE / "d.npy"), options)
    label_ids, scores = read(mined)
    products = np.load(LARGE / "q.npy").astype(np.float64) @ np.load(LARGE / "d.npy").astype(np.float64).T
    for row, own in positives_of(LARGE).items():
        products[row, own] = -np.inf
    assert (label_ids == np.argsort(-products, axis=1)[:, :5]).all()
    assert scores.max() > 65_504
    assert (np.diff(scores) < 0).all()
    call("merge", f"{mined}/data", f"{mined}/queries", merged, "--others", f"{mined}/queries", "--by", "score")
    again = Table.open(merged).read()
    assert (matrix_column(again, "label_ids") == label_ids).all()
    assert (matrix_column(again, "scores") == scores).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_score_that_is_not_finite_is_named(value: float) -> None:
    labels, scores = np.array([[3, 5]]), np.array([[1.0, 0.5]], np.float32)
    schema = arrow.negatives(2, arrow.label_type(9), teacher=True)
    teacher = np.array([[0.5, value]], np.float32)
    with pytest.raises(InputError, match=rf"query_id 7, label 5: the score is {value}, not a finite"):
        rows_of_table(np.array([7]), pack(labels, scores), schema, teacher)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30, -1e20])
def test_a_vector_whose_scores_may_not_be_finite_is_named(value: float) -> None:
    rows = np.ones((4, 3), np.float32)
    require_finite(rows, 0, "place")
    rows[2, 1] = value
    with pytest.raises(TableError, match="place: the vector of row 12 is not finite, or contains"):
        require_finite(rows, 10, "place")
