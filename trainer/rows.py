"""A matrix of which a step touches a few rows only: classifier vectors, embedding tables, their optimizers."""

from dataclasses import dataclass

import numpy as np
import torch

OPTIMIZERS = ("sgd", "adagrad", "adam")


@dataclass(frozen=True)
class RowOptimizer:
    """How touched rows are updated.

    sgd: v = momentum v + g, w -= lr v. adagrad: a += mean(g^2) (one number a row), w -= lr g / (sqrt(a) + eps).
    adam: Adam with moments that move only when the row is touched, bias-corrected by the row's own count of updates.
    `weight_decay` is decoupled: w -= lr * weight_decay * w on touched rows.
    """

    name: str = "adagrad"
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


class RowMatrix:
    """[R, D] float32 with its optimizer's state by row; the cost of a step does not depend on R."""

    def __init__(self, weight: torch.Tensor, optimizer: RowOptimizer) -> None:
        self.weight = weight
        self.optimizer = optimizer
        self.state = _initial_state(weight, optimizer)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def gather(self, ids: np.ndarray) -> torch.Tensor:
        """Copies of the rows `ids` [C], as a leaf that takes a gradient, [C, D]."""
        return self.weight.index_select(0, torch.from_numpy(ids)).requires_grad_()

    @torch.no_grad()
    def update(self, ids: np.ndarray, gathered: torch.Tensor, lr: float) -> None:
        """One optimizer step on rows `ids` [C] (unique); `gathered` is what `gather(ids)` gave, with its gradient."""
        rows = torch.from_numpy(ids)
        grad = gathered.grad
        assert grad is not None, "update follows a backward pass"
        weight = gathered.detach()
        state = {name: value.index_select(0, rows) for name, value in self.state.items()}
        if self.optimizer.weight_decay:
            weight.mul_(1 - lr * self.optimizer.weight_decay)
        self._descend(weight, grad, state, lr)
        self.weight.index_copy_(0, rows, weight)
        for name, value in state.items():
            self.state[name].index_copy_(0, rows, value)

    def _descend(self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], lr: float) -> None:
        """Change `weight` and `state` in place."""
        options = self.optimizer
        if options.name == "sgd":
            step = state["momentum"].mul_(options.momentum).add_(grad) if options.momentum else grad
            weight.add_(step, alpha=-lr)
        elif options.name == "adagrad":
            square = torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])
            rate = state["square"].add_(square).sqrt().add_(options.eps).reciprocal_()
            weight.addcmul_(grad, rate.unsqueeze(1), value=-lr)
        else:
            beta1, beta2 = options.betas
            count = state["count"].add_(1)
            first = state["first"].lerp_(grad, 1 - beta1)
            second = state["second"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = (second / (1 - beta2**count).unsqueeze(1)).sqrt_().add_(options.eps)
            weight.addcdiv_(first / (1 - beta1**count).unsqueeze(1), scale, value=-lr)


def _initial_state(weight: torch.Tensor, optimizer: RowOptimizer) -> dict[str, torch.Tensor]:
    if optimizer.name == "sgd":
        return {"momentum": torch.zeros_like(weight)} if optimizer.momentum else {}
    if optimizer.name == "adagrad":
        return {"square": torch.zeros(len(weight))}
    if optimizer.name == "adam":
        return {
            "first": torch.zeros_like(weight),
            "second": torch.zeros_like(weight),
            "count": torch.zeros(len(weight)),
        }
    raise ValueError(f"unknown row optimizer {optimizer.name!r}; expected one of {OPTIMIZERS}")
