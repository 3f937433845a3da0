"""The loss of votes against brute force in Python, and its gradient against finite differences."""

import math

import numpy as np
import pytest
import torch

from papers.rae.rae import vote_loss
from schemas.ragged import Ragged
from tests.builders import ragged

B, K, D, LABELS = 7, 5, 4, 6


def made(seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, list[list[int]], list[list[int]]]:
    """Queries, keys, which neighbours there are, and labels of both; rows without any of them occur."""
    draw = np.random.default_rng(seed)
    own, theirs = (
        [draw.permutation(LABELS)[: draw.integers(0, 4)].tolist() for _ in range(count)] for count in (B, B * K)
    )
    found = draw.random((B, K)) < 0.7
    found[0] = False
    keys = draw.standard_normal((B, K, D))
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    return torch.from_numpy(draw.standard_normal((B, D))), torch.from_numpy(keys), found, own, theirs


def by_hand(x: torch.Tensor, keys: torch.Tensor, found: np.ndarray, own: list, theirs: list, tau: float) -> float:
    total = 0.0
    for row in range(B):
        unit = x[row] / x[row].norm()
        shares = {k: math.exp(float(unit @ keys[row, k]) / tau) for k in range(K) if found[row, k]}
        for label in own[row]:
            votes = sum(share for k, share in shares.items() if label in theirs[row * K + k])
            if votes:
                total -= math.log(votes / sum(shares.values())) / len(own[row])
    return total


@pytest.mark.parametrize(("seed", "tau"), [(0, 1.0), (1, 0.05), (2, 0.002)])  # the last: far beyond what exp can hold
def test_it_is_the_mean_log_of_the_votes(seed: int, tau: float) -> None:
    x, keys, found, own, theirs = made(seed)
    loss = vote_loss(x, keys, found, ragged(own), ragged(theirs), tau)
    assert float(loss) > 0
    if tau > 0.01:
        assert float(loss) == pytest.approx(by_hand(x, keys, found, own, theirs, tau), rel=1e-10)
    narrow = vote_loss(x.float(), keys.float(), found, ragged(own), ragged(theirs), tau)
    assert float(narrow) == pytest.approx(float(loss), rel=1e-4)


def test_its_gradient_is_that_of_finite_differences() -> None:
    x, keys, found, own, theirs = made(3)
    assert torch.autograd.gradcheck(
        lambda at: vote_loss(at, keys, found, ragged(own), ragged(theirs), 0.3), x.requires_grad_()
    )


def test_without_neighbours_or_labels_it_is_zero() -> None:
    x, keys, found, own, theirs = made(4)
    alone = vote_loss(x.requires_grad_(), keys, np.zeros_like(found), ragged(own), ragged(theirs), 0.05)
    unnamed = vote_loss(x, keys, found, Ragged.empty(B), ragged(theirs), 0.05)
    (gradient,) = torch.autograd.grad(alone, x)
    assert alone.item() == unnamed.item() == 0
    assert not gradient.any()
