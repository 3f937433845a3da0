"""Optimizers of touched rows against torch's dense ones, rows that a step leaves alone, zeros in memory or a file."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.errors import InputError
from trainer.rows.matrix import RowMatrix, RowOptimizer, zeros

ROWS, D, STEPS, LR = 7, 5, 6, 0.1
EVERY = np.arange(ROWS)
OPTIMIZERS = [
    RowOptimizer("sgd"),
    RowOptimizer("sgd", momentum=0.9),
    RowOptimizer("adagrad"),
    RowOptimizer("adam"),
    RowOptimizer("sgd", momentum=0.9, weight_decay=0.1),
    RowOptimizer("adagrad", weight_decay=0.1),
    RowOptimizer("adam", weight_decay=0.1),
]


def start(optimizer: RowOptimizer, weight: torch.Tensor | None = None) -> RowMatrix:
    if weight is None:
        weight = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0))
    return RowMatrix(weight, optimizer)


def rate(step: int) -> float:
    return LR / (1 + step)


def gradients(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, D, generator=generator) for _ in range(STEPS)]


def step(matrix: RowMatrix, ids: np.ndarray, gradient: torch.Tensor, lr: float = LR, number: int = 0) -> None:
    rows = matrix.gather(ids)
    rows.grad = gradient[torch.from_numpy(ids)]
    matrix.update(ids, rows, lr, number)


DENSE: dict[str, Callable[[list, RowOptimizer], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, options: torch.optim.SGD(parameters, lr=LR, momentum=options.momentum),
    "adam": lambda parameters, options: torch.optim.Adam(parameters, lr=LR, betas=options.betas, eps=options.eps),
}


@pytest.mark.parametrize("optimizer", [each for each in OPTIMIZERS if each.name in DENSE], ids=str)
def test_touching_every_row_is_torch_s_optimizer(optimizer: RowOptimizer) -> None:
    matrix = start(optimizer)
    parameter = torch.nn.Parameter(matrix.weight.clone())
    dense = DENSE[optimizer.name]([parameter], optimizer)
    for gradient in gradients():
        step(matrix, np.random.default_rng(0).permutation(EVERY), gradient)
        with torch.no_grad():
            parameter.mul_(1 - LR * optimizer.weight_decay)  # decoupled
        parameter.grad = gradient.clone()
        dense.step()
    torch.testing.assert_close(matrix.weight, parameter.detach())


def test_adagrad_keeps_one_sum_of_mean_squares_a_row() -> None:
    matrix = start(RowOptimizer("adagrad"))
    expected, total = matrix.weight.double().numpy().copy(), np.zeros(ROWS)
    for gradient in gradients():
        step(matrix, EVERY, gradient)
        g = gradient.double().numpy()
        total += (g**2).mean(1)
        expected -= LR * g / (np.sqrt(total) + 1e-8)[:, None]
    np.testing.assert_allclose(matrix.weight.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matrix.state["square"].numpy(), total, rtol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_rows_that_are_not_touched_keep_their_bits(optimizer: RowOptimizer) -> None:
    matrix = start(optimizer)
    for gradient in gradients(2):
        step(matrix, EVERY, gradient)  # momentum and moments are not zero
    before = {"weight": matrix.weight.clone(), **{name: value.clone() for name, value in matrix.state.items()}}
    touched, rest = np.array([5, 0, 3]), [1, 2, 4, 6]
    step(matrix, touched, gradients(3)[0])
    for name, value in {"weight": matrix.weight, **matrix.state}.items():
        assert torch.equal(value[rest], before[name][rest])
        assert not torch.equal(value[touched], before[name][touched])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_row_moves_as_if_it_were_alone(optimizer: RowOptimizer) -> None:
    # State counts a row's own updates: rows touched now and then go the way of a matrix of that row only.
    together, schedule = (
        start(optimizer),
        [np.array([0, 2]), np.array([2]), np.array([1, 2, 6]), np.array([0, 1])],
    )
    alone = [start(optimizer, together.weight[row : row + 1].clone()) for row in EVERY]
    for ids, gradient in zip(schedule, gradients(), strict=False):
        step(together, ids, gradient)
        for row in ids:
            step(alone[row], np.array([0]), gradient[row : row + 1])
    torch.testing.assert_close(together.weight, torch.cat([matrix.weight for matrix in alone]))


def test_gathered_rows_are_copies_that_take_a_gradient() -> None:
    matrix = start(RowOptimizer("sgd"))
    rows = matrix.gather(np.array([2, 4]))
    assert rows.is_leaf
    assert rows.requires_grad
    with torch.no_grad():
        rows.zero_()
    assert matrix.weight[2].abs().sum() > 0


def test_an_unknown_optimizer_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'adamax'.*'sgd', 'adagrad', 'adam'"):
        start(RowOptimizer("adamax"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_many_rows_at_once_move_as_a_few_after_the_other(optimizer: RowOptimizer) -> None:
    weight = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for rows in (4000, 500):  # enough for several threads, and too few
        matrix = start(optimizer, weight.clone())
        for number in range(3):
            ids = np.random.default_rng(number).permutation(5000)[:4000]
            for first in range(0, len(ids), rows):
                step(matrix, ids[first : first + rows], torch.sin(weight * (number + 1)), rate(number), number)
        results.append({"weight": matrix.weight, **matrix.state})
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name])


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_it_is_zeros_that_can_be_written_to(where: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = zeros((1000, 7), dtype, where if where == "memory" else str(tmp_path))
    assert tensor.shape == (1000, 7)
    assert tensor.dtype == dtype
    assert not tensor.any()
    tensor[999] = 3
    assert float(tensor.sum()) == 21
    assert zeros((0, 7), dtype).shape == (0, 7)


def test_a_file_takes_all_of_its_room_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    tensor = zeros((1 << 18, 64), torch.float16, str(tmp_path))
    assert os.listdir(tmp_path) == []
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if str(tmp_path) in line)
    if os.geteuid() == 0:
        assert os.stat(f"/proc/self/map_files/{line.split()[0]}").st_blocks * 512 >= tensor.nbytes == 1 << 25


def test_no_room_and_no_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"classifier.storage = .*rows .* need .*TiB, and .* are free"):
        zeros((1 << 40, 64), torch.float16, str(tmp_path))
    with pytest.raises(InputError, match=r"classifier.storage = .*gone.*No such file"):
        zeros((10, 64), torch.float16, str(tmp_path / "gone"))
