import numpy as np

from tests.builders import build_data
from trainer.config.load import validate
from trainer.loop import Trainer

SMALLEST = np.float64(5e-324)


def test_training_leaves_the_processs_arithmetic_as_it_was(tmp_path) -> None:
    data = build_data(str(tmp_path / "data"))
    choices = {
        "encoder": {"dimension": 4, "buckets": 16},
        "order": {"batch": 16, "streams": 2},
        "train": {"epochs": 2},
        "logging": {"tensorboard": False},
    }
    trainer = Trainer.start(data.layout.root, str(tmp_path / "run"), validate(choices, "test"), lambda line: None)
    within: list[bool] = []
    for _ in trainer.train(lambda step, total, loss: within.append(SMALLEST * 1.0 == 0)):
        assert SMALLEST * 1.0 != 0
    assert all(within)
    assert SMALLEST * 1.0 != 0
