"""Each loss and its gradients against a float64 reference, finite differences and the paper's expressions."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import batch_of, random_labels
from tests.ranks import on_ranks
from tests.trainer.losses.reference import reference
from tests.trainer.losses.test_binary import Problem, problem, problems
from trainer.group import ALONE, Group
from trainer.group import label_range as group_range
from trainer.losses import Loss, Scores, SoftTopK, SoftTopKSection
from trainer.methods.kinds import LOSSES, options_of
from trainer.negatives.planner import add_margins, own_pool, range_candidates, shared_pool, weigh_positives
from trainer.stream.batch import NO_MARGINS, Candidates, Margins

OPTIONS: dict[str, dict[str, float]] = {"softtopk": {"k": 2.5, "alpha": 1.7}, "triplet": {"margin": 0.4}}


def make(name: str, **more: Any) -> Loss:
    options = options_of(LOSSES, name, "loss.kind")
    return options.model_validate({"kind": name, **OPTIONS.get(name, {}), **more}).build()


def gradients(
    loss: Loss, x: torch.Tensor, w: torch.Tensor, candidates: Candidates
) -> tuple[float, torch.Tensor, torch.Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(x, w, candidates)
    value.backward()
    assert x.grad is not None
    assert w.grad is not None
    return value.item(), x.grad, w.grad


def same(got: tuple[float, Any, Any], expected: tuple[float, Any, Any], tolerance: float = 1e-9) -> None:
    for part, expected_part in zip(got, expected, strict=True):
        np.testing.assert_allclose(part, expected_part, rtol=tolerance, atol=tolerance)


def candidates_of(
    case: Problem, form: str, seed: int, weight: float = 1.7, margins: Margins = NO_MARGINS
) -> Candidates:
    """One set of candidates in each form that there is."""
    batch, labels = batch_of(case.positives, case.hard), len(case.w)
    draw = np.random.default_rng(seed)
    if form == "shared":
        candidates = shared_pool(batch, case.hard, draw.integers(0, labels, 7), weight)
        candidates = add_margins(candidates, batch, case.hard, margins)
        return weigh_positives(candidates, batch, case.positive_weight)
    if form == "own":
        candidates = own_pool(batch, case.hard, draw.integers(0, labels, (len(batch), 4)), weight)
        candidates = add_margins(candidates, batch, case.hard, margins)
        return weigh_positives(candidates, batch, case.positive_weight)
    return range_candidates(batch, 0, labels, case.positive_weight)


FORMS = ("shared", "own", "all")


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40)
@given(
    problems, st.sampled_from(FORMS), st.integers(0, 10**6), st.sampled_from([0, 1, 3]), st.sampled_from([1.0, 0.05])
)
def test_any_candidates_give_the_sum_over_queries(
    name: str, case: Problem, form: str, seed: int, chunk: int, temperature: float
) -> None:
    candidates = candidates_of(case, form, seed)
    w = case.w[candidates.ids]
    got = gradients(make(name, chunk=chunk, temperature=temperature), case.x, w, candidates)
    expected = reference(name, case.x, w, candidates, temperature, **OPTIONS.get(name, {}))
    # Weights are float32, the reference's are not; gradients that nearly cancel show it.
    same(got, expected, 1e-6 if name == "softtopk" else 1e-7)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "triplet"])
@settings(max_examples=40)
@given(
    problems,
    st.sampled_from(["shared", "own"]),
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 3]),
    st.tuples(st.floats(-1, 2), st.floats(-1, 4)),
)
def test_margins_are_added_to_the_scores_of_negatives_alone(
    name: str, case: Problem, form: str, seed: int, chunk: int, margins: Margins
) -> None:
    candidates = candidates_of(case, form, seed, margins=margins)
    got = gradients(make(name, chunk=chunk, temperature=0.7), case.x, case.w[candidates.ids], candidates)
    options = OPTIONS.get(name, {})
    w = case.w[candidates.ids]
    expected = reference(name, case.x, w, candidates, 0.7, margins, case.hard_rows, **options)
    same(got, expected, 1e-6)


@pytest.mark.parametrize("form", ["shared", "own"])
@pytest.mark.parametrize("name", ["softmax", "infonce", "decoupled"])
def test_a_margin_is_a_weight_in_a_softmax(name: str, form: str) -> None:
    case = problem(4, queries=5, labels=12, dimension=3)
    plain = candidates_of(case, form, 1)
    heavy = candidates_of(case, form, 1, margins=(np.log(2.0), np.log(2.0)))
    weight = np.where(plain.pair_positive, 1, 2) * plain.pair_weight
    x, w = case.x, case.w[plain.ids]
    if name != "infonce" or form == "own":  # the other positives keep the pool's weights
        weighed = plain._replace(pair_weight=weight, pool_weight=2 * plain.pool_weight)
        same(gradients(make(name), x, w, heavy), gradients(make(name), x, w, weighed), 1e-6)


@given(problems, st.sampled_from(FORMS), st.integers(0, 10**6), st.sampled_from([0, 3]), st.floats(0.1, 2))
def test_only_negatives_within_the_radius_count(case: Problem, form: str, seed: int, chunk: int, radius: float) -> None:
    candidates = candidates_of(case, form, seed)
    x, w = (torch.nn.functional.normalize(rows, dim=1) for rows in (case.x, case.w[candidates.ids]))
    far = torch.cdist(x, w) > radius
    least = 1 - radius**2 / 2
    assert ((x @ w.T < least) | (torch.cdist(x, w) < radius + 1e-6)).all()
    assert torch.equal(far, x @ w.T < least) or (torch.cdist(x, w) - radius).abs().min() < 1e-6
    got = gradients(make("triplet", chunk=chunk, radius=radius), x, w, candidates)
    same(got, reference("triplet", x, w, candidates, margin=0.4, least=least), 1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(name: str, form: str) -> None:
    case = problem(3, queries=3, labels=7, dimension=2, weighted=True)
    candidates = candidates_of(case, form, 5)
    loss = make(name)
    x, w = case.x.detach().requires_grad_(), case.w.detach()[candidates.ids].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: loss(x, w, candidates), (x, w))


def on_a_rank(group: Group, case: Problem, chunk: int) -> dict[str, tuple[float, np.ndarray, np.ndarray]]:
    """Every loss on this rank's labels: (its part, on x, on its w). Rank 0 has no positive of the last query."""
    start, stop = group_range(len(case.w), group.rank, group.ranks)
    candidates = range_candidates(batch_of(case.positives), start, stop, case.positive_weight)
    parts = {}
    for name in LOSSES:
        x, w = case.x.detach().requires_grad_(), case.w.detach()[start:stop].requires_grad_()
        value = make(name, chunk=chunk, temperature=0.3)(x, w, candidates, group)
        value.backward()
        assert x.grad is not None
        assert w.grad is not None
        parts[name] = (value.item(), x.grad.numpy(), w.grad.numpy())
    return parts


@pytest.mark.parametrize(("ranks", "chunk"), [(2, 0), (3, 2)])
def test_ranks_that_hold_labels_each_are_one(ranks: int, chunk: int) -> None:
    case = problem(8, queries=5, labels=14, weighted=True)
    case.positives[-1] = [12, 13]  # of the last rank alone, its last label among them
    case.x, case.w = case.x.detach(), case.w.detach()  # to be sent
    parts = on_ranks(ranks, on_a_rank, case, chunk)
    candidates = range_candidates(batch_of(case.positives), 0, 14, case.positive_weight)
    for name in LOSSES:
        values, on_x, on_w = zip(*(part[name] for part in parts), strict=True)
        together = (sum(values), np.sum(on_x, axis=0), np.concatenate(on_w))
        same(together, gradients(make(name, temperature=0.3), case.x, case.w, candidates))


def test_decoupled_gradient_is_the_papers() -> None:
    """Section 4.1: (sigma - 1) x for a positive, sum_P e^s / (e^{s_j} + sum of the negatives) x otherwise."""
    case = problem(6, queries=4, labels=8)
    candidates = range_candidates(batch_of(case.positives), 0, 8)
    x, w = case.x.detach(), case.w.detach()
    e = (x @ w.T).exp()
    positive = torch.zeros(4, 8, dtype=torch.bool)
    for row, labels in enumerate(case.positives):
        positive[row, labels] = True
    negatives = (e * ~positive).sum(1, keepdim=True)
    sigma = e / (e + negatives)
    others = e * (positive / (e + negatives)).sum(1, keepdim=True)
    expected = torch.where(positive, sigma - 1, others).T @ x
    _, _, on_w = gradients(make("decoupled"), x, w, candidates)
    torch.testing.assert_close(on_w, expected)


@given(
    st.integers(1, 5),
    st.integers(7, 40),
    st.floats(0.5, 6.5),
    st.sampled_from([0.5, 2.0, 10.0]),
    st.sampled_from([0.1, 1.0, 20.0]),
    st.integers(0, 999),
)
def test_soft_top_k_sums_to_k(queries: int, labels: int, k: float, alpha: float, spread: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(queries, labels, generator=draw, dtype=torch.float64)
    shares, _ = soft_top_k(scores, k, alpha)
    torch.testing.assert_close(shares.sum(1), torch.full((queries,), k, dtype=torch.float64), rtol=1e-9, atol=0)
    assert (shares.gather(1, scores.argsort(1)).diff(dim=1) >= 0).all()  # saturated ones tie


def soft_top_k(scores: torch.Tensor, k: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(sigma(alpha (s + t)) [B, L], t) for scores as they are: x is the identity's row."""
    queries, labels = scores.shape
    none: list[list[int]] = [[] for _ in range(queries)]
    x, candidates = torch.eye(queries, dtype=scores.dtype), range_candidates(batch_of(none), 0, labels)
    t = SoftTopK(SoftTopKSection(k=k, alpha=alpha)).threshold(Scores(x, scores.T, candidates, 0, ALONE))
    return torch.sigmoid(alpha * (scores + t[:, None])), t


def test_soft_top_k_of_many_equal_scores_sums_to_k_in_single_precision() -> None:
    """Ten below the lowest score, as in the paper's listing, 100,000 sigmoids still sum to 4.5."""
    shares, _ = soft_top_k(torch.zeros(2, 100_000), 2.0, 2.0)
    assert shares.sum(1).tolist() == pytest.approx([2.0, 2.0], rel=1e-4)


def test_soft_top_k_of_fewer_candidates_than_k_is_nothing() -> None:
    case = problem(7, queries=3, labels=4)
    value, on_x, on_w = gradients(
        SoftTopK(SoftTopKSection(k=4.0)), case.x, case.w, range_candidates(batch_of(case.positives), 0, 4)
    )
    assert (value, on_x.abs().max(), on_w.abs().max()) == (0, 0, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_bf16_embeddings_lose_no_more_than_their_own_rounding(name: str) -> None:
    """At a temperature of 0.05 scores reach 20, where bf16 knows steps of 1/8: no score may be kept in it."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.nn.functional.normalize(torch.randn(n, 16, generator=draw), dim=1).bfloat16() for n in (6, 50))
    positives = [random_labels(np.random.default_rng(row), 50, 1, 4) for row in range(6)]
    candidates = range_candidates(batch_of(positives), 0, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, on_x, on_w = gradients(make(name, temperature=0.05), x, w, candidates)
    assert on_x.dtype == on_w.dtype == torch.bfloat16
    exact, exact_x, exact_w = reference(name, x, w, candidates, 0.05, **OPTIONS.get(name, {}))
    assert value == pytest.approx(exact, rel=1e-5)
    for got, expected in ((on_x, exact_x), (on_w, exact_w)):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 2**-8


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_scores_of_any_size_give_numbers(name: str, scale: float) -> None:
    x = scale * torch.tensor([[1.0], [-1.0], [0.5]])
    w = torch.tensor([[1.0], [-1.0], [0.7], [0.2], [-0.1], [0.9]])
    got = gradients(make(name), x, w, range_candidates(batch_of([[0], [0, 2], []]), 0, 6))
    assert all(np.isfinite(part).all() for part in got)


@pytest.mark.parametrize("name", LOSSES)
def test_a_query_with_nothing_but_its_positives_gives_numbers(name: str) -> None:
    x, w = torch.ones(2, 1), torch.tensor([[1.0], [2.0]])
    got = gradients(make(name), x, w, range_candidates(batch_of([[0, 1], [0]]), 0, 2))
    assert all(np.isfinite(part).all() for part in got)


@pytest.mark.parametrize("name", ["softmax", "decoupled", "softtopk"])
def test_a_weighted_sample_estimates_the_normaliser_of_all(name: str) -> None:
    """Each label drawn once at weight 1 is the whole; half of them at weight 2 is near it, at weight 1 it is not."""
    draw = np.random.default_rng(0)
    x, w = torch.from_numpy(draw.standard_normal((3, 4))), torch.from_numpy(draw.standard_normal((4000, 4)))
    batch = batch_of([[0], [1, 2], [3]])
    whole = make(name)(x, w, range_candidates(batch, 0, 4000)).item()
    half = draw.permutation(4000)[:2000]

    def sampled(weight: float) -> float:
        candidates = shared_pool(batch, None, half, weight)
        return make(name)(x, w[candidates.ids], candidates).item()

    assert sampled(2.0) == pytest.approx(whole, rel=0.02)
    assert sampled(1.0) != pytest.approx(whole, rel=0.02)
