"""Clusters of tables in cluster order: sizes that an epoch deals, and numbers a row group (NGAME, section 3)."""

from collections.abc import Mapping, Sequence

import numpy as np

from schemas.errors import InputError
from schemas.layout import CLUSTERS
from schemas.table import Table


def clusters_of(group_rows: np.ndarray, rows: int, halvings: int) -> np.ndarray:
    """Count the clusters of each row group [M], where one of `rows` rows at most is dealt as 2**halvings parts.

    A row group holds either clusters of `rows` rows, or fewer than `rows` clusters of one row less, so its rows tell.
    """
    return np.minimum(group_rows, -(-group_rows // rows) << halvings)


def cluster_sizes(tables: Sequence[Table]) -> list[int]:
    """Return the cluster sizes of those `tables` that are in cluster order."""
    return [table.parameters[CLUSTERS]["size"] for table in tables if CLUSTERS in table.parameters]


def dealt_clusters(tables: Sequence[Table], size: int) -> np.ndarray | None:
    """Count the clusters of about `size` rows in each row group of `tables`, [M]; None where not all have any.

    Raises InputError where a table's clusters are no whole number of halves.
    """
    counts = []
    for table in tables:
        facts: Mapping[str, int] | None = table.parameters.get(CLUSTERS)
        if facts is None:
            return None
        halvings = (facts["size"] // size).bit_length() - 1
        if size << max(halvings, 0) != facts["size"] or size < facts["smallest"]:
            raise InputError(
                f"{table.url}: its clusters of {facts['size']} rows are made to be halved down to {facts['smallest']}, "
                f"which gives none of {size}. Make it again with `extremis cluster --size N --smallest {size}`, N "
                f"being {size} times a power of two, or set order.cluster to one of its sizes."
            )
        counts.append(clusters_of(np.diff(table.groups.first), facts["rows"], halvings))
    return np.concatenate(counts) if counts else None
