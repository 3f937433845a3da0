"""Labels that a version of the data has retired: kept with their ids, and never predicted."""

import numpy as np

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files.shards import iterate
from schemas.shard_files.viewed import RETIRED
from schemas.versions.version import Version


def retired_labels(data: DataLayout) -> np.ndarray | None:
    """Return which labels are retired, bool [L]; None where none is. Raises TableError."""
    if not Version.of(open_manifest(data.root, "data")).retired:
        return None
    manifest = open_manifest(data.labels, "labels")
    groups = [group.column(RETIRED).to_numpy() for group in iterate(data.labels, manifest, [RETIRED])]
    return np.concatenate([np.zeros(0, bool), *groups])
