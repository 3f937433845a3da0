"""Check that a sample of a keyed input's points, with their labels, is in the data set made from the input."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.layout import DataLayout
from schemas.shard_files.parquet import list_column
from schemas.table import Table

Points = dict[str, list[str]]  # label keys by key


def sample_points(folder: Path, count: int, seed: int = 0) -> Points:
    """Draw about `count` points of the `train` files in `folder`: lines at random places."""
    files = sorted(folder.glob("train*.jsonl"))
    sizes = [path.stat().st_size for path in files]
    draw = random.Random(seed)
    points: Points = {}
    for path in draw.choices(files, sizes, k=count):
        with path.open("rb") as file:
            file.seek(draw.randrange(path.stat().st_size))
            file.readline()  # the rest of a line
            line = file.readline()
        if line:
            record = json.loads(line)
            points[record["key"]] = record["labels"]
    return points


def count_found(data: str, points: Points) -> int:
    """Count the `points` that occur in the data set exactly once, with exactly their labels."""
    keys = pa.array(sorted(points))
    named = sorted({label for labels in points.values() for label in labels})
    ids = dict(_find(data, "labels", "label_id", pa.array(named)))
    found = dict.fromkeys(points, 0)
    for key, labels in _find(data, "queries/train", "label_ids", keys):
        found[key] += sorted(ids.get(label, -1) for label in points[key]) == labels
    return sum(times == 1 for times in found.values())


def _find(data: str, table: str, column: str, keys: pa.Array) -> Iterator[tuple[str, Any]]:
    """Yield (key, value of `column`) of the rows of a table whose key is in `keys`."""
    url = f"{DataLayout(data).root}/{table}"
    for group in Table.open(url).batches(["key", column]):
        rows = group.filter(pc.is_in(group["key"], value_set=keys))
        if rows.num_rows:
            yield from zip(rows["key"].to_pylist(), rows[column].to_pylist(), strict=True)


def positives(data: str) -> int:
    """Count the labels of all training points."""
    url = DataLayout(data).queries("train")
    return sum(len(list_column(group, "label_ids").values) for group in Table.open(url).batches(["label_ids"]))


def training_counts(data: str) -> int:
    """Sum the counts of training points over all labels."""
    url = DataLayout(data).labels
    groups = Table.open(url).batches(["frequency"])
    return int(sum(np.sum(group["frequency"].to_numpy()) for group in groups))
