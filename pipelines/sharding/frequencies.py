"""Training points of each label, counted by block of label ids: no worker ever holds counts of all labels."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from pipelines.sharding.assign import split_by


def count_labels(label_ids: np.ndarray, block: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(block number, columns `label_id` and `count`) of the labels in `label_ids` [V], in blocks of `block` ids."""
    ids, counts = np.unique(label_ids, return_counts=True)
    batch = pa.record_batch({"label_id": pa.array(ids, pa.int64()), "count": pa.array(counts, pa.int64())})
    return split_by(batch, ids // block)


def sum_counts(parts: Iterable[pa.RecordBatch], first: int, labels: int) -> np.ndarray:
    """Training points of the labels [first, first + labels): int64 [labels]."""
    total = np.zeros(labels, np.int64)
    for part in parts:
        np.add.at(total, part["label_id"].to_numpy() - first, part["count"].to_numpy())
    return total
