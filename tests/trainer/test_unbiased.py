"""The sampled loss and its gradients estimate full one-vs-all without bias, in both forms (ASTRA, equation 2).

Two kinds of proof. For few labels every possible draw is enumerated, so the expectation is exact. For more, the mean
over many draws of the trainer's own generator is compared with the full sum, entry by entry (the loss, the gradient on
x and on w), within 4.5 of its own standard errors: with fewer than 300 entries over all cases, a correct estimate has
less than 0.3 % chance to fail anywhere (two-sided 6.8e-6 each, Bonferroni), and the seeds are fixed. The same check
must fail when draws that hit a positive are left in, so it has the power to see that.
"""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch

import trainer.negatives.planner
from schemas import PAD
from schemas.ragged import Ragged
from tests.builders import batch_of
from tests.trainer.dense import Gradients, assert_same, fast, one_vs_all
from trainer.negatives.draws import RandomPool, draw_hard
from trainer.negatives.merge import merge
from trainer.negatives.planner import own_pool, shared_pool
from trainer.stream.batch import Candidates

DRAWS = 600
ERRORS = 4.5


class Case:
    """Random queries, classifier, positives and a table of hard negatives, of which k_h are used in each draw."""

    def __init__(self, seed: int, form: str) -> None:
        draw = np.random.default_rng(seed)
        self.seed, self.form = seed, form
        self.labels = int(draw.integers(7, 12))
        self.hard = int(draw.integers(0, 3))  # k_h
        self.random = int(draw.integers(1, 8))  # k_r
        queries, dimension, width = 3, 2, self.hard + 1
        self.positives = [draw.choice(self.labels, count, replace=False).tolist() for count in (3, 2, 1)]
        table = np.full((queries, width), PAD)
        for row, labels in enumerate(self.positives):
            others = draw.permutation(np.setdiff1d(np.arange(self.labels), labels))[: width - row % 2]
            table[row, : len(others)] = others
        self.batch = batch_of(self.positives, table)
        self.x = torch.from_numpy(draw.standard_normal((queries, dimension))).requires_grad_()
        self.w = torch.from_numpy(draw.standard_normal((self.labels, dimension))).requires_grad_()

    def full(self) -> Gradients:
        return one_vs_all(self.x, self.w, self.positives)

    def candidates(self, step: int) -> Candidates:
        """Draw as the loop does at `step`."""
        rows, at = self.batch.rows, {"seed": self.seed, "epoch": 0, "step": step}
        hard = draw_hard(self.batch.hard, rows, self.hard, **at) if self.hard else None
        draws, weight = RandomPool(self.labels), self.labels / self.random
        if self.form == "shared":
            return shared_pool(self.batch, hard, draws.draw(self.random, **at), weight)
        return own_pool(self.batch, hard, draws.draw_own(self.random, rows, **at), weight)

    def estimates(self, draws: int) -> np.ndarray:
        """Loss, gradient on x and on w of each draw, [draws, 1 + B D + L D]."""
        return np.stack([flat(fast(self.x, self.w, self.candidates(step))) for step in range(draws)])


def flat(gradients: Gradients) -> np.ndarray:
    loss, on_x, on_w = gradients
    return np.concatenate([[loss], on_x.ravel(), on_w.ravel()])


def merged_apart(
    positives: np.ndarray, offsets: np.ndarray, hard: np.ndarray | None, draws: Ragged, weight: float
) -> Candidates:
    """Merge so that draws meet no positive and no hard negative."""
    far = 1000
    merged = merge(positives, offsets, hard, draws._replace(values=draws.values + far), weight)
    return merged._replace(ids=merged.ids % far)


def errors_off(estimates: np.ndarray, full: Gradients) -> float:
    """The greatest distance of a mean from the full sum, in its own standard errors."""
    error = estimates.std(0, ddof=1) / np.sqrt(len(estimates))
    return float((np.abs(estimates.mean(0) - flat(full)) / (error + 1e-7)).max())  # weights are float32


def mean(parts: Iterable[Gradients]) -> Gradients:
    together = list(parts)
    return tuple(sum(part[i] for part in together) / len(together) for i in range(3))


@pytest.mark.parametrize("form", ["shared", "own"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_the_mean_over_draws_is_the_full_sum(seed: int, form: str) -> None:
    case = Case(seed, form)
    assert errors_off(case.estimates(DRAWS), case.full()) < ERRORS


@pytest.mark.parametrize("form", ["shared", "own"])
def test_the_check_sees_positives_that_are_left_in_the_draws(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(0, form)
    if form == "own":
        monkeypatch.setattr(trainer.negatives.planner, "merge", merged_apart)
    else:
        none = np.empty(0, np.int64)
        right = case.candidates
        case.candidates = lambda step: right(step)._replace(masked_query=none, masked_pool=none)  # type: ignore[method-assign]
    assert errors_off(case.estimates(DRAWS), case.full()) > 2 * ERRORS


@pytest.mark.parametrize("form", ["shared", "own"])
@pytest.mark.parametrize("random", [1, 2])
@pytest.mark.parametrize("hard", [None, [[3, 0], [4, PAD]]])
def test_the_expectation_over_all_draws_is_the_full_sum(form: str, random: int, hard: list | None) -> None:
    labels, positives = 5, [[1, 2], [0]]
    generator = np.random.default_rng(3)
    x = torch.from_numpy(generator.standard_normal((2, 3))).requires_grad_()
    w = torch.from_numpy(generator.standard_normal((labels, 3))).requires_grad_()
    table = None if hard is None else np.asarray(hard)
    batch, weight = batch_of(positives, table), labels / random
    if form == "shared":
        pools = itertools.product(range(labels), repeat=random)
        parts = (shared_pool(batch, table, np.asarray(pool), weight) for pool in pools)
    else:
        # Each query's draws enter the sum alone, so running through the same draws for both loses nothing.
        pools = itertools.product(range(labels), repeat=random)
        parts = (own_pool(batch, table, np.asarray([pool, pool[::-1]]), weight) for pool in pools)
    assert_same(mean(fast(x, w, part) for part in parts), one_vs_all(x, w, positives))
