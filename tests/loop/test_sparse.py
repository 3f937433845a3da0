"""Sparse features from matrices on disk to scores, through the command line: shard, run with its miner, evaluate."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from tests.command import call, extremis, refused, sets
from tests.pipelines.raw import read_lines, write_lines
from tests.pipelines.tfidf import write_tfidf

REAL = os.environ.get("EXTREMIS_REAL_DATA", "")  # a folder with wordnet/trn.json.gz, …


def matrices_of(name: str, raw: Path, folder: Path) -> Path:
    """TF-IDF features of the first lines of a real data set."""
    if name == "wordnet":
        if not os.path.exists(os.path.join(REAL, "wordnet", "trn.json.gz")):
            pytest.skip("EXTREMIS_REAL_DATA names no folder with wordnet/trn.json.gz")
        raw = write_head(Path(REAL, "wordnet"), folder / "raw", 3000, 300)
    return write_tfidf(raw, folder / "matrices")


@pytest.mark.parametrize(
    ("name", "sink"),
    [
        pytest.param("tate", "webdataset", marks=pytest.mark.slow),
        pytest.param("tate", "parquet", marks=pytest.mark.slow),
        pytest.param("wordnet", "webdataset", marks=pytest.mark.slow),
    ],
)
def test_shard_train_mine_and_evaluate_on_features(raw: Path, tmp_path: Path, name: str, sink: str) -> None:
    matrices, data, run = matrices_of(name, raw, tmp_path), tmp_path / "data", tmp_path / "run"
    summary = extremis(
        "shard", matrices, data, "--propensity", "0.55,1.5", "--row-group-rows", 64, "--sink", sink, "--json"
    ).json
    assert summary["features"] == int((matrices / "trn_X_Xf.txt").read_text().split()[1])
    assert "tokenizer" not in summary["tables"]
    assert_same_values(matrices / "trn_X_Xf.txt", DataLayout(str(data)), sink)
    choices = sets("encoder.inputs=features", "train.epochs=6", "data.label_texts=false", "refresh.stale=wait")
    extremis("run", "astra", data, run, *choices)
    assert open_manifest(RunLayout(str(run)).negatives(2, "queries")).quality["recall_at_k"] > 0.9
    train = extremis("evaluate", data, run, "--split", "train", "--json").json["metrics"]
    test = extremis("evaluate", data, run, "--json").json["metrics"]
    rows, labels = (matrices / "tst_X_Y.txt").read_text().splitlines(), summary["labels"]
    chance = 100 * np.mean([len(row.split()) for row in rows[1:]]) / labels
    assert train["P@1"] > test["P@1"] > 5 * chance
    assert test["PSP@5"] > 0
    refused(call("train", "astra", data, tmp_path / "other"), "encoder.inputs = 'features'", "token ids")


def assert_same_values(file: Path, data: DataLayout, sink: str) -> None:
    """Every row of the matrix is a row of the table, which is in another order."""
    rows = [dict(pair.split(":") for pair in line.split()) for line in file.read_text().splitlines()[1:]]
    expected = sorted([[int(i), np.float32(value)] for i, value in row.items()] for row in rows)
    manifest = open_manifest(data.queries("train"))
    assert {shard.path.rsplit(".", 1)[1] for shard in manifest.shards} == {"tar" if sink == "webdataset" else sink}
    stored = []
    for group in Table(data.queries("train"), manifest).batches(["feature_ids", "feature_values"]):
        (ids, offsets), (values, _) = list_column(group, "feature_ids"), list_column(group, "feature_values")
        for low, high in itertools.pairwise(offsets):
            stored.append([[int(i), value] for i, value in zip(ids[low:high], values[low:high], strict=True)])
    assert sorted(stored) == expected


def write_head(raw: Path, out: Path, rows: int, test_rows: int) -> Path:
    """The first lines of a data set, with the labels that they name, numbered anew."""
    out.mkdir()
    points = {name: read_lines(raw / f"{name}.json.gz")[:n] for name, n in (("trn", rows), ("tst", test_rows))}
    named = sorted({label for records in points.values() for point in records for label in point["target_ind"]})
    number = {label: i for i, label in enumerate(named)}
    for name, records in points.items():
        write_lines(
            out / f"{name}.json.gz",
            [point | {"target_ind": [number[i] for i in point["target_ind"]]} for point in records],
        )
    labels = read_lines(raw / "lbl.json.gz")
    write_lines(out / "lbl.json.gz", [labels[label] for label in named])
    return out
