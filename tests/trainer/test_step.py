"""One step: in parts it is the undivided one, and its gradient is as long as is allowed."""

from pathlib import Path

import pytest
import torch

from tests.builders import build_data
from trainer.encoders.base import clip_gradients
from trainer.loop import Trainer
from trainer.recipe_files import validate


def trained(data: str, run: Path, **train: object) -> dict[str, torch.Tensor]:
    """The parameters after an epoch."""
    choices = {
        "encoder": {"dimension": 4, "buckets": 16, "residual": True},
        "classifier": {"bias": True, "initial_scale": 0.5, "optimizer": "sgd"},
        "order": {"batch": 16, "streams": 2},
        "negatives": {"random": 8},
        "train": {"epochs": 1, **train},
        "logging": {"tensorboard": False},
    }
    trainer = Trainer.start(data, str(run), validate(choices, "test"), lambda line: None)
    for _ in trainer.train():
        pass
    return {"vectors": trainer.model.head.vectors, **trainer.model.encoder.tensors()}


@pytest.fixture
def data(tmp_path: Path) -> str:
    return build_data(str(tmp_path / "data")).layout.root


def test_a_batch_in_parts_makes_the_step_of_the_whole(data: str, tmp_path: Path) -> None:
    whole = trained(data, tmp_path / "whole")
    for parts in (2, 5, 16):
        parameters = trained(data, tmp_path / f"parts-{parts}", accumulate=parts)
        for name, value in whole.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=1e-5)


def test_a_clipped_step_is_another_and_one_that_is_short_enough_the_same(data: str, tmp_path: Path) -> None:
    plain, clipped = trained(data, tmp_path / "plain"), trained(data, tmp_path / "clipped", clip=1e-9)
    assert not torch.equal(plain["embedding"], clipped["embedding"])
    for name, value in trained(data, tmp_path / "wide", clip=1e9).items():
        assert torch.equal(value, plain[name])


def test_gradients_are_scaled_together_to_the_limit() -> None:
    gradients = [torch.tensor([3.0]), None, torch.tensor([[0.0, 4.0]])]
    clip_gradients(gradients, 10.0)
    assert gradients[0].item() == 3
    clip_gradients(gradients, 2.5)
    assert gradients[0].item() == pytest.approx(1.5)
    assert gradients[2].tolist() == [[0.0, pytest.approx(2.0)]]
    clip_gradients(gradients, 0.0)
    assert gradients[0].item() == pytest.approx(1.5)
