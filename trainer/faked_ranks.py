"""One rank of several whose peers are faked: their messages have the right sizes, and what this rank sends is counted.

A peer's message is what this rank itself sent at the same place some calls before, so that ids, lengths and pads are
as in a real run. It stands below torch.distributed: every operation of `Group` is its own.
"""

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.group import Group, _Joined
from trainer.stream.processes import Ranks

T = TypeVar("T")
_BELOW: Any = _distributed_c10d  # which its types leave out
_ProcessGroup: Any = dist.ProcessGroup  # its signatures are overloads of C++
_BACKEND = "extremis_faked"
_FRAMES = 12  # of the stack, which tell one place from another


@dataclass
class Traffic:
    """Bytes that a rank has sent, a ring's sums and gathers, and its messages."""

    sent: float = 0.0
    messages: int = 0


class FakedRanks(_Joined):
    """Rank `rank` of `ranks`, with what rank 0 alone decides and publishes besides; `traffic` is that of all threads.

    A process has one at a time, until `close`.
    """

    def __init__(self, rank: int, ranks: int, of: Any = None, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        if of is None:
            if not hasattr(dist.Backend, _BACKEND.upper()):
                dist.Backend.register_backend(_BACKEND, _Peers.create, devices=["cpu", "cuda"])
            dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=rank, world_size=ranks)
        super().__init__(Ranks(rank, ranks), None, _BACKEND, of)
        group: Any = of or dist.group.WORLD
        group.traffic = self.traffic

    @property
    def first(self) -> bool:
        return True

    def gather_objects(self, thing: T) -> list[T]:
        return [thing]

    def broadcast(self, thing: T) -> T:
        return thing

    def for_another_thread(self) -> Group:
        return FakedRanks(self.rank, self.ranks, dist.new_group(backend=_BACKEND), self.traffic)

    def first_to_report(self) -> bool:
        return True


class _Peers(_ProcessGroup):
    """Process group of one process; sums are those of its own numbers."""

    traffic: Traffic

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._rank, self._ranks = rank, ranks
        self._past: dict[tuple, deque[torch.Tensor]] = {}

    @staticmethod
    def create(store: Any, rank: int, ranks: int, timeout: Any) -> "_Peers":
        return _Peers(rank, ranks)

    def size(self) -> int:
        return self._ranks

    def getBackendName(self) -> str:
        return _BACKEND

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._sent(2 * (self._ranks - 1) / self._ranks * _bytes(tensors))

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._sent(_bytes(tensors))

    def barrier(self, options: Any = None) -> Any:
        return self._sent(0)

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, options: Any = None) -> Any:
        self._receive(list(output.chunk(self._ranks)), part)
        return self._sent((self._ranks - 1) * _bytes([part]))

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Any:
        output.copy_(whole.chunk(self._ranks)[self._rank].view_as(output))
        return self._sent((self._ranks - 1) / self._ranks * _bytes([whole]))

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, receive: list[int], send: list[int], options: Any = None
    ) -> Any:
        parts = whole.split(send or len(whole) // self._ranks)
        self._receive(list(output.split(receive or len(output) // self._ranks)), parts[self._rank])
        return self._sent(_bytes([whole]) - _bytes([parts[self._rank]]))

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _receive(self, places: list[torch.Tensor], own: torch.Tensor) -> None:
        """Fill each rank's place [n_r, ...]; what is longer than the message repeats it."""
        past = self._past.setdefault(_place_of_call(), deque(maxlen=self._ranks))
        past.append(own.detach().clone())
        for rank, place in enumerate(places):
            theirs = past[-1 - (rank - self._rank) % self._ranks % len(past)]
            for low in range(0, len(place), max(1, len(theirs))):
                some = place[low : low + len(theirs)]
                some.copy_(theirs[: len(some)]) if len(theirs) else some.zero_()

    def _sent(self, size: float) -> Any:
        self.traffic.sent += size
        self.traffic.messages += 1
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return _BELOW._create_work_from_future(done)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _place_of_call() -> tuple:
    frame, places = sys._getframe(2), list[tuple[Any, int]]()
    while frame is not None and len(places) < _FRAMES:
        places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(places)


class Operators(TorchDispatchMode):
    """Counts the operators at work while it is entered, but for views: on a GPU each launches a kernel, or several."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))
