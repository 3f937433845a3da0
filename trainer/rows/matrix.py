"""A matrix in which a step changes only a few rows, such as classifier vectors or an embedding table."""

import contextlib
import math
import mmap
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from schemas.errors import InputError, StorageError
from schemas.mapped import ScratchFile
from schemas.randomness import Purpose, torch_seed
from schemas.sizes import say_bytes
from trainer.device import CPU, AsyncCopy, send, send_tensor
from trainer.rows import codes, numba_kernels, torch_kernels
from trainer.rows.codes import SGD, Matrix, Rule
from trainer.rows.kernels import Form, kernels_of
from trainer.threads import map_ranges

IN_MEMORY, ON_HOST = "memory", "host"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_PENDING = 2  # steps, or chunks of a step, whose gradients are on their way back
# An optimizer step that sets rows of zeros to their gradient.
_GRADIENT_RULE = Rule(
    SGD, np.array(-1, np.float32), np.array(1, np.float32), np.float32(0), np.float32(0), np.float32(0), 0
)
_NO_ROWS, _NO_NUMBERS = np.empty((0, 0), np.float32), np.empty(0, np.float32)


@dataclass(frozen=True)
class RowOptimizer:
    """Optimizer that updates only touched rows.

    sgd: v = momentum v + g, w -= lr v. adagrad: a += mean(g^2) (one number per row), w -= lr g / (sqrt(a) + eps). adam:
    Adam, with moments that change only when the row is touched, and a bias correction by the row's number of updates.
    `weight_decay` is decoupled: w *= 1 - lr * weight_decay at each step that touches the row.
    """

    name: str = "adagrad"
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def method(self) -> int:
        """Code of the optimizer method in the compiled loops. Raises ValueError for an unknown name."""
        sgd = codes.MOMENTUM if self.momentum else SGD
        methods = {"sgd": sgd, "adagrad": codes.ADAGRAD, "adam": codes.ADAM}
        if self.name not in methods:
            raise ValueError(f"unknown row optimizer {self.name!r}; expected one of {tuple(methods)}")
        return methods[self.name]


class DeviceStep(NamedTuple):
    """Input of a step's kernels, which read rows `places` [C] of `scored` and update rows of `updated` by `rule`."""

    places: np.ndarray
    scored: Matrix
    updated: Matrix
    rule: Rule


class RowMatrix:
    """Matrix [R, D] with the optimizer's state of each row; the cost of a step does not depend on R.

    Rows are in float32 or bfloat16. Computation is in float32, and bfloat16 rows are rounded stochastically;
    the state is float32. Row 0 is row `first` of a larger matrix; results do not depend on the split. `storage`: where
    the state is stored (`zeros`). Ids are arrays on a CPU, and may be tensors on other devices.
    """

    def __init__(
        self, weight: torch.Tensor, optimizer: RowOptimizer, *, first: int = 0, seed: int = 0, storage: str = IN_MEMORY
    ) -> None:
        self.weight = weight
        self.optimizer = optimizer
        whole, by_row = tuple(weight.shape), (len(weight),)
        shapes: dict[int, dict[str, tuple[int, ...]]] = {
            SGD: {},
            codes.MOMENTUM: {"momentum": whole},
            codes.ADAGRAD: {"square": by_row},
            codes.ADAM: {"first": whole, "second": whole, "count": by_row},
        }
        self.state = {
            name: zeros(shape, storage=storage, device=weight.device)
            for name, shape in shapes[optimizer.method].items()
        }
        self._first, self._seed = first, seed
        self._sent: tuple[tuple[float, int, torch.device], Any] | None = None  # rate, step, device; their numbers

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def compiled(self) -> bool:
        """Whether compiled loops work on the rows in memory; else kernels of a device do."""
        return kernels_of(self.device) is numba_kernels

    @property
    def form(self) -> Form:
        """What the kernels of a device are compiled for."""
        return self.device, self.weight.dtype, self.weight.dtype, self.optimizer.method, self.shape[1]

    def move(self, device: torch.device) -> None:
        """Move the rows and their state."""
        if device != self.device:
            self.weight = self.weight.to(device)
            self.state = {name: value.to(device) for name, value in self.state.items()}

    def gather(self, ids: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [C] as a float32 leaf that requires a gradient, [C, D]."""
        if not self.compiled:
            return self.weight.index_select(0, self.places(ids).clamp(min=0)).float().requires_grad_()
        assert isinstance(ids, np.ndarray)
        out = torch.empty(len(ids), self.shape[1])
        matrix, into = self._matrix(), out.numpy()
        map_ranges(lambda _, start, stop: numba_kernels.gather(matrix, ids, into, start, stop), len(ids))
        return out.requires_grad_()

    def update(self, ids: np.ndarray | torch.Tensor, gathered: torch.Tensor, lr: float, step: int = 0) -> None:
        """Make one optimizer step on distinct rows `ids` [C], in any order; on a device, padding may follow the ids.

        `gathered` is the result of `gather(ids)` with its gradient; `gathered` may be overwritten. The global `step` is
        the key of stochastic rounding.
        """
        gradient = gathered.grad
        assert gradient is not None, "`update` needs a gradient from a backward pass"
        if not self.compiled:
            kernels_of(self.device).update_rows(
                self.device_matrix(), self.rule(lr, step), self.places(ids), gradient.contiguous()
            )
            return
        arguments = *self.compiled_step(lr, step), ids, gathered.detach().numpy(), gradient.contiguous().numpy()
        map_ranges(lambda _, start, stop: numba_kernels.update(*arguments, start, stop), len(ids))

    def normalize(self, ids: np.ndarray | torch.Tensor) -> None:
        """Scale rows `ids` [C] to length 1; ids may repeat, and on a device the ids may be padded at the end."""
        rows = self.places(ids)
        if self.device != CPU:
            rows = torch.where(rows < 0, rows[:1].clamp(min=0), rows).long()
        self.weight[rows] = torch.nn.functional.normalize(self.weight[rows], dim=1)

    def places(self, ids: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return `ids` [C] int64 on the device of the rows."""
        places: torch.Tensor = send(ids, self.device) if isinstance(ids, np.ndarray) else ids
        return places

    def prepare(self, ids: np.ndarray) -> np.ndarray | torch.Tensor:
        """Return `ids` [C] in a form that both `gather` and `update` accept, so that the ids are sent only once."""
        return ids if self.device == CPU else self.places(ids)

    def begin(self, ids: np.ndarray, lr: float, step: int) -> DeviceStep:
        """Return the input of the kernels for a step on distinct rows `ids` [C]; call `end` after the step."""
        matrix = self.device_matrix()
        return DeviceStep(ids, matrix, matrix, self.rule(lr, step))

    def end(self, ids: np.ndarray, device_step: DeviceStep, lr: float, step: int) -> None:
        """End the step that `begin` began."""

    def device_matrix(self) -> Matrix:
        """Return the matrix in the form that kernels of a device accept."""
        state, dtype_code = self.state, torch_kernels.DTYPE_CODES[self.weight.dtype]
        first, numbers = state.get("momentum", state.get("first")), state.get("square", state.get("count"))
        return Matrix(self.weight, dtype_code, first, state.get("second"), numbers, self._first)

    def compiled_step(self, lr: float, step: int) -> tuple[Matrix, Rule]:
        """Return the arguments for a compiled loop that includes the optimizer step."""
        return self._matrix(), self.rule(lr, step)

    def rule(self, lr: float, step: int) -> Rule:
        """Return the optimizer step for global `step` at rate `lr`; a device gets its numbers once for all chunks."""
        options, real = self.optimizer, np.float32
        beta1, beta2 = (options.momentum, 0.0) if options.name == "sgd" else options.betas
        if self._sent is None or self._sent[0] != (lr, step, self.device):
            key = 0 if self.weight.dtype == torch.float32 else torch_seed(self._seed, Purpose.ROUNDING, step)
            numbers: Any = real(lr), real(1 - lr * options.weight_decay), key
            if self.device != CPU:
                numbers = send(tuple(map(np.asarray, numbers)), self.device)
            self._sent = (lr, step, self.device), numbers
        rate, keep, key = self._sent[1]
        return Rule(options.method, rate, keep, real(beta1), real(beta2), real(options.eps), key)

    def _matrix(self) -> Matrix:
        vectors, dtype_code, first, second, numbers, origin = self.device_matrix()
        first, second = (_NO_ROWS if part is None else part.numpy() for part in (first, second))
        numbers = _NO_NUMBERS if numbers is None else numbers.numpy()
        held = (vectors if dtype_code == codes.FLOAT32 else vectors.view(torch.int16)).numpy()
        return Matrix(held.view(f"u{held.itemsize}"), dtype_code, first, second, numbers, origin)


@dataclass(frozen=True)
class _PendingStep:
    """Optimizer step on rows `ids` [C], all distinct, that has not been applied yet."""

    ids: np.ndarray
    gradient: AsyncCopy
    lr: float
    step: int
    normalize: bool = False

    def may_touch(self, ids: np.ndarray) -> bool:
        """Return whether the step's range of ids overlaps the range of `ids`; chunks have disjoint ranges."""
        return bool(len(ids) and len(self.ids) and self.ids.min() <= ids.max() and ids.min() <= self.ids.max())


class HostMatrix:
    """`rows` [R, D] on the host; the rows of a step are sent to `device`, and their gradient is copied back.

    All pending steps are applied before the rows or their state are read.
    """

    def __init__(self, rows: RowMatrix, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._rule = send(_GRADIENT_RULE, device)
        self._pending: list[_PendingStep] = []

    @property
    def weight(self) -> torch.Tensor:
        """The rows [R, D], on the host."""
        self._apply_pending()
        return self._rows.weight

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state of every row, on the host."""
        self._apply_pending()
        return self._rows.state

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape

    @property
    def device(self) -> torch.device:
        """The device that computes with the rows."""
        return self._device

    @property
    def form(self) -> Form:
        """What the kernels of the device are compiled for."""
        return self._device, self._rows.weight.dtype, torch.float32, SGD, self.shape[1]

    def prepare(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` [C] in the form that `gather` and `update` accept."""
        return ids

    def gather(self, ids: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [C] on the device, as a float32 leaf that requires a gradient, [C, D]."""
        assert isinstance(ids, np.ndarray)
        return self._fetch(ids).float().requires_grad_()

    def update(self, ids: np.ndarray | torch.Tensor, gathered: torch.Tensor, lr: float, step: int = 0) -> None:
        """Make one optimizer step on distinct rows `ids` [C], like `RowMatrix.update`, but deferred."""
        gradient = gathered.grad
        assert gradient is not None, "`update` needs a gradient from a backward pass"
        assert isinstance(ids, np.ndarray)
        self._defer(ids, gradient, lr, step)

    def normalize(self, ids: np.ndarray) -> None:
        """Scale rows `ids` [C] of the last step to length 1."""
        self._pending[-1] = replace(self._pending[-1], normalize=True)

    def begin(self, ids: np.ndarray, lr: float, step: int) -> DeviceStep:
        """Return rows `ids` [C] for the kernels that score the rows, and rows of zeros that accumulate the gradient."""
        rows = self._fetch(ids)
        gradient = torch.zeros(rows.shape, device=rows.device)
        scored, updated = (
            Matrix(values, torch_kernels.DTYPE_CODES[values.dtype], None, None, None, 0) for values in (rows, gradient)
        )
        return DeviceStep(np.arange(len(ids)), scored, updated, self._rule)

    def end(self, ids: np.ndarray, device_step: DeviceStep, lr: float, step: int) -> None:
        """Take the gradient of rows `ids` [C], which the kernels have added to the result of `begin`."""
        self._defer(ids, device_step.updated.vectors, lr, step)

    def _fetch(self, ids: np.ndarray) -> torch.Tensor:
        """Return a copy of rows `ids` [C] on the device, in the dtype of the stored rows."""
        self._apply_pending(ids)
        weight, pinned = self._rows.weight, self._device.type == "cuda"
        rows = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, pin_memory=pinned)
        torch.index_select(weight, 0, torch.from_numpy(ids), out=rows)
        return send_tensor(rows, self._device)

    def _defer(self, ids: np.ndarray, gradient: torch.Tensor, lr: float, step: int) -> None:
        self._pending.append(_PendingStep(ids, AsyncCopy(gradient), lr, step))
        while len(self._pending) > _MOST_PENDING:
            self._apply(self._pending.pop(0))

    def _apply_pending(self, ids: np.ndarray | None = None) -> None:
        """Apply the pending steps in order: all steps, or those up to the last step that may touch rows `ids` [C]."""
        last = max((n for n, step in enumerate(self._pending, 1) if ids is None or step.may_touch(ids)), default=0)
        for _ in range(last):
            self._apply(self._pending.pop(0))

    def _apply(self, pending: _PendingStep) -> None:
        w = self._rows.gather(pending.ids)
        w.grad = torch.from_numpy(pending.gradient.take())
        self._rows.update(pending.ids, w, pending.lr, pending.step)
        if pending.normalize:
            self._rows.normalize(pending.ids)


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, storage: str = IN_MEMORY, device: torch.device = CPU
) -> torch.Tensor:
    """Return zeros of `shape` on `device`; on a CPU in memory, or in a new file in the directory `storage`.

    The file has no name, so it disappears however the process ends. Its space is reserved in advance, because a disk
    that fills up later would kill the process. Raises InputError if the directory does not exist, or if the matrix does
    not fit.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device != CPU:
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(device)
            raise InputError(
                f"{device}: {shape[0]:,} rows need {say_bytes(size)}, and {say_bytes(free)} are free. Keep "
                "the classifier in main memory (classifier.storage = 'host'), or use a narrower classifier.dtype, a "
                "smaller encoder.dimension, or more GPUs (torchrun)."
            ) from None
    if not size:
        return torch.zeros(shape, dtype=dtype)
    if storage in (IN_MEMORY, ON_HOST):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Rows are far apart: with pages of 4 KiB, each row costs a page table walk that no cache can serve.
            with contextlib.suppress(OSError):  # for kernels without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        try:
            memory = ScratchFile("rows of labels", storage).reserve(size)
        except StorageError as error:
            raise InputError(f"classifier.storage = {error} Or use 'memory', 'host', or a narrower dtype.") from error
        if hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)  # do not read the pages around a row
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
