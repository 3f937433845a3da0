"""Arrays on their way to a device, in one copy that nothing waits for; results on their way back, behind the step."""

from typing import Any

import numpy as np
import torch

from trainer.device import CPU
from trainer.padding import as_tensor
from trainer.stream.batch_tensors import Place, map_arrays, pack

_streams: dict[torch.device, torch.cuda.Stream] = {}


def send(value: Any, device: torch.device) -> Any:
    """Return `value` with tensors on `device` in place of all arrays: for a CPU on their own memory.

    Otherwise they travel together, from pinned memory on a stream of their own, while the device is at work on what it
    was given before. 64 bits and 32 are meant alike: no unsigned numbers.
    """
    if device == CPU:
        return map_arrays(value, as_tensor)
    packed = pack(map_arrays(value, lambda tensor: tensor.numpy(), (torch.Tensor,)), device.type == "cuda")
    if packed is None:
        return value
    skeleton, buffer = packed
    moved = send_tensor(buffer, device)
    return map_arrays(skeleton, lambda place: _view(moved, place), (Place,))


class LateCopy:
    """A tensor on its way to the CPU: `take` waits for it, the step that made it does not."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor.cpu()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def take(self) -> np.ndarray:
        """Return the values."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


def send_tensor(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `buffer`, for a GPU in pinned memory, on `device`: its copy runs beside other work, and nothing waits."""
    if device.type != "cuda":
        return buffer.to(device)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(_streams[device]):
        moved = buffer.to(device, non_blocking=True)
    at_work = torch.cuda.current_stream(device)
    at_work.wait_stream(_streams[device])
    moved.record_stream(at_work)  # its memory is used again when both streams have done with it
    return moved


def _view(moved: torch.Tensor, place: Place) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, place.dtype)).dtype
    stop = place.start + int(np.prod(place.shape)) * dtype.itemsize
    return moved[place.start : stop].view(dtype).view(place.shape)
