"""A few days of data that grows, and runs that go on from each other."""

from pathlib import Path

import extremis
from tests.pipelines.test_versions import SEQUENCE, make

TINY = {
    "train.epochs": 4,
    "order.batch": 4,
    "order.streams": 2,
    "encoder.dimension": 8,
    "encoder.hidden": 8,
    "encoder.buckets": 64,
    "encoder.dropout": 0.0,
    "encoder.feature_dropout": 0.3,
    "negatives.random": 8,
    "negatives.hard": 0,
    "classifier.bias": True,
}


def make_versions_and_runs(folder: Path) -> Path:
    """Make three versions, data0 to data2; a run on the first, and run1 on the second that goes on from it."""
    make(folder, SEQUENCE)
    extremis.train("random", folder / "data0", folder / "run0", set=TINY, progress=False)
    extremis.train("random", folder / "data1", folder / "run1", from_run=folder / "run0", set=TINY, progress=False)
    return folder
