"""Stochastic rounding: unbiased, to a neighbour, by the bits of a hash, however rows lie."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.randomness import Purpose, torch_seed
from trainer.rows import numba_kernels
from trainer.rows.matrix import RowMatrix, RowOptimizer

NARROW = [torch.bfloat16]


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest value of `dtype` that is at most x, and the least that is at least x, as float64."""
    nearest = x.to(dtype)
    down, up = torch.nextafter(nearest, torch.tensor(-torch.inf, dtype=dtype)), nearest
    below = nearest.double() <= x.double()
    up = torch.where(below, torch.nextafter(nearest, torch.tensor(torch.inf, dtype=dtype)), nearest)
    down = torch.where(below, nearest, down)
    up = torch.where(nearest.double() == x.double(), nearest, up)
    return down.double(), up.double()


@numba.njit
def _round_all(raw, bits):  # type: ignore[no-untyped-def]
    out = np.empty(len(raw), np.uint16)
    for i in range(len(raw)):
        out[i] = numba_kernels._bfloat16(raw[i], bits[i])
    return out


def rounded(x: torch.Tensor, dtype: torch.dtype, bits: np.ndarray | int) -> torch.Tensor:
    """x float32 [n] rounded by the compiled loops, each with its 16 random bits."""
    every = np.broadcast_to(np.asarray(bits, np.uint32), x.shape).copy()
    return torch.from_numpy(_round_all(x.numpy().view(np.uint32), every)).view(dtype)


def every_way(x: float, dtype: torch.dtype) -> torch.Tensor:
    """x rounded with each of the 2**16 values of the random bits."""
    return rounded(torch.full((1 << 16,), x, dtype=torch.float32), dtype, np.arange(1 << 16)).double()


def noise(key: int, rows: np.ndarray, columns: int) -> np.ndarray:
    """Sixteen random bits a value [C, columns], as decision 0012 says: what the compiled loops are held to."""
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed = mixed ^ (mixed >> np.uint64(31))
    first, stride = mixed.astype(np.uint32)[:, None], (mixed >> np.uint64(32)).astype(np.uint32)[:, None] | np.uint32(1)
    word = first + np.arange((columns + 1) // 2).astype(np.uint32) * stride
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> np.uint32(shift))) * np.uint32(factor)
    word = word ^ (word >> np.uint32(16))
    return np.concatenate([word & np.uint32(0xFFFF), word >> np.uint32(16)], 1)[:, :columns]


def key_of(seed: int, step: int) -> int:
    return torch_seed(seed, Purpose.ROUNDING, step)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@given(st.floats(-60000, 60000, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30))
def test_the_mean_over_all_random_bits_is_the_value(dtype: torch.dtype, x: float) -> None:
    values = every_way(x, dtype)
    down, up = neighbours(torch.tensor([x]), dtype)
    assert set(values.tolist()) <= {down.item(), up.item()}
    assert abs(values.mean().item() - x) <= 1e-13 * abs(x)  # exact to float64


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_the_type_holds_stays_and_what_it_does_not_ends_at_its_last_value(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    every = every[every.isfinite()]
    for bits in (0, 1, 0xFFFF):
        assert torch.equal(rounded(every.float(), dtype, bits), every)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    values = rounded(odd, dtype, 0xFFFF)
    assert values[:2].tolist() == [torch.inf, -torch.inf]
    assert values[2].isnan()


def test_the_bits_are_even_and_one_row_s_say_nothing_of_another_s() -> None:
    bits = noise(key_of(3, 7), np.arange(4096), 64) / 65535
    assert abs(bits.mean() - 0.5) < 0.002
    assert abs(bits.std() - 12**-0.5) < 0.002
    assert bits.std(0).min() > 0.27
    flat = bits - bits.mean()
    for first, other in (
        (flat[1:], flat[:-1]),  # the next row
        (flat[:, 1:], flat[:, :-1]),  # the next column
        (flat[:, :32], flat[:, 32:]),  # the column that shares its word
        (flat, noise(key_of(3, 8), np.arange(4096), 64) / 65535 - 0.5),  # the next step
    ):
        assert abs((first * other).mean() * 12) < 0.01


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 5, 64])
def test_a_step_rounds_by_the_bits_of_its_rows(dtype: torch.dtype, columns: int) -> None:
    start = torch.randn(50, columns, generator=torch.Generator().manual_seed(0))
    start[:20] *= torch.logspace(-9, -1, 20)[:, None]
    start[20] *= 3e4
    matrix = RowMatrix(start.to(dtype), RowOptimizer("sgd"), first=1 << 33, seed=5)
    for step in range(3):
        before, ids = matrix.weight.clone(), np.arange(step, 50, 2)
        rows = matrix.gather(ids)
        rows.grad = torch.sin(torch.arange(rows.numel(), dtype=torch.float32)).view_as(rows) * 2**-10
        exact = before[ids].float() - rows.grad * 2**-3  # a product without rounding: fused or not, the same bits
        matrix.update(ids, rows, 2**-3, step)
        bits = noise(key_of(5, step), ids + (1 << 33), columns)
        before[ids] = rounded(exact.view(-1), dtype, bits.ravel()).view_as(exact)
        assert torch.equal(matrix.weight, before)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_neither_the_order_of_rows_nor_the_cut_into_ranks_shows(dtype: torch.dtype) -> None:
    start = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradient = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))

    def stepped(rows: torch.Tensor, first: int, order: np.ndarray) -> torch.Tensor:
        matrix = RowMatrix(rows.clone(), RowOptimizer("adagrad"), first=first, seed=2)
        gathered = matrix.gather(order)
        gathered.grad = gradient[first + torch.from_numpy(order)]
        matrix.update(order, gathered, 0.1, 4)
        return matrix.weight

    whole = stepped(start, 0, np.arange(40))
    assert torch.equal(whole, stepped(start, 0, np.random.default_rng(0).permutation(40)))
    parts = [stepped(start[:13], 0, np.arange(13)), stepped(start[13:], 13, np.arange(27))]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_steps_below_half_a_value_s_distance_are_not_lost(dtype: torch.dtype) -> None:
    # Rounded to the nearest, 1 + 1e-5 is 1 for ever.
    matrix = RowMatrix(torch.ones(64, 64, dtype=dtype), RowOptimizer("sgd"))
    ids = np.arange(64)
    for step in range(200):
        rows = matrix.gather(ids)
        rows.grad = torch.full_like(rows, -1.0)
        matrix.update(ids, rows, 1e-5, step)
    assert abs(matrix.weight.double().mean().item() - 1.002) < 2e-4
