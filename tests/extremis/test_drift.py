"""Yesterday's run on today's data: what it cannot know it never predicts, and the report puts both side by side."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extremis
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.storage import list_names
from schemas.table import Table
from scoring.exported import Exported
from tests.pipelines.test_versions import rows_of
from trainer.evaluation.metrics import Metrics
from trainer.inputs import Inputs
from trainer.model import load_model


@pytest.fixture(scope="module")
def scored(days: Path) -> dict[str, Any]:
    """Evaluations of both runs on the second version, and of each on its own."""
    pairs = {"old on new": ("data1", "run0"), "new on new": ("data1", "run1"), "old on old": ("data0", "run0")}
    return {
        name: extremis.evaluate(days / data, days / run, split="train", progress=False)
        for name, (data, run) in pairs.items()
    }


def test_labels_that_came_later_are_positives_and_are_never_predicted(days: Path, scored: dict[str, Any]) -> None:
    layout = DataLayout(f"{days}/data1")
    _, model, checkpoint = load_model(layout, RunLayout(f"{days}/run0"), earlier=True)
    retired = np.array([row["retired"] for row in rows_of(layout.labels)])
    candidates = np.flatnonzero(~retired[: checkpoint.labels])
    hits = {1: 0.0, 3: 0.0}
    queries = 0
    for rows in Table.open(layout.queries("train")).batches():
        scores = model.embed_table(rows) @ model.head.vectors[candidates].float().T
        ranked = candidates[np.argsort(-scores.numpy(), axis=1, kind="stable")]
        for row, positives in zip(ranked, rows["label_ids"].to_pylist(), strict=True):
            left = {label for label in positives if not retired[label]}
            queries += bool(left)
            for k in hits:
                hits[k] += len(left & {*row[:k].tolist()}) / k if left else 0
    for k, total in hits.items():
        assert scored["old on new"].metrics[f"P@{k}"] == pytest.approx(100 * total / queries)
    new = scored["old on new"]
    assert (new.queries, new.queries + new.without_active_labels) == (
        queries,
        Table.open(layout.queries("train")).rows,
    )
    by_part = new.labels_by_part
    found, counted = (
        [sum(group["positives"] * group[name] for group in groups.values()) for name in ("R@1", "R@10")]
        + [sum(group["positives"] for group in groups.values())]
        for groups in (by_part, new.labels_by_frequency)
    )
    assert found == pytest.approx(counted)
    assert (by_part["0001"]["positives"] > 0, by_part["0002"]["R@10"]) == (True, 0.0)
    assert scored["new on new"].labels_by_part["0002"]["R@10"] > 0


def test_a_fused_run_is_scored_on_a_later_version_as_its_export_predicts(days: Path, tmp_path: Path) -> None:
    run = shutil.copytree(days / "run0", tmp_path / "run")
    extremis.fuse(days / "data0", run, split="train", progress=False)
    extremis.export(days / "data0", run, tmp_path / "export", progress=False)
    serving, layout = Exported.open(str(tmp_path / "export")).serving, DataLayout(f"{days}/data1")
    retired = np.flatnonzero([row["retired"] for row in rows_of(layout.labels)])
    metrics = Metrics()
    for rows in Table.open(layout.queries("train")).batches():
        positives = list_column(rows, "label_ids")
        positives = positives.keep(~np.isin(positives.values, retired))
        filters = Ragged.from_matrix(np.tile(retired, (rows.num_rows, 1)))
        _, top = serving.rank(Inputs.of(rows.select(serving.columns)), 10, filters)
        labelled = np.flatnonzero(positives.counts)
        metrics.update(top[labelled], positives.take(labelled))
    scored = extremis.evaluate(days / "data1", run, split="train", progress=False)
    assert (scored.scores, scored.metrics) == ("fused", pytest.approx(metrics.result()))


def test_each_is_kept_by_its_data(days: Path, scored: dict[str, Any]) -> None:
    run = RunLayout(f"{days}/run0")
    digest = open_manifest(f"{days}/data1").digest
    step = scored["old on old"].step
    for body, place in (
        (scored["old on old"], run.evaluation("train", step)),
        (scored["old on new"], run.evaluation("train", step, digest)),
    ):
        assert json.loads(Path(place).read_text())["metrics"] == body.metrics
    assert scored["old on old"].version == {"number": 1, "part": "0001"}
    assert scored["old on new"].version == {"number": 2, "part": "0002"}
    assert len([name for name in list_names(run.evaluations) if not name.endswith(".parquet")]) == 2


def test_what_is_of_the_data_alone_is_refused(days: Path) -> None:
    with pytest.raises(InputError, match="trains on all rows of train"):
        extremis.evaluate(days / "data1", days / "run0", split="holdout", progress=False)
    with pytest.raises(InputError, match="trained on different data"):
        extremis.evaluate(days / "data0", days / "run1", split="train", progress=False)


def charts_of(page: Path) -> dict[str, Any]:
    (body,) = re.findall(r'<script type="application/json" id="body">(.*?)</script>', page.read_text(), re.DOTALL)
    charts = json.loads(body)["charts"]["metrics"]
    return {chart["id"]: chart["figure"] for chart in charts if "figure" in chart}


def test_the_report_compares_them_over_parts_and_versions(days: Path, scored: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    extremis.report(days / "data1", days / "run0", days / "run1", out=page, progress=False)
    charts = charts_of(page)
    for name, expected in (("parts-train", 4), ("label-parts-train", 2)):
        assert len(charts[name]["data"]) == expected
    for trace in charts["parts-train"]["data"]:
        assert trace["x"] == ["0001", "0002"]
    assert charts["parts-train"]["layout"]["xaxis"]["type"] == "category"
    metric = "P@1"
    values = next(t["y"] for t in charts["parts-train"]["data"] if re.search(rf"/run0 \(.*\) {metric}", t["name"]))
    assert values == pytest.approx([scored["old on new"].parts[part][metric] for part in ("0001", "0002")], rel=1e-3)
    assert "versions-train" not in charts

    extremis.report(days / "run0", days / "run1", out=page, progress=False)
    versions = charts_of(page)["versions-train"]["data"][0]
    assert versions["x"] == ["1: 0001", "2: 0002"]
    expected = [scored[name].metrics["P@1"] for name in ("old on old", "new on new")]
    assert versions["y"] == pytest.approx(expected, rel=1e-3)
