"""Rows in main memory, or in a file, of a device that computes with them: for more rows than the device has room for.

A step's rows are gathered into pinned memory and sent; their gradient comes back while the device goes on, and the rows
are updated when rows are asked for next, by the loops and the random bits of a CPU.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainer.rows.kernels import SGD, Rule
from trainer.rows.matrix import DeviceStep, RowMatrix, RowOptimizer, operations_of
from trainer.rows.memory import IN_MEMORY
from trainer.rows.reference import DeviceMatrix
from trainer.stream.transfer import LateCopy, send_tensor

_BEHIND = 2  # steps, or chunks of one, whose gradients are on their way back
# What a step on rows of zeros leaves of them: their gradient.
_TO_GRADIENT = Rule(SGD, np.float32(-1), np.float32(1), np.float32(0), np.float32(0), np.float32(0), 0)


@dataclass(frozen=True)
class _Owed:
    """Step on rows `ids` [C], all distinct, that is still to be made."""

    ids: np.ndarray
    gradient: LateCopy
    lr: float
    step: int
    normalize: bool = False

    def may_touch(self, ids: np.ndarray) -> bool:
        """Tell whether it may be of one of `ids`: chunks of labels follow each other, samples are from all over."""
        return bool(len(ids) and len(self.ids) and self.ids.min() <= ids.max() and ids.min() <= self.ids.max())


class HostMatrix:
    """`weight` [R, D] on the host, of which a step's rows go to `device` and their gradient comes back.

    Whoever reads rows or their state sees all steps that were made.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        optimizer: RowOptimizer,
        device: torch.device,
        *,
        first: int = 0,
        seed: int = 0,
        storage: str = IN_MEMORY,
    ) -> None:
        self._rows = RowMatrix(weight, optimizer, first=first, seed=seed, storage=storage)
        self._device = device
        self._owed: list[_Owed] = []

    @property
    def weight(self) -> torch.Tensor:
        """[R, D] on the host."""
        self._settle()
        return self._rows.weight

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by row, on the host."""
        self._settle()
        return self._rows.state

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._device

    @property
    def on_device(self) -> Any:
        """The module with `score_pairs` and `update_rows` of the device."""
        return operations_of(self._device)

    def prepare(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` [C] as `gather` and `update` take them."""
        return ids

    def gather(self, ids: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [C] on the device, as a float32 leaf that takes a gradient, [C, D]."""
        assert isinstance(ids, np.ndarray)
        return self._fetch(ids).float().requires_grad_()

    def update(self, ids: np.ndarray | torch.Tensor, gathered: torch.Tensor, lr: float, step: int = 0) -> None:
        """Make one optimizer step on rows `ids` [C], all distinct: as of a RowMatrix, but behind this step."""
        gradient = gathered.grad
        assert gradient is not None, "update follows a backward pass"
        assert isinstance(ids, np.ndarray)
        self._owe(ids, gradient, lr, step)

    def normalize(self, ids: np.ndarray) -> None:
        """Scale rows `ids` [C] to length 1, those of the last step."""
        self._owed[-1] = replace(self._owed[-1], normalize=True)

    def begin(self, ids: np.ndarray, lr: float, step: int) -> DeviceStep:
        """Return rows `ids` [C] for kernels that score them, and rows of zeros that take their gradient."""
        rows = self._fetch(ids)
        gradient = torch.zeros(rows.shape, device=rows.device)
        scored, updated = (DeviceMatrix(values, None, None, None, 0) for values in (rows, gradient))
        return DeviceStep(np.arange(len(ids)), scored, updated, _TO_GRADIENT)

    def end(self, ids: np.ndarray, made: DeviceStep, lr: float, step: int) -> None:
        """Take the gradient of rows `ids` [C] of what `begin` gave, and the kernels have filled."""
        self._owe(ids, made.updated.vectors, lr, step)

    def _fetch(self, ids: np.ndarray) -> torch.Tensor:
        """Return a copy of rows `ids` [C] on the device, as narrow as they are."""
        self._settle(ids)
        weight, pinned = self._rows.weight, self._device.type == "cuda"
        rows = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, pin_memory=pinned)
        torch.index_select(weight, 0, torch.from_numpy(ids), out=rows)
        return send_tensor(rows, self._device)

    def _owe(self, ids: np.ndarray, gradient: torch.Tensor, lr: float, step: int) -> None:
        self._owed.append(_Owed(ids, LateCopy(gradient), lr, step))
        while len(self._owed) > _BEHIND:
            self._make(self._owed.pop(0))

    def _settle(self, ids: np.ndarray | None = None) -> None:
        """Make the steps that are owed, in their order: all, or as many as rows `ids` [C] wait for."""
        last = max((n for n, owed in enumerate(self._owed, 1) if ids is None or owed.may_touch(ids)), default=0)
        for _ in range(last):
            self._make(self._owed.pop(0))

    def _make(self, owed: _Owed) -> None:
        w = self._rows.gather(owed.ids)
        w.grad = torch.from_numpy(owed.gradient.take())
        self._rows.update(owed.ids, w, owed.lr, owed.step)
        if owed.normalize:
            self._rows.normalize(owed.ids)
