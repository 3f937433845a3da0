"""A matrix of which a step touches a few rows only: classifier vectors, embedding tables, their optimizers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.rows import kernels
from trainer.rows.memory import IN_MEMORY, zeros
from trainer.rows.rounding import key_of, noise, rounded
from trainer.rows.threads import in_parts

OPTIMIZERS = ("sgd", "adagrad", "adam")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORMS = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}
_SETTLED = 1 << 18  # rows settled at a time, out of main memory
_NONE = {
    "first": np.empty((0, 0), np.float32),
    "second": np.empty((0, 0), np.float32),
    "count": np.empty(0, np.float32),
    "seen": np.empty(0, np.int32),
}


@dataclass(frozen=True)
class RowOptimizer:
    """How touched rows are updated.

    sgd: v = momentum v + g, w -= lr v. adagrad: a += mean(g^2) (one number a row), w -= lr g / (sqrt(a) + eps).
    adam: Adam with moments that move only when the row is touched, bias-corrected by the row's own count of updates.
    `weight_decay` is decoupled: w *= 1 - lr * weight_decay at each step that touches the row. With `lazy` at every
    step: a row that is gathered has first been multiplied by the factors of all the steps that passed it by, so that it
    is what decoupled decay of the whole matrix (SGDW, AdamW) would have made of it.
    """

    name: str = "adagrad"
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lazy: bool = False

    @property
    def method(self) -> int:
        """Of the compiled loops. Raises ValueError for an unknown name."""
        if self.name not in OPTIMIZERS:
            raise ValueError(f"unknown row optimizer {self.name!r}; expected one of {OPTIMIZERS}")
        methods = {"sgd": kernels.MOMENTUM if self.momentum else kernels.SGD, "adagrad": kernels.ADAGRAD}
        return methods.get(self.name, kernels.ADAM)


class RowMatrix:
    """[R, D] in float32, bfloat16 or float16 with its optimizer's state by row; a step's cost does not depend on R.

    Rows are computed with in float32, and rounded stochastically where they are narrower; the state is float32. Row 0
    is row `first` of a larger matrix, of which the results do not show the cut. `storage`: where the state is kept
    (trainer/rows/memory.py). `rate(step)`: the learning rate at every step, which lazy decay asks for.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        optimizer: RowOptimizer,
        *,
        first: int = 0,
        seed: int = 0,
        storage: str = IN_MEMORY,
        rate: Callable[[int], float] | None = None,
    ) -> None:
        self.weight = weight
        self.optimizer = optimizer
        self.rate = rate
        self.state = _initial_state(weight, optimizer, storage)
        self.compiled = weight.device.type == "cpu"
        self._first, self._seed = first, seed
        self._decayed = [0.0]  # log of what is left of a row after the steps [0, t), at t
        self._key: tuple[int, int] = (-1, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def gather(self, ids: np.ndarray, step: int = 0) -> torch.Tensor:
        """Rows `ids` [C] as they are before global step `step`: a float32 leaf that takes a gradient, [C, D]."""
        if self.compiled:
            out = torch.empty(len(ids), self.shape[1])
            given = self._matrix(), self._now(step), ids, out.numpy()
            in_parts(lambda _, start, stop: kernels.gather(*given, start, stop), len(ids))
            return out.requires_grad_()
        rows = torch.from_numpy(ids).to(self.weight.device)
        weight = self.weight.index_select(0, rows).float()
        if self.optimizer.lazy:
            weight *= self._factor(self.state["seen"].index_select(0, rows), step)
        return weight.requires_grad_()

    @torch.no_grad()
    def update(self, ids: np.ndarray, gathered: torch.Tensor, lr: float, step: int = 0) -> None:
        """One optimizer step on rows `ids` [C], all distinct; order is of no account.

        `gathered` is what `gather(ids, step)` gave, with its gradient; it is used up.
        """
        grad = gathered.grad
        assert grad is not None, "update follows a backward pass"
        weight = gathered.detach()
        if self.compiled:
            both = weight.numpy(), grad.contiguous().numpy()
            given = (*self.compiled_step(lr, step), ids, *both)
            in_parts(lambda _, start, stop: kernels.update(*given, start, stop), len(ids))
            return
        rows = torch.from_numpy(ids).to(self.weight.device)
        state = {name: value.index_select(0, rows) for name, value in self.state.items() if name != "seen"}
        if self.optimizer.weight_decay:
            weight.mul_(1 - lr * self.optimizer.weight_decay)
        self._descend(weight, grad, state, lr)
        self._store(rows, weight, step)
        for name, value in state.items():
            self.state[name].index_copy_(0, rows, value)
        if self.optimizer.lazy:
            self.state["seen"].index_fill_(0, rows, step + 1)

    @torch.no_grad()
    def settle(self, step: int) -> None:
        """Decay every row for the steps before `step` that passed it by: all rows are then as they are to be read."""
        if not self.optimizer.lazy:
            return
        if self.compiled:
            given = self._matrix(), self._now(step)
            in_parts(lambda _, start, stop: kernels.settle(*given, start, stop), len(self.weight))
            return
        for start in range(0, len(self.weight), _SETTLED):
            rows = torch.arange(start, min(start + _SETTLED, len(self.weight)), device=self.weight.device)
            seen = self.state["seen"][rows]
            rows, seen = rows[seen < step], seen[seen < step]
            self._store(rows, self.weight[rows].float() * self._factor(seen, step), step)
            self.state["seen"][rows] = step

    def compiled_step(self, lr: float, step: int) -> tuple[Any, ...]:
        """(matrix, now, rule) of kernels.py, for a compiled loop that makes the optimizer's step itself."""
        return self._matrix(), self._now(step), self._rule(lr)

    def _matrix(self) -> tuple[Any, ...]:
        """As the compiled loops take it."""
        return (
            _unsigned(self.weight),
            _FORMS[self.weight.dtype],
            self._of("momentum", "first"),
            self._of("second"),
            self._of("square", "count"),
            self._of("seen"),
            self._first,
        )

    def _of(self, *names: str) -> np.ndarray:
        """The state that has one of `names`, or none of it."""
        for name in names:
            if name in self.state:
                return self.state[name].numpy()
        return _NONE[names[-1]]

    def _now(self, step: int) -> tuple[np.ndarray, int, int]:
        decayed = self._decay(step) if self.optimizer.lazy else np.zeros(1)
        return decayed, step, self._key_of(step)

    def _rule(self, lr: float) -> tuple[Any, ...]:
        options = self.optimizer
        beta1, beta2 = (options.momentum, 0.0) if options.name == "sgd" else options.betas
        left = 1 - lr * options.weight_decay
        return options.method, *map(np.float32, (lr, left, beta1, beta2, options.eps))

    def _key_of(self, step: int) -> int:
        """Of the random bits of global step `step`."""
        if self.weight.dtype == torch.float32:
            return 0
        if self._key[0] != step:
            self._key = step, key_of(self._seed, step)
        return self._key[1]

    def _store(self, rows: torch.Tensor, weight: torch.Tensor, step: int) -> None:
        if self.weight.dtype != torch.float32:
            bits = noise(self._key_of(step), rows + self._first, self.shape[1])
            weight = rounded(weight, self.weight.dtype, bits)
        self.weight.index_copy_(0, rows, weight)

    def _factor(self, seen: torch.Tensor, step: int) -> torch.Tensor:
        """What decay leaves of rows that were last `seen` before `step`, [C, 1]."""
        decayed = torch.from_numpy(self._decay(step)).to(seen.device)
        return torch.exp(decayed[step] - decayed[seen.long()]).float().unsqueeze(1)

    def _decay(self, step: int) -> np.ndarray:
        """`_decayed` up to `step`, [step + 1]."""
        assert self.rate is not None, "lazy decay needs the course of the learning rate"
        while len(self._decayed) <= step:
            lost = self.rate(len(self._decayed) - 1) * self.optimizer.weight_decay
            self._decayed.append(self._decayed[-1] + math.log1p(-lost))
        return np.asarray(self._decayed[: step + 1])

    def _descend(self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], lr: float) -> None:
        """Change `weight` and `state` in place."""
        options = self.optimizer
        if options.name == "sgd":
            step = state["momentum"].mul_(options.momentum).add_(grad) if options.momentum else grad
            weight.add_(step, alpha=-lr)
        elif options.name == "adagrad":
            square = torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])
            rate = state["square"].add_(square).sqrt().add_(options.eps).reciprocal_()
            weight.addcmul_(grad, rate.unsqueeze(1), value=-lr)
        else:
            beta1, beta2 = options.betas
            count = state["count"].add_(1)
            first = state["first"].lerp_(grad, 1 - beta1)
            second = state["second"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = (second / (1 - beta2**count).unsqueeze(1)).sqrt_().add_(options.eps)
            weight.addcdiv_(first / (1 - beta1**count).unsqueeze(1), scale, value=-lr)


def _initial_state(weight: torch.Tensor, optimizer: RowOptimizer, storage: str) -> dict[str, torch.Tensor]:
    whole, by_row = tuple(weight.shape), (len(weight),)
    shapes: dict[int, dict[str, tuple[int, ...]]] = {
        kernels.SGD: {},
        kernels.MOMENTUM: {"momentum": whole},
        kernels.ADAGRAD: {"square": by_row},
        kernels.ADAM: {"first": whole, "second": whole, "count": by_row},
    }
    state = {
        name: zeros(shape, storage=storage, device=weight.device) for name, shape in shapes[optimizer.method].items()
    }
    if optimizer.lazy:
        state["seen"] = zeros(by_row, torch.int32, storage, weight.device)
    return state


def _unsigned(weight: torch.Tensor) -> np.ndarray:
    """The same memory as unsigned integers of its width."""
    if weight.dtype == torch.float32:
        return weight.numpy().view(np.uint32)
    return weight.view(torch.int16).numpy().view(np.uint16)
