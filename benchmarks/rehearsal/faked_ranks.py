"""One rank among simulated peers: the peers' messages have realistic sizes, and this rank's messages are counted.

A peer's message is a copy of a message that this rank sent some calls ago from the same place in the code, so ids and
lengths are realistic. The simulation only replaces the backend of torch.distributed: every operation of `Group` is
real.
"""

import sys
from collections import defaultdict, deque
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.group import Group, Ranks, _Joined

T = TypeVar("T")
_BACKEND = "extremis_faked"
_FRAMES = 13  # number of stack frames that identify a place in the code
_BELOW: Any = _distributed_c10d  # Any, because the module's types omit the parts of a backend
_ProcessGroup: Any = dist.ProcessGroup


class FakedRanks(_Joined):
    """Rank `rank` of `ranks`, which also does the work of rank 0; one instance per process, until `close`."""

    sent = 0.0  # bytes that all threads sent; sums and gathers count as in a ring
    messages = 0  # operations of all ranks, in all threads

    def __init__(self, rank: int, ranks: int, of: Any = None) -> None:
        store = dist.HashStore()
        if of is None:
            if not hasattr(dist.Backend, _BACKEND.upper()):
                dist.Backend.register_backend(_BACKEND, _Peers, devices=["cpu", "cuda"])
            dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=ranks)
            FakedRanks.sent, FakedRanks.messages = 0.0, 0
        super().__init__(Ranks(rank, ranks), store, _BACKEND, of)

    @property
    def first(self) -> bool:
        return True

    def all_gather_objects(self, thing: T) -> list[T]:
        return [thing]

    def broadcast(self, thing: T) -> T:
        return thing

    def for_another_thread(self) -> Group:
        return FakedRanks(self.rank, self.ranks, dist.new_group(backend=_BACKEND))


class _Peers(_ProcessGroup):
    """Process group of one process; a sum over ranks returns this rank's own part."""

    def __init__(self, store: Any, rank: int, ranks: int, timeout: Any) -> None:
        super().__init__(rank, ranks)
        self._rank, self._ranks = rank, ranks
        self._past: dict[tuple, deque[torch.Tensor]] = defaultdict(lambda: deque(maxlen=ranks))

    def getBackendName(self) -> str:
        return _BACKEND

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._send(2 * (self._ranks - 1) / self._ranks, *tensors)

    def all_gather_single(self, into: torch.Tensor, part: torch.Tensor, options: Any = None) -> Any:
        self._receive(into.chunk(self._ranks), part)
        return self._send(self._ranks - 1, part)

    def reduce_scatter_single(self, into: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Any:
        into.copy_(whole.chunk(self._ranks)[self._rank].view_as(into))
        return self._send((self._ranks - 1) / self._ranks, whole)

    def all_to_all_single(
        self, into: torch.Tensor, whole: torch.Tensor, receives: list[int], sends: list[int], options: Any = None
    ) -> Any:
        parts = list(whole.split(sends or len(whole) // self._ranks))
        own = parts.pop(self._rank)
        self._receive(into.split(receives or len(into) // self._ranks), own)
        return self._send(1, *parts)

    # Names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _receive(self, places: Any, own: torch.Tensor) -> None:
        """Fill each rank's slice [n_r, ...]; a message that is shorter than the slice is repeated."""
        frame, call = sys._getframe(2), list[tuple[Any, int]]()
        while frame is not None and len(call) < _FRAMES:
            call.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        past = self._past[tuple(call)]
        past.append(own.detach().clone())
        for rank, place in enumerate(places):
            theirs = past[-1 - (rank - self._rank) % self._ranks % len(past)]
            for low in range(0, len(place), max(1, len(theirs))):
                some = place[low : low + len(theirs)]
                some.copy_(theirs[: len(some)]) if len(theirs) else place.zero_()

    def _send(self, times: float, *tensors: torch.Tensor) -> Any:
        FakedRanks.messages += 1
        FakedRanks.sent += times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return _BELOW._create_work_from_future(done)


class Operators(TorchDispatchMode):
    """Counts the operators in a `with` block, except views. On a GPU each operator launches one or more kernels."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))
