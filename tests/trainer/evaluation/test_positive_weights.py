"""Weights of positives: one ratio on average over training pairs, more for rare labels where that is asked for."""

from pathlib import Path

import numpy as np
import pytest

from schemas.manifest import open_manifest, publish, unpublish
from tests.builders import SmallData, build_data
from tests.training import silent
from trainer.evaluation.evaluate import positive_weights
from trainer.methods.sections import Train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("data")), rows={"train": 60})


@pytest.mark.parametrize("ratio", [1.0, 50.0])
@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0])
def test_the_mean_over_training_pairs_is_the_ratio(data: SmallData, exponent: float, ratio: float) -> None:
    weight = positive_weights(data.layout, Train(positive_weight=exponent, positive_ratio=ratio), silent)
    if weight is None:
        assert (exponent, ratio) == (0.0, 1.0)
        return
    frequency = data.frequency()
    assert weight.dtype == np.float32
    assert np.average(weight, weights=frequency) == pytest.approx(ratio, rel=1e-5)
    rare, common = weight[frequency == frequency[frequency > 0].min()], weight[frequency == frequency.max()]
    assert rare.min() > common.max() if exponent else (weight == ratio).all()


def test_without_stated_constants_the_ratio_alone_is_left(tmp_path: Path) -> None:
    built = build_data(str(tmp_path), rows={"train": 10})
    manifest = open_manifest(built.layout.root, "data")
    unpublish(built.layout.root)
    publish(built.layout.root, manifest.model_copy(update={"parameters": {**manifest.parameters, "propensity": None}}))
    said: list[str] = []
    weight = positive_weights(built.layout, Train(positive_weight=0.5, positive_ratio=3), said.append)
    assert weight is not None
    assert (weight == 3).all()
    assert len(said) == 1
