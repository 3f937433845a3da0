"""The loss and its gradients against a dense float64 reference, for every form of candidates."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from tests.builders import Rows, batch_of, random_labels
from tests.trainer.dense import assert_same, fast, one_vs_all, sampled
from trainer.negatives.planner import add_margins, own_pool, range_candidates, shared_pool, weigh_positives
from trainer.one_vs_all import binary_cross_entropy, binary_step
from trainer.rows.matrix import RowMatrix, RowOptimizer
from trainer.stream.batch import NO_MARGINS


@dataclass
class Problem:
    """Queries x [B, D] and classifier w [L, D] in float64; positives and hard negatives a row."""

    x: torch.Tensor
    w: torch.Tensor
    positives: Rows
    hard: np.ndarray | None
    positive_weight: np.ndarray | None

    @property
    def hard_rows(self) -> Rows:
        return [[] for _ in self.positives] if self.hard is None else self.hard.tolist()


def problem(
    seed: int, queries: int = 3, labels: int = 8, dimension: int = 3, width: int = 3, weighted: bool = False
) -> Problem:
    """Rows without positives, positives that others share, and table rows that end in pads all occur."""
    draw = np.random.default_rng(seed)
    positives = [random_labels(draw, labels, 0, 3) for _ in range(queries)]
    hard = np.full((queries, width), PAD)
    for row, labels_of_row in enumerate(positives):
        others = draw.permutation(np.setdiff1d(np.arange(labels), labels_of_row))[: draw.integers(0, width + 1)]
        hard[row, : len(others)] = others
    return Problem(
        torch.from_numpy(draw.standard_normal((queries, dimension))).requires_grad_(),
        torch.from_numpy(draw.standard_normal((labels, dimension))).requires_grad_(),
        positives,
        hard if width else None,
        draw.uniform(0.5, 2, labels).astype(np.float32) if weighted else None,
    )


problems = st.builds(
    problem,
    seed=st.integers(0, 10**6),
    queries=st.integers(1, 5),
    labels=st.integers(3, 12),
    dimension=st.integers(1, 4),
    width=st.integers(0, 4),
    weighted=st.booleans(),
)


@given(problems, st.data())
def test_shared_pool_is_the_sum_over_draws_that_are_not_known(case: Problem, data: st.DataObject) -> None:
    labels = len(case.w)
    pool = data.draw(st.lists(st.integers(0, labels - 1), max_size=3 * labels))  # repeats, positives and hard included
    batch = batch_of(case.positives, case.hard)
    candidates = shared_pool(batch, case.hard, np.asarray(pool, np.int64), 1.7)
    candidates = weigh_positives(candidates, batch, case.positive_weight)
    assert len(np.unique(candidates.ids)) == len(candidates.ids)
    draws = [pool] * len(case.x)
    expected = sampled(case.x, case.w, case.positives, case.hard_rows, draws, 1.7, case.positive_weight)
    assert_same(fast(case.x, case.w, candidates), expected)


@given(problems, st.data())
def test_own_pool_is_the_sum_over_each_query_s_draws(case: Problem, data: st.DataObject) -> None:
    labels, size = len(case.w), data.draw(st.integers(0, 10))
    seed = data.draw(st.integers(0, 10**6))
    pool = np.random.default_rng(seed).integers(0, labels, (len(case.x), size))
    batch = batch_of(case.positives, case.hard)
    candidates = weigh_positives(own_pool(batch, case.hard, pool, 0.6), batch, case.positive_weight)
    assert len(np.unique(candidates.ids)) == len(candidates.ids)
    expected = sampled(case.x, case.w, case.positives, case.hard_rows, pool.tolist(), 0.6, case.positive_weight)
    assert_same(fast(case.x, case.w, candidates), expected)


@given(problems, st.integers(1, 12))
def test_chunks_of_labels_add_up_to_one_vs_all(case: Problem, chunk: int) -> None:
    batch, labels = batch_of(case.positives), len(case.w)
    parts = [
        fast(case.x, case.w, range_candidates(batch, start, min(start + chunk, labels), case.positive_weight))
        for start in range(0, labels, chunk)
    ]
    total = tuple(sum(part[i] for part in parts) for i in range(3))
    assert_same(total, one_vs_all(case.x, case.w, case.positives, case.positive_weight))


@pytest.mark.parametrize("form", ["shared", "own"])
def test_a_pool_without_draws_leaves_positives_and_hard_negatives(form: str) -> None:
    case = problem(1)
    batch = batch_of(case.positives, case.hard)
    empty = np.empty((0,) if form == "shared" else (len(batch), 0), np.int64)
    candidates = (shared_pool if form == "shared" else own_pool)(batch, case.hard, empty, 1.0)
    none = [[] for _ in case.positives]
    assert_same(fast(case.x, case.w, candidates), sampled(case.x, case.w, case.positives, case.hard_rows, none, 1.0))


def test_great_scores_neither_overflow_nor_vanish() -> None:
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).requires_grad_()
    w = torch.tensor([[300.0], [-300.0], [2.0]], dtype=torch.float64).requires_grad_()
    positives = [[0], [0, 2]]
    assert_same(fast(x, w, range_candidates(batch_of(positives), 0, 3)), one_vs_all(x, w, positives))


def test_the_upstream_gradient_scales_both_gradients() -> None:
    case = problem(2)
    candidates = range_candidates(batch_of(case.positives), 0, len(case.w))
    x, w = case.x.detach().requires_grad_(), case.w.detach().requires_grad_()
    (binary_cross_entropy(x, w, candidates) / 4).backward()
    _, on_x, on_w = one_vs_all(case.x, case.w, case.positives)
    np.testing.assert_allclose(x.grad.numpy(), on_x / 4, atol=1e-6)
    np.testing.assert_allclose(w.grad.numpy(), on_w / 4, atol=1e-6)


OPTIMIZERS = [
    RowOptimizer("sgd"),
    RowOptimizer("sgd", momentum=0.9, weight_decay=0.1),
    RowOptimizer("adagrad", weight_decay=0.1),
    RowOptimizer("adam"),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["own", "shared", "range"])
def test_one_pass_does_what_gather_loss_backward_and_update_do(
    form: str, dtype: torch.dtype, optimizer: RowOptimizer
) -> None:
    labels, dimension, scale = 3000, 9, 0.25
    weight = torch.randn(labels, dimension, generator=torch.Generator().manual_seed(0)).to(dtype)
    fused, separate = (RowMatrix(weight.clone(), optimizer) for _ in range(2))
    for step in range(3):
        case = problem(step, 40, labels, dimension, 5, weighted=True)
        batch, draw = batch_of(case.positives, case.hard), np.random.default_rng(step)
        margins = (0.4, 1.5) if step else NO_MARGINS
        if form == "own":
            candidates = own_pool(batch, case.hard, draw.integers(0, labels, (40, 90)), 0.7)
            candidates = add_margins(candidates, batch, case.hard, margins)
            candidates = weigh_positives(candidates, batch, case.positive_weight)
        elif form == "shared":
            candidates = shared_pool(batch, case.hard, draw.integers(0, labels, 70), 0.7)
            candidates = add_margins(candidates, batch, case.hard, margins)
            candidates = weigh_positives(candidates, batch, case.positive_weight)
        else:
            candidates = range_candidates(batch, 100, 2900, case.positive_weight)
        x = case.x.detach().float()
        loss, on_x = binary_step(x, fused, candidates, 0.1, step, scale)

        leaf = x.clone().requires_grad_()
        w = separate.gather(candidates.ids)
        expected = binary_cross_entropy(leaf, w, candidates) * scale
        expected.backward()
        separate.update(candidates.ids, w, 0.1, step)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(on_x, leaf.grad, rtol=1e-4, atol=1e-4)
        # A value that lies on the border of two ways of rounding may go either way, and lead its row on.
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
        apart = (fused.weight.float() - separate.weight.float()).abs() > tolerance * (1 + separate.weight.float().abs())
        assert apart.float().mean() < (1e-3 if dtype != torch.float32 else 1e-9)
        separate.weight.copy_(fused.weight)


def test_one_pass_has_the_same_bits_for_any_number_of_threads() -> None:
    case = problem(5, 64, 5000, 16, 5)
    pool = np.random.default_rng(0).integers(0, 5000, (64, 100))
    candidates = own_pool(batch_of(case.positives, case.hard), case.hard, pool, 1.0)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        rows = RowMatrix(torch.randn(5000, 16, generator=torch.Generator().manual_seed(1)), RowOptimizer("adagrad"))
        results.append((*binary_step(case.x.detach().float(), rows, candidates, 0.1, 0, 1.0), rows.weight))
    torch.set_num_threads(before)
    for loss, on_x, weight in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(on_x, results[0][1])
        assert torch.equal(weight, results[0][2])
