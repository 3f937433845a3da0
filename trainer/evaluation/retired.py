"""Labels that a version of the data has retired: kept with their ids, and never predicted."""

import numpy as np

from schemas.layout import DataLayout
from schemas.shard_files.viewed import RETIRED
from schemas.table import Table
from schemas.versions.version import Version


def retired_labels(data: DataLayout) -> np.ndarray | None:
    """Return which labels are retired, bool [L]; None where none is. Raises TableError."""
    if not Version.of(Table.open(data.root, "data").manifest).retired:
        return None
    groups = [group.column(RETIRED).to_numpy() for group in Table.open(data.labels, "labels").batches([RETIRED])]
    return np.concatenate([np.zeros(0, bool), *groups])
