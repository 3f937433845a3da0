"""ASTRA's loss term by term, over dense float64 scores and torch's autograd: what the fast losses are held to."""

import numpy as np
import torch
from torch.nn.functional import softplus

from tests.builders import Rows
from trainer.one_vs_all import binary_cross_entropy
from trainer.stream.batch import Candidates

Gradients = tuple[float, np.ndarray, np.ndarray]  # loss, on x [B, D], on w [L, D]


def gradients_of(loss: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Gradients:
    """The loss and what it sends to x and w."""
    on_x, on_w = torch.autograd.grad(loss, [x, w], allow_unused=True)
    return (
        loss.item(),
        np.zeros(x.shape) if on_x is None else on_x.numpy(),
        np.zeros(w.shape) if on_w is None else on_w.numpy(),
    )


def sampled(
    x: torch.Tensor,
    w: torch.Tensor,
    positives: Rows,
    hard: Rows,
    draws: Rows,
    weight: float,
    positive_weight: np.ndarray | None = None,
) -> Gradients:
    """Equation (2), query by query: draws that are the query's own positive or hard negative do not count."""
    scores = x @ w.T
    loss = scores.sum() * 0
    for row in range(len(x)):
        for label in positives[row]:
            scale = 1.0 if positive_weight is None else float(positive_weight[label])
            loss = loss + scale * softplus(-scores[row, label])
        for label in hard[row]:
            if label >= 0:
                loss = loss + softplus(scores[row, label])
        for label in draws[row]:
            if label not in positives[row] and label not in hard[row]:
                loss = loss + weight * softplus(scores[row, label])
    return gradients_of(loss, x, w)


def one_vs_all(
    x: torch.Tensor, w: torch.Tensor, positives: Rows, positive_weight: np.ndarray | None = None
) -> Gradients:
    """Equation (1): every label for every query."""
    all_labels = [list(range(len(w)))] * len(x)
    return sampled(x, w, positives, [[] for _ in positives], all_labels, 1.0, positive_weight)


def fast(x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> Gradients:
    """The trainer's loss on gathered rows, its gradient on them spread to all of w."""
    leaf = x.detach().requires_grad_()
    rows = w.detach()[candidates.ids].requires_grad_()
    loss = binary_cross_entropy(leaf, rows, candidates)
    loss.backward()
    on_w = np.zeros(w.shape)
    np.add.at(on_w, candidates.ids, rows.grad.numpy())
    return loss.item(), leaf.grad.numpy(), on_w


def assert_same(got: Gradients, expected: Gradients, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    """Weights are float32, so sums agree to about seven digits."""
    for value, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=rtol, atol=atol)
