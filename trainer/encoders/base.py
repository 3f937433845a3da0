"""What the loop asks of an encoder."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from trainer.inputs import Inputs


class Encoder(ABC):
    """Inputs to x [B, D] float32, with its own parameters, optimizers and way to be saved."""

    dimension: int

    @abstractmethod
    def prepare(self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None) -> Any:
        """What `encode` needs of B rows; `dropout_key` (epoch, step, ...) only in training."""

    @abstractmethod
    def encode(self, inputs: Any, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        """x [B, D] with a graph when in training (`dropout_key` given), without otherwise."""

    @abstractmethod
    def update(self, factor: float) -> None:
        """One optimizer step from the gradients of the last `encode`; `factor` in [0, 1] scales every rate."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters needed to encode, by name."""

    @abstractmethod
    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state, needed only to go on training."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `tensors`."""

    @abstractmethod
    def load_optimizer_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `optimizer_tensors`."""


def finish(x: torch.Tensor, *, normalize: bool, scale: float) -> torch.Tensor:
    """The last step of every encoder: optional unit norm, then a constant factor."""
    if normalize:
        x = torch.nn.functional.normalize(x, dim=1)
    return x * scale if scale != 1.0 else x


def drop(x: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Inverted dropout with its own generator: entries are zeroed with probability `share`, others scaled up."""
    kept = torch.rand(x.shape, generator=generator) >= share
    return x * kept / (1 - share)
