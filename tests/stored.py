"""Tiny artifacts of each kind, as a release stored them, and what it read from them: `python -m tests.stored`."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import extremis
from schemas.layout import MANIFEST
from schemas.table import Table
from tests.days import TINY

STORED = Path(__file__).parent / "cases" / "format-2"
RECIPE: dict[str, Any] = TINY | {"train.epochs": 3, "refresh.start": 2, "refresh.stale": "wait", "negatives.hard": 2}
RECIPE |= {"data.holdout": 0.4, "order.batch": 8, "encoder.buckets": 32, "logging.tensorboard": False}
THINGS, PLACES = ("ship", "horse", "tower", "whale", "cloud", "tree"), ("sea", "field", "street", "harbour", "garden")


def rows(first: int, stop: int) -> list[dict[str, Any]]:
    """Rows whose labels are a thing and a place; the text names the place, and now and then another thing."""
    made = []
    for number in range(first, stop):
        thing, seen, place = THINGS[number % 6], THINGS[(number + (number % 7 < 2)) % 6], PLACES[number * number % 5]
        made.append({"key": f"k{number}", "text": f"a {seen} by the {place}", "labels": [thing, place]})
    return made


def make() -> None:
    """Make, in the current folder, two versions of a data set, a run that mined, and all that is made of a run."""
    common: dict[str, Any] = {"shards": 1, "propensity": (0.55, 1.5), "progress": False}
    first = {"train": [*rows(0, 90), {"key": "none", "text": "no label"}], "test": rows(90, 120)}
    labels = [{"key": name, "text": f"{name}s"} for name in THINGS + PLACES]
    options = {"tokenizer": "train:100", "row_group_rows": 32, "keep_text": True, "max_reject_share": 0.1}
    extremis.shard({**first, "labels": labels}, "data/1", **options, **common)
    extremis.shard({"train": rows(88, 110)}, "data/2", onto="data/1", part="later", **common)
    extremis.run("astra", "data/1", "run", set=RECIPE, deterministic=True, threads=1, progress=False)
    extremis.cluster("data/1", "run", size=16, progress=False)
    extremis.fuse("data/1", "run", progress=False)
    extremis.export("data/1", "run", "export", precision=0.5, at_least=1, progress=False)
    extremis.tuples("run", "tuples", data="data/1", progress=False)


def read() -> dict[str, Any]:
    """Return what is read from the artifacts in the current folder. Evaluates the run."""
    tables = [Table.open(str(path.parent)) for path in sorted(Path().rglob(MANIFEST))]
    for table in tables:
        table.verify()
    found = extremis.load("export").predict([row["text"] for row in rows(0, 9)])
    return {
        "tables": {table.url: [table.kind, table.rows, table.digest] for table in tables},
        "labels": [label.key for prediction in found for label in prediction.labels],
        "scores": [label.score for prediction in found for label in prediction.labels],
        "probabilities": [label.probability for prediction in found for label in prediction.labels],
        "metrics": extremis.evaluate("data/1", "run", split="test", progress=False).metrics,
        "metrics on data/2": extremis.evaluate("data/2", "run", split="test", progress=False).metrics,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
        shutil.rmtree(STORED, ignore_errors=True)
        shutil.copytree(folder, STORED)
        (STORED / "read.json").write_text(json.dumps(read()) + "\n")
