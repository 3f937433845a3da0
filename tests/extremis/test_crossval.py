"""`crossval` from texts to files: every row once, groups in one fold, and the same bytes after an interruption."""

import csv
import json
import random
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import extremis
from schemas.hashing import near
from tests.command import TINY, call, command, environment, refused
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


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    """A run of a few epochs, whose recipe is taken."""
    short = [*TINY, "train.epochs=6", "order.batch=32", "checkpoint.every_epochs=1", "logging.tensorboard=false"]
    extremis.train("random", data, data.parent / "run", set=short, progress=False)
    return data.parent / "run"


@pytest.fixture(scope="module")
def by_recipe(data: Path, run: Path) -> Path:
    extremis.crossval(data, data.parent / "by-recipe", folds=2, recipe=run, progress=False)
    return data.parent / "by-recipe"


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_fold_goes_on_and_gives_the_same_bytes(
    data: Path, run: Path, by_recipe: Path, tmp_path: Path
) -> None:
    words = command("crossval", data, tmp_path, "--folds", "2", "--recipe", run)
    killed = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not [*tmp_path.glob("folds/*-1/run/checkpoints/*/_manifest.json")]:
        assert killed.poll() is None
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    kept, events = tmp_path / "folds" / "fold-0.parquet", list[extremis.Event]()
    assert [*tmp_path.rglob("fold-*.parquet")] == [kept]
    written = kept.stat().st_mtime_ns
    extremis.crossval(data, tmp_path, folds=2, recipe=run, progress=events.append)
    assert contents(tmp_path) == contents(by_recipe)
    assert kept.stat().st_mtime_ns == written
    assert 0 not in [event.fields["epoch"] for event in events if event.kind == "epoch"]  # the run went on


def test_a_recipe_does_not_see_the_labels_of_the_rows_that_it_scores(
    data: Path, run: Path, by_recipe: Path, tmp_path: Path
) -> None:
    rows = pq.read_table(by_recipe / "probabilities.parquet").to_pylist()
    fold = {row["key"]: row["fold"] for row in rows}
    points = [json.loads(line) for line in (data.parent / "train.jsonl").read_text().splitlines()]
    own = [point for point in points if not fold[point["key"]]]
    for point, labels in zip(own, [point["labels"] for point in own[1:] + own[:1]], strict=True):
        point["labels"] = labels
    extremis.shard([{**point} for point in points], tmp_path / "data", tokenizer="train:300", progress=False)
    extremis.crossval(tmp_path / "data", tmp_path / "out", folds=2, recipe=run, progress=False)
    same = [pq.read_table(out / "folds" / "fold-0.parquet") for out in (by_recipe, tmp_path / "out")]
    assert same[0].select(["scores", "ids"]).equals(same[1].select(["scores", "ids"]))
    other = [pq.read_table(out / "folds" / "fold-1.parquet") for out in (by_recipe, tmp_path / "out")]
    assert not other[0]["scores"].equals(other[1]["scores"])


def test_too_many_folds_are_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    refused(call("crossval", data, tmp_path / "a", "--folds", "100"), "--folds", "100", "fewer folds")
    assert not (tmp_path / "a").exists()


def test_a_recipe_that_begins_with_a_model_of_all_rows_is_refused(data: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text(f'extends = "random"\n[train]\nstart_from = "{run}"\n')
    done = call("crossval", data, tmp_path / "a", "--recipe", tmp_path / "more.toml")
    refused(done, "--recipe", "more.toml", f"without {run}, which has seen all rows")
    assert not (tmp_path / "a").exists()
