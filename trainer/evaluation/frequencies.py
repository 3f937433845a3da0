"""Training points of each label in a window of parts."""

import functools
from typing import NamedTuple

import numpy as np

from schemas.layout import DataLayout
from schemas.shard_files.parquet import list_column
from trainer.methods.sections import Data
from trainer.stream import open_queries


class Window(NamedTuple):
    """`frequency` [L] of each label among `points` training points."""

    frequency: np.ndarray
    points: int


def count_points(data: DataLayout, trained: Data, labels: int) -> Window:
    """Count the points of the parts `trained` on, by label of [0, L). Raises InputError: no such part; TableError."""
    table = open_queries(data, trained.split)
    parts = table.choose_parts(trained.parts)
    return _count(data, trained.split, table.digest, tuple(part.name for part in parts), labels)


@functools.lru_cache(maxsize=2)
def _count(data: DataLayout, split: str, digest: str, parts: tuple[str, ...], labels: int) -> Window:
    """Count the points of `parts` in the table of `digest`, once: what is at its place may be made again."""
    table = open_queries(data, split)
    rows = table.of_parts(table.choose_parts(parts))
    frequency = np.zeros(labels, np.int64)
    for group in rows.batches(["label_ids"]):
        frequency += np.bincount(list_column(group, "label_ids").entries, minlength=labels)
    return Window(frequency, rows.rows)
