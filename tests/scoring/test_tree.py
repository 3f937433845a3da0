"""A stored fusion tree: what is none is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import TableError
from scoring.fusion import FusionTree

TREE = {"columns": ["text", "vector", "points"], "feature": [0, -1, -1], "threshold": [0.5, 0, 0]}
TREE |= {"missing_left": [False] * 3, "value": [0.0, 1.0, 2.0], "count": [3, 1, 2], "bias": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        {"units": [1, 0]},
        {"units": [1]},
        {"tree": {**TREE, "feature": [0, -1]}},
        {"tree": {**TREE, "feature": [5, -1, -1]}},
        {"tree": {**TREE, "columns": ["text", "vector"]}},
        {"tree": None},
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "fusion.json"
    path.write_text(json.dumps({"tree": TREE, "units": [1, 2]}))
    fusion = FusionTree.parse(path.read_bytes(), str(path))
    np.testing.assert_array_equal(fusion.predict(np.array([0, 1]), np.zeros(2), np.zeros(2)), [1, 2])
    path.write_text(json.dumps({"tree": TREE, "units": [1, 2], **change}))
    with pytest.raises(TableError, match="not a fusion tree"):
        FusionTree.parse(path.read_bytes(), str(path))
