"""Filter pairs: predictions to leave out before top-k, given as lines `row label`, 0-based."""

import numpy as np
import pyarrow as pa

from schemas.errors import InputError
from schemas.shard_files import parquet


def parse_pairs(content: bytes, url: str, rows: int, labels: int) -> np.ndarray:
    """Read pairs (row, label), sorted and without duplicates: int64 [F, 2] in [0, rows) × [0, labels).

    `url` is for messages. Raises InputError with the line: malformed, or pointing beyond the points or labels.
    """
    pairs: list[tuple[int, int]] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not all(field.isdigit() and len(field) < 19 for field in fields):
            shown = repr(line[:60].decode("utf-8", "replace"))
            raise InputError(
                f"{url}, line {number}: expected two whole numbers `row label`, got {shown}. Fix or remove the line."
            )
        row, label = int(fields[0]), int(fields[1])
        if row >= rows:
            raise InputError(
                f"{url}, line {number}: row {row} does not exist: the points have rows 0 to {rows - 1}. "
                "Is this the filter of another split?"
            )
        if label >= labels:
            raise InputError(
                f"{url}, line {number}: label {label} does not exist: there are labels 0 to {labels - 1}. "
                "Is this the filter of another data set?"
            )
        pairs.append((row, label))
    return np.unique(np.asarray(pairs, np.int64).reshape(-1, 2), axis=0)


def join_pairs(rows: np.ndarray, pairs: np.ndarray, type: pa.DataType) -> pa.ListArray:
    """Return the labels that `pairs` (int64 [F, 2], sorted) name for each of `rows` [B]: a list column of `type`."""
    first = np.searchsorted(pairs[:, 0], rows, "left")
    counts = np.searchsorted(pairs[:, 0], rows, "right") - first
    offsets = np.concatenate([[0], np.cumsum(counts)])
    picked = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
    return parquet.list_array(pairs[picked, 1], offsets, type)
