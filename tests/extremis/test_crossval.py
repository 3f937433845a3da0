"""`crossval` from texts to files: every row once, groups in one fold, and the same bytes after an interruption."""

import csv
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import extremis
from schemas.hashing import near
from tests.command import call, refused
from trainer.threads import set_threads

TOPICS = {topic: [f"{topic}{n}" for n in range(6)] for topic in "abcdef"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points with words of two topics, some in another order or case; three points have a label of their own."""
    folder, draw, lines = tmp_path_factory.mktemp("crossval"), random.Random(0), []
    for number in range(240):
        topics = draw.sample(sorted(TOPICS), 2)
        words = [draw.choice(TOPICS[topic]) for topic in topics for _ in range(3)]
        more = ["=rare"] if number in (3, 30, 60) else []
        lines.append({"key": f"k{number}", "text": " ".join(words), "labels": topics + more})
        if number % 3 == 0:
            lines.append({**lines[-1], "key": f"again{number}", "text": " ".join(words[::-1]).upper()})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    extremis.shard(folder / "train.jsonl", folder / "data", tokenizer="train:300", progress=False)
    return folder / "data"


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.rglob("*.*") if path.is_file()}


def test_every_row_is_scored_once_with_all_its_labels(data: Path, tmp_path: Path) -> None:
    found = extremis.crossval(data, tmp_path, folds=3, group="near", suspects=40, progress=False)
    points = [json.loads(line) for line in (data.parent / "train.jsonl").read_text().splitlines()]
    rows = {row["key"]: row for row in pq.read_table(tmp_path / "probabilities.parquet").to_pylist()}
    assert (len(rows), found.rows) == (len(points), len(points))
    folds: dict[str, set[int]] = {}
    for point in points:
        row = rows[point["key"]]
        given = [label for label, is_given in zip(row["labels"], row["given"], strict=True) if is_given]
        assert sorted(given) == sorted(point["labels"])
        assert len({*row["labels"]}) == len(row["labels"]) == len(row["probabilities"])
        assert all(0 <= probability <= 1 for probability in row["probabilities"])
        folds.setdefault(near(point["text"]), set()).add(row["fold"])
    assert all(len(some) == 1 for some in folds.values())
    assert {*range(3)} == set.union(*folds.values())
    (rare,) = csv.DictReader((tmp_path / "unjudged.csv").open(encoding="utf-8"))
    concerned = {point["key"] for point in points if "=rare" in point["labels"]}
    assert rare["label"] == "'=rare"  # a spreadsheet does not compute it
    assert {*rare["rows"].split(" | ")} == concerned
    assert (found.unjudged, rare["points"]) == (6, "6")
    suspects = pq.read_table(tmp_path / "suspects.parquet").to_pylist()
    by_key = {point["key"]: point for point in points}
    for suspect in suspects:
        assert suspect["given"] is (suspect["label"] in by_key[suspect["key"]]["labels"])
        near_folds = {rows[key]["fold"] for key in suspect["nearest"]}
        assert suspect["nearest"]
        assert rows[suspect["key"]]["fold"] not in near_folds
    given = [suspect["support"] for suspect in suspects if suspect["given"]]
    assert given == sorted(given)
    assert len(given) == 40


def test_one_thread_and_two_and_an_interruption_give_the_same_bytes(data: Path, tmp_path: Path) -> None:
    extremis.crossval(data, tmp_path / "a", folds=3, progress=False)
    before = contents(tmp_path / "a")
    kept = tmp_path / "a" / "folds" / "fold-0.parquet"
    written = kept.stat().st_mtime_ns
    for name in ("folds/fold-1.parquet", "folds/fold-2.parquet", "suspects.csv"):
        (tmp_path / "a" / name).unlink()
    set_threads(1)
    extremis.crossval(data, tmp_path / "a", folds=3, progress=False)
    assert contents(tmp_path / "a") == before
    assert kept.stat().st_mtime_ns == written


def test_too_many_folds_are_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    refused(call("crossval", data, tmp_path / "a", "--folds", "100"), "--folds", "100", "fewer folds")
    assert not (tmp_path / "a").exists()
