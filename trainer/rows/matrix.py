"""A matrix of which a step touches a few rows only: classifier vectors, embedding tables, their optimizers."""

from dataclasses import dataclass

import numpy as np
import torch

from trainer.rows import kernels
from trainer.rows.memory import IN_MEMORY, zeros
from trainer.rows.rounding import key_of, noise, rounded
from trainer.rows.threads import in_parts

OPTIMIZERS = ("sgd", "adagrad", "adam")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORMS = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}
_NONE = {
    "first": np.empty((0, 0), np.float32),
    "second": np.empty((0, 0), np.float32),
    "count": np.empty(0, np.float32),
}


@dataclass(frozen=True)
class RowOptimizer:
    """Update of touched rows.

    sgd: v = momentum v + g, w -= lr v. adagrad: a += mean(g^2) (one number a row), w -= lr g / (sqrt(a) + eps).
    adam: Adam with moments that move only when the row is touched, bias-corrected by the row's own count of updates.
    `weight_decay` is decoupled: w *= 1 - lr * weight_decay at each step that touches the row.
    """

    name: str = "adagrad"
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def method(self) -> int:
        """Number of the optimizer in the compiled loops. Raises ValueError for an unknown name."""
        if self.name not in OPTIMIZERS:
            raise ValueError(f"unknown row optimizer {self.name!r}; expected one of {OPTIMIZERS}")
        methods = {"sgd": kernels.MOMENTUM if self.momentum else kernels.SGD, "adagrad": kernels.ADAGRAD}
        return methods.get(self.name, kernels.ADAM)


class RowMatrix:
    """[R, D] in float32, bfloat16 or float16 with its optimizer's state by row; a step's cost does not depend on R.

    Rows are computed with in float32, and rounded stochastically where they are narrower; the state is float32. Row 0
    is row `first` of a larger matrix, of which the results do not show the cut. `storage`: where the state is kept
    (memory.py).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        optimizer: RowOptimizer,
        *,
        first: int = 0,
        seed: int = 0,
        storage: str = IN_MEMORY,
    ) -> None:
        self.weight = weight
        self.optimizer = optimizer
        self.state = _initial_state(weight, optimizer, storage)
        self.compiled = weight.device.type == "cpu"
        self._first, self._seed = first, seed
        self._key: tuple[int, int] = (-1, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def gather(self, ids: np.ndarray) -> torch.Tensor:
        """Return rows `ids` [C] as a float32 leaf that takes a gradient, [C, D]."""
        if self.compiled:
            out = torch.empty(len(ids), self.shape[1])
            matrix, into = self._matrix(), out.numpy()
            in_parts(lambda _, start, stop: kernels.gather(matrix, ids, into, start, stop), len(ids))
            return out.requires_grad_()
        rows = torch.from_numpy(ids).to(self.weight.device)
        return self.weight.index_select(0, rows).float().requires_grad_()

    @torch.no_grad()
    def update(self, ids: np.ndarray, gathered: torch.Tensor, lr: float, step: int = 0) -> None:
        """Make one optimizer step on rows `ids` [C], all distinct, in any order.

        `gathered` is what `gather(ids)` gave, with its gradient; it is used up. Global `step` keys stochastic rounding.
        """
        gradient = gathered.grad
        assert gradient is not None, "update follows a backward pass"
        weight = gathered.detach()
        if self.compiled:
            arguments = *self.compiled_step(lr, step), ids, weight.numpy(), gradient.contiguous().numpy()
            in_parts(lambda _, start, stop: kernels.update(*arguments, start, stop), len(ids))
            return
        rows = torch.from_numpy(ids).to(self.weight.device)
        state = {name: value.index_select(0, rows) for name, value in self.state.items()}
        if self.optimizer.weight_decay:
            weight.mul_(1 - lr * self.optimizer.weight_decay)
        self._descend(weight, gradient, state, lr)
        self._store(rows, weight, step)
        for name, value in state.items():
            self.state[name].index_copy_(0, rows, value)

    def compiled_step(self, lr: float, step: int) -> tuple[kernels.Matrix, kernels.Rule]:
        """Return what a compiled loop needs to make the optimizer's step itself."""
        return self._matrix(), self._rule(lr, step)

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(
            _unsigned(self.weight),
            _FORMS[self.weight.dtype],
            self._state_of("momentum", "first"),
            self._state_of("second"),
            self._state_of("square", "count"),
            self._first,
        )

    def _state_of(self, *names: str) -> np.ndarray:
        """Return the state that has one of `names`, or no rows of it."""
        for name in names:
            if name in self.state:
                return self.state[name].numpy()
        return _NONE[names[-1]]

    def _rule(self, lr: float, step: int) -> kernels.Rule:
        options = self.optimizer
        beta1, beta2 = (options.momentum, 0.0) if options.name == "sgd" else options.betas
        return kernels.Rule(
            options.method,
            np.float32(lr),
            np.float32(1 - lr * options.weight_decay),
            np.float32(beta1),
            np.float32(beta2),
            np.float32(options.eps),
            self._key_of(step),
        )

    def _key_of(self, step: int) -> int:
        """Return the key of the random bits of global step `step`."""
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
    return {
        name: zeros(shape, storage=storage, device=weight.device) for name, shape in shapes[optimizer.method].items()
    }


def _unsigned(weight: torch.Tensor) -> np.ndarray:
    """View the memory of `weight` as unsigned integers of its width."""
    if weight.dtype == torch.float32:
        return weight.numpy().view(np.uint32)
    return weight.view(torch.int16).numpy().view(np.uint16)
