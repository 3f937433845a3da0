"""Rows in main memory, or in a file, for a device that computes with the rows but cannot store all of them.

The rows of a step are gathered into pinned memory and sent to the device. The gradient of these rows is copied back
while the device continues. The next request for rows applies the updates, with the same loops and random bits as on a
CPU.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.rows.codes import SGD, Matrix, Rule
from trainer.rows.matrix import DeviceStep, RowMatrix
from trainer.rows.torch_kernels import DTYPE_CODES
from trainer.stream.transfer import AsyncCopy, send, send_tensor

_MOST_PENDING = 2  # steps, or chunks of a step, whose gradients are on their way back
# An optimizer step that sets rows of zeros to their gradient.
_GRADIENT_RULE = Rule(
    SGD, np.array(-1, np.float32), np.array(1, np.float32), np.float32(0), np.float32(0), np.float32(0), 0
)


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
            Matrix(values, DTYPE_CODES[values.dtype], None, None, None, 0) for values in (rows, gradient)
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
