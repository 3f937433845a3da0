"""A device merges labels as the host does, and a step on them is the same; sparse products are the dense ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from tests.builders import batch_of
from tests.trainer.negatives.test_merge import batches
from trainer.device import CPU, send
from trainer.heads import Classifier
from trainer.methods.sections import Classifier as Config
from trainer.negatives.planner import (
    add_margins,
    own_pool,
    range_candidates,
    shared_pool,
    unmerged_candidates,
    weigh_positives,
)
from trainer.rows import torch_kernels
from trainer.rows.torch_kernels import (
    DevicePairs,
    merge_labels,
    order_pairs,
    pair_scores,
    sparse_product,
    split_rows,
    starts_of,
)
from trainer.stream.batch import Batch, Candidates

LABELS, D = 40, 3


def as_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Take the CPU's memory for a device's without kernels of its own."""
    patch.setenv("EXTREMIS_KERNELS", "reference")
    for module in ("rows.matrix", "device"):
        patch.setattr(f"trainer.{module}.CPU", None)


def as_tensors(candidates: Candidates) -> Any:
    assert candidates.drawn is not None
    return send(replace(candidates.drawn, hard=None), torch.device("cpu", 0))


def by_query(ids: torch.Tensor, pairs: DevicePairs) -> dict[tuple[int, int, float], float]:
    """Signed weights by (query, label, margin), those of pairs that count."""
    weights: dict[tuple[int, int, float], float] = {}
    labels, margins = ids[pairs.label.long()].tolist(), [0.0] * len(pairs.query)
    margins = margins if pairs.margin is None else pairs.margin.tolist()
    for query, label, weight, margin in zip(pairs.query.tolist(), labels, pairs.weight.tolist(), margins, strict=True):
        if weight:
            weights[query, label, margin] = weights.get((query, label, margin), 0) + weight
    return weights


def check_both_orders(ids: torch.Tensor, pairs: DevicePairs) -> None:
    """Each query and each label has the pairs between its starts, and every pair belongs to one of both."""
    assert (pairs.query_starts[0], pairs.query_starts[-1]) == (0, len(pairs.query))
    for query, (start, stop) in enumerate(zip(pairs.query_starts[:-1], pairs.query_starts[1:], strict=True)):
        assert (pairs.query[start:stop] == query).all()
    assert sorted(pairs.order.tolist()) == list(range(len(pairs.label)))
    assert (pairs.label_starts[0], pairs.label_starts[-1]) == (0, len(pairs.label))
    assert len(pairs.label_starts) == len(ids) + 1
    for label, (start, stop) in enumerate(zip(pairs.label_starts[:-1], pairs.label_starts[1:], strict=True)):
        assert (pairs.label[pairs.order[start:stop].long()] == label).all()


@given(batches())
def test_a_device_merges_what_the_host_does(batch: tuple) -> None:
    positives, hard, draws = batch
    arguments = batch_of(positives, hard), hard, draws, 2.0
    both = (build(*arguments) for build in (unmerged_candidates, own_pool))
    drawn, expected = (add_margins(each, arguments[0], hard, (0.5, 1.5)) for each in both)
    ids, pairs = merge_labels(as_tensors(drawn))
    count = len(expected.ids)
    assert ids[:count].tolist() == expected.ids.tolist() == drawn.touched.tolist()
    assert set(ids[count:].tolist()) <= {PAD}
    check_both_orders(ids, pairs)
    merged = order_pairs(send(expected, torch.device("cpu", 0)), len(positives), count)
    check_both_orders(torch.from_numpy(expected.ids), merged)
    assert by_query(ids, pairs) == by_query(torch.from_numpy(expected.ids), merged)


@given(batches())
def test_hard_negatives_may_come_on_the_device(batch: tuple) -> None:
    positives, hard, draws = batch
    hard = hard % 100 - (hard == PAD) * 100  # as many as int32 holds
    rest = batch_of(positives, None), draws, 2.0
    early = unmerged_candidates(rest[0], hard, *rest[1:])
    late = with_late_hard(rest[0], hard, *rest[1:])
    assert late.drawn is not None
    got, expected = merge_labels(as_tensors(late), late.drawn.hard), merge_labels(as_tensors(early))
    count = int((expected[0] != PAD).sum())
    assert got[0][:count].tolist() == expected[0][:count].tolist() == late.touched.tolist()
    assert set(got[0][count:].tolist()) <= {PAD}
    check_both_orders(*got)
    assert by_query(*got) == by_query(*expected)


@given(batches())
def test_pairs_of_a_shared_pool_are_ordered_too(batch: tuple) -> None:
    positives, hard, draws = batch
    candidates = shared_pool(batch_of(positives, hard), hard, draws[draws != PAD], 2.0)
    ids = torch.from_numpy(candidates.ids)
    check_both_orders(ids, order_pairs(send(candidates, torch.device("cpu", 0)), len(positives), len(ids)))


@pytest.mark.parametrize("labels", [2**31 - 2, 2**31 - 1, 2**40])
def test_labels_are_wide_where_they_must_be(labels: int) -> None:
    drawn = unmerged_candidates(batch_of([[0, labels]]), None, np.array([[5, 5]]), 1.0)
    assert drawn.drawn is not None
    assert drawn.drawn.label.dtype == (np.int32 if labels < 2**31 - 1 else np.int64)
    ids, _ = merge_labels(as_tensors(drawn))
    assert ids.tolist() == [0, 5, labels, PAD]


@st.composite
def weighted(draw: st.DrawFn) -> tuple:
    """Queries, some without a label, with weights by label of positives and of draws."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(1, 6))
    positives = [numbers.choice(9, numbers.integers(0, 4), replace=False).tolist() for _ in range(rows)]
    hard, draws = numbers.integers(9, 12, (rows, 2)), numbers.integers(0, LABELS, (rows, draw(st.integers(0, 9))))
    hard[numbers.random(hard.shape) < 0.3] = PAD
    draws[numbers.random(draws.shape) < 0.3] = PAD
    if draw(st.booleans()):
        positives[-1], hard[-1], draws[-1] = [], PAD, PAD
    weights = numbers.uniform(0.5, 2, (2, LABELS))
    weight = weights[0] if draw(st.booleans()) else 2.0
    positive_weight = weights[1].astype(np.float32) if draw(st.booleans()) else None
    return batch_of(positives, hard), hard, draws, weight, positive_weight


def with_late_hard(batch: Batch, hard: np.ndarray, *rest: Any) -> Candidates:
    return unmerged_candidates(batch, torch.from_numpy(hard), *rest)


@given(weighted(), st.sampled_from(["sgd", "adagrad", "adam"]), st.booleans())
def test_a_step_on_drawn_labels_is_that_on_merged_ones(arguments: tuple, optimizer: str, normalize: bool) -> None:
    options: dict = {"normalize": True} if normalize else {"weight_decay": 0.1}
    config = Config(initial_scale=1, optimizer=optimizer, lr=0.1, **options)
    x = torch.randn(len(arguments[0]), D, generator=torch.Generator().manual_seed(1))
    results = []
    for build in (own_pool, unmerged_candidates, with_late_hard):
        head = Classifier(config, LABELS, D, 0)
        with pytest.MonkeyPatch.context() as patch:
            if build is not own_pool:
                as_elsewhere(patch)
            candidates = weigh_positives(build(*arguments[:4]), arguments[0], arguments[4])
            loss, on_x = head.descend(x, candidates, 1.0, 3, 0.5)
        results.append((torch.as_tensor(loss, dtype=torch.float64), on_x, head.vectors, *head.matrix.state.values()))
    for got, expected in (*zip(results[1], results[0], strict=True), *zip(results[2], results[0], strict=True)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert head.matrix.device == CPU


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 40]))
def test_a_pool_in_bfloat16_is_within_its_rounding(seed: int, dimension: int) -> None:
    """Of vectors in bfloat16 x and slopes are rounded to 8 digits: 2^-9 of every summand."""
    draw = np.random.default_rng(seed)
    batch = batch_of([draw.choice(LABELS, 2, replace=False).tolist() for _ in range(5)])
    candidates, x = range_candidates(batch, 0, LABELS), torch.from_numpy(draw.standard_normal((5, dimension))).float()
    results = []
    for products in ("tf32", "bfloat16"):
        config = Config(initial_scale=1, dtype="bfloat16", optimizer="sgd", momentum=0.9, lr=0.1, products=products)
        head = Classifier(config, LABELS, dimension, 0)
        w = head.vectors.float()
        with pytest.MonkeyPatch.context() as patch:
            as_elsewhere(patch)
            loss, on_x = head.descend(x, candidates, 1.0)
        results.append((float(loss), on_x, head.matrix.state["momentum"]))
    (loss, on_x, moved), (near, near_x, near_moved) = results
    off = 2**-9 * x.abs() @ w.abs().T  # of a score; a slope changes by a quarter of it at most
    slopes = off / 4 + 2**-9
    assert abs(near - loss) <= float(off.sum()) + 1e-4
    assert ((near_x - on_x).abs() <= slopes @ w.abs() + 1e-4).all()
    assert ((near_moved - moved).abs() <= slopes.T @ x.abs() + 2**-9 * x.abs().sum(0) + 1e-4).all()


def entries(rows: int, columns: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, rows, (count,), generator=generator)
    column = torch.randint(0, columns, (count,), generator=generator)
    return row, column, torch.randn(count, generator=generator, dtype=torch.float64)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_pair_scores_are_places_of_the_dense_product(queries: int, labels: int, data: st.DataObject) -> None:
    # Each pair once, as candidates have them.
    places = st.lists(st.integers(0, queries * labels - 1), unique=True).map(sorted)
    place = torch.tensor(data.draw(places), dtype=torch.int64)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x, w = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (queries, labels))
    # Labels of a query come in any order.
    place = place[torch.argsort(torch.rand(len(place), generator=generator))]
    query, order = torch.sort(place // labels, stable=True)
    label = (place % labels)[order]
    torch.testing.assert_close(pair_scores(x, w, query, label), (x @ w.T)[query, label])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 30), st.integers(0, 99))
def test_sparse_product_is_the_dense_one(rows: int, columns: int, count: int, seed: int) -> None:
    row, column, value = entries(rows, columns, count, seed)
    matrix = torch.zeros(rows, columns, dtype=torch.float64).index_put((row, column), value, accumulate=True)
    dense = torch.randn(columns, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(sparse_product(row, column, value, rows, dense), matrix @ dense)


@given(st.integers(1, 6), st.integers(0, 400), st.booleans(), st.integers(1, 9), st.integers(0, 99))
def test_long_rows_are_summed_in_pieces_on_a_device(
    rows: int, count: int, ascending: bool, span: int, seed: int
) -> None:
    """Whatever rows are empty, or have most of the entries; no piece is longer than a span."""
    row, column, value = entries(rows, 40, count, seed)
    row[: count // 2] = rows - 1
    row = row.sort().values if ascending else row
    dense = torch.randn(40, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = sparse_product(row, column, value, rows, dense, ascending)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernels, "CPU", None)  # as if its memory were a device's
        patch.setattr(torch_kernels, "SPAN", span)
        torch.testing.assert_close(sparse_product(row, column, value, rows, dense, ascending), expected)
        starts = starts_of(row.sort().values, rows).long()
        if pieces := split_rows(starts, count):
            cuts, firsts = pieces
            assert cuts.diff().max() <= span
            assert torch.equal(cuts[firsts], starts)


def test_the_same_product_twice_has_the_same_bits() -> None:
    row, column, value = entries(5, 40, 2000, 1)
    dense = torch.randn(40, 16, dtype=torch.float64)
    assert torch.equal(*(sparse_product(row, column, value, 5, dense) for _ in range(2)))
