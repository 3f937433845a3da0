"""Rows on the host of a device: whatever is asked of them, and when, they are those of a matrix changed at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.rows.test_matrix import OPTIMIZERS, step
from trainer.device import CPU, AsyncCopy
from trainer.rows.matrix import HostMatrix, RowMatrix, RowOptimizer
from trainer.rows.torch_kernels import update_rows

ROWS, D = 12, 5
DTYPES = [torch.float32, torch.bfloat16]
ids_of_a_step = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS)


def both(optimizer: RowOptimizer, dtype: torch.dtype) -> tuple[RowMatrix, HostMatrix]:
    weight = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, others = (RowMatrix(weight.clone(), optimizer, first=3, seed=5) for _ in range(2))
    return rows, HostMatrix(others, CPU)


@given(
    steps=st.lists(st.tuples(ids_of_a_step, st.booleans(), st.booleans()), max_size=8),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_steps_read_now_and_then_are_those_of_a_matrix_on_the_spot(
    steps: list[tuple[list[int], bool, bool]], optimizer: RowOptimizer, dtype: torch.dtype
) -> None:
    at_once, host = both(optimizer, dtype)
    generator = torch.Generator().manual_seed(1)
    for number, (some, normalized, read) in enumerate(steps):
        ids = np.array(some, np.int64)
        gradient = torch.randn(ROWS, D, generator=generator)
        for matrix in (at_once, host):
            step(matrix, ids, gradient, number=number)
            if normalized and dtype == torch.float32:
                matrix.normalize(ids)
        if read:
            assert torch.equal(host.weight, at_once.weight)
    assert torch.equal(host.weight, at_once.weight)
    assert host.state.keys() == at_once.state.keys()
    for name, value in at_once.state.items():
        assert torch.equal(host.state[name], value), name


@given(steps=st.lists(ids_of_a_step, max_size=6), optimizer=st.sampled_from(OPTIMIZERS))
def test_what_kernels_leave_on_rows_of_zeros_is_the_gradient(steps: list[list[int]], optimizer: RowOptimizer) -> None:
    at_once, host = both(optimizer, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for number, some in enumerate(steps):
        ids = np.array(some, np.int64)
        gradient = torch.randn(len(ids), D, generator=generator)
        rows = at_once.gather(ids)
        rows.grad = gradient.clone()
        made = host.begin(ids, 0.1, number)
        assert torch.equal(made.scored.vectors, rows.detach())
        update_rows(made.updated, made.rule, torch.from_numpy(made.places), gradient)
        host.end(ids, made, 0.1, number)
        at_once.update(ids, rows, 0.1, number)
    assert torch.equal(host.weight, at_once.weight)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[AsyncCopy]:
    """Gradients that were waited for."""
    copies: list[AsyncCopy] = []

    class Noted(AsyncCopy):
        def take(self) -> np.ndarray:
            copies.append(self)
            return super().take()

    monkeypatch.setattr("trainer.rows.matrix.AsyncCopy", Noted)
    return copies


def test_a_step_waits_for_no_gradient_but_of_its_own_rows(taken: list[AsyncCopy]) -> None:
    """Chunks of labels follow each other, two of them behind; a batch has rows of the one before."""
    _, host = both(RowOptimizer("sgd"), torch.float32)
    gradient = torch.ones(ROWS, D)
    waited = []
    for number, first in enumerate((0, 3, 6, 9, 9)):
        step(host, np.arange(first, first + 3), gradient, number=number)
        waited.append(len(taken))
    assert waited == [0, 0, 1, 2, 4]
    assert host.shape == (ROWS, D)
    assert len(taken) == 4
    assert host.weight.shape == (ROWS, D)
    assert len(taken) == 5
