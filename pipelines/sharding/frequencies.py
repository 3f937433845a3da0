"""Training points of each label, counted by shard of the labels: no worker ever holds counts of all labels."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from pipelines.common.assign import split_by


def count_labels(label_ids: np.ndarray, first: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Count `label_ids` [V]: (shard, columns `label_id` and `count`); shard s has [first[s], first[s + 1]).

    first: int64 [shards + 1].
    """
    ids, counts = np.unique(label_ids, return_counts=True)
    batch = pa.record_batch({"label_id": pa.array(ids, pa.int64()), "count": pa.array(counts, pa.int64())})
    return split_by(batch, np.searchsorted(first, ids, side="right") - 1)


def sum_counts(parts: Iterable[pa.RecordBatch], first: int, labels: int) -> np.ndarray:
    """Sum the training points of the labels [first, first + labels): int64 [labels]."""
    total = np.zeros(labels, np.int64)
    for part in parts:
        np.add.at(total, part["label_id"].to_numpy() - first, part["count"].to_numpy())
    return total
