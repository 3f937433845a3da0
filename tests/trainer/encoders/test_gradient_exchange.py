"""Gradients that are sent during a backward pass, over real processes: their sums are those of sums made after it."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from trainer.encoders import base
from trainer.encoders.base import GradientExchange
from trainer.group import Group

WIDTH, STEPS = 4, 5


class Branches(nn.Module):
    """Layers of which a rank's rows may pass some; one that none passes, one that takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor, passed: list[int]) -> torch.Tensor:
        for n in passed:
            x = torch.tanh(self.layers[n](x))
        return self.fixed(x)


def passed_by(rank: int, step: int) -> list[int]:
    """All layers, but in step 2 another one is left out by every rank, and in step 3 the first by rank 0 alone."""
    if step == 2:
        return [0, 1, 3, 4]
    return [1, 2, 3, 4] if step == 3 and rank == 0 else [0, 1, 2, 3, 4]


def gradients(group: Group, rows: int, overlapped: bool) -> list[list[Any]]:
    """Return the gradients after each step, None for none. A rank without `rows` makes no backward pass."""
    model = Branches()
    exchange = GradientExchange(model.parameters(), group)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(group.rank))

        def backward(x: torch.Tensor = x, step: int = step) -> None:
            if rows:
                model(x, passed_by(group.rank, step)).square().sum().backward()

        if overlapped:
            with exchange.sending():
                backward()
            group.max(torch.ones(3))  # another message in between
            exchange.finish()
        else:
            backward()
            reduce(model, group)
        steps.append([None if each.grad is None else each.grad.tolist() for each in model.parameters()])
    return steps


def reduce(model: nn.Module, group: Group) -> None:
    """Sum one parameter after the other."""
    for parameter in model.parameters():
        some = group.max(torch.tensor([int(parameter.grad is not None)])).item()
        if some:
            parameter.grad = group.sum(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def both(group: Group) -> list[tuple[list, list]]:
    results = []
    for size in (1, 2 * 4 * WIDTH * WIDTH, 1 << 20):  # a parameter a bucket, a few, all
        base._BUCKET_BYTES = size
        for rows in (3, 3 * (group.rank > 0)):
            results.append((gradients(group, rows, True), gradients(group, rows, False)))
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_one_parameter_after_the_other(ranks: int) -> None:
    results = on_ranks(ranks, both)
    for of_rank in results:
        for overlapped, plain in of_rank:
            for mine, expected in zip(overlapped, plain, strict=True):
                assert [each is None for each in mine] == [each is None for each in expected]
                for value, other in zip(mine, expected, strict=True):
                    if value is not None:
                        torch.testing.assert_close(torch.tensor(value), torch.tensor(other))
    for of_rank, of_next in pairwise(results):
        assert [mine for mine, _ in of_rank] == [mine for mine, _ in of_next]  # to the bit


def order_of_messages(group: Group) -> list[str]:
    """Note when gradients are sent, and when layers are reached by the backward pass."""
    base._BUCKET_BYTES = 1
    model, said = Branches(), list[str]()
    exchange = GradientExchange(model.parameters(), group)
    begin_sum = group.begin_sum

    def noted(tensor: torch.Tensor) -> Any:
        said.append("sent")
        return begin_sum(tensor)

    group.begin_sum = noted  # type: ignore[method-assign]
    for _ in range(2):  # the first step finds out what has no gradient
        model.zero_grad()
        said.clear()
        with exchange.sending():
            x = torch.randn(2, WIDTH, requires_grad=True)
            x.register_hook(lambda gradient: said.append("done"))
            model(x, [0, 1, 2, 3, 4]).sum().backward()
        exchange.finish()
    return said


def test_the_last_layers_gradients_travel_while_the_first_are_made() -> None:
    for said in on_ranks(2, order_of_messages):
        assert said.count("sent") == 10  # weight and bias of each layer
        assert said.index("done") >= 8
