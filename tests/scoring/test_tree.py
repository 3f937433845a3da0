"""A stored fusion tree: what is none is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import TableError
from scoring.fusion import FusionTree


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"units": [1, 0]},
        {"units": [1]},
        {"feature": [0, -1]},
        {"feature": [5, -1, -1]},
        {"left": [0, -1, -1]},
        {"right": [9, -1, -1]},
        {"value": ["a", 1, 2]},
        {"threshold": None},
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, change: dict) -> None:
    tree = {"feature": [0, -1, -1], "threshold": [0.5, 0, 0], "left": [1, -1, -1], "right": [2, -1, -1]}
    tree |= {"format": 2, "units": [1, 2]}
    path = tmp_path / "fusion.json"
    path.write_text(json.dumps({**tree, "value": [0.0, 1.0, 2.0]}))
    fusion = FusionTree.parse(path.read_bytes(), str(path))
    np.testing.assert_array_equal(fusion.predict(np.array([0, 1]), np.zeros(2), np.zeros(2)), [1, 2])
    path.write_text(json.dumps({**tree, "value": [0.0, 1.0, 2.0], **change}))
    with pytest.raises(TableError, match="not a fusion tree"):
        FusionTree.parse(path.read_bytes(), str(path))
