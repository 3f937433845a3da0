from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.builders import build_data
from trainer.device import products_with
from trainer.loop import Trainer
from trainer.recipe_files import validate

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_products_are_narrow_of_narrow_vectors_on_a_gpu_alone(kind: str, dtype: torch.dtype) -> None:
    settings, vectors = torch.backends.cuda.matmul, SimpleNamespace(device=torch.device(kind), dtype=dtype)
    before = settings.fp32_precision
    with products_with(vectors):  # type: ignore[arg-type]
        narrow = kind == "cuda" and dtype != torch.float32
        assert settings.fp32_precision == ("tf32" if narrow else before)
    assert settings.fp32_precision == before
    values = torch.randn(1000).to(dtype).float()
    bits = values.view(torch.int32) & 0x1FFF  # of a fraction those that TF32 has no room for
    assert bool(bits.any()) == (dtype == torch.float32)
