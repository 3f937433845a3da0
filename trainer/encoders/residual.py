"""Residual layer of a bag: learns from features that occur together, which their sum alone cannot show."""

import math

import torch
from torch import nn


class Residual(nn.Module):
    """[B, D] -> [B, D]: v + relu(Linear(v)), or with `hidden` units v + Linear(relu(Linear(v))); starts near v."""

    def __init__(self, dimension: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = nn.Linear(dimension, hidden or dimension)
        self.outer = nn.Linear(hidden, dimension) if hidden else None
        near_zero = 0.01
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            if self.outer is None:
                self.inner.weight.normal_(0, near_zero, generator=generator)
            else:
                self.inner.weight.normal_(0, 1 / math.sqrt(dimension), generator=generator)
                self.outer.weight.normal_(0, near_zero, generator=generator)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        within = torch.relu(self.inner(v))
        return v + (within if self.outer is None else self.outer(within))
