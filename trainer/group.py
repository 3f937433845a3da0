"""Ranks of a run, and the operations between them.

A `Group` of one rank does nothing; `_Joined` calls torch.distributed, and tells a lost rank from other errors.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from schemas.errors import InputError, PeerError, option
from schemas.process import end_with_parent
from schemas.waits import Wait, waiting


class Ranks(NamedTuple):
    """`rank` in [0, `ranks`)."""

    rank: int
    ranks: int


def ranks_of_environment(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return RANK and WORLD_SIZE, as launchers set them; default (0, 1). Raises InputError for impossible values."""
    variables = os.environ if environment is None else environment
    rank, ranks = variables.get("RANK"), variables.get("WORLD_SIZE")
    if rank is None and ranks is None:
        return Ranks(0, 1)
    try:
        position = Ranks(int(rank or ""), int(ranks or ""))
    except ValueError:
        position = Ranks(-1, 0)
    if not 0 <= position.rank < position.ranks:
        raise InputError(
            f"RANK = {rank!r}, WORLD_SIZE = {ranks!r} in the environment: expected both, with 0 <= RANK < WORLD_SIZE. "
            "Launch with torchrun, which sets them, or unset both."
        )
    return position


T = TypeVar("T")

AGENT = "EXTREMIS_AGENT"  # environment variable of a rank: the pid of `trainer.torchrun`
JOIN_SECONDS = 300.0  # maximum time until all ranks have joined
SILENCE_SECONDS = 3600.0  # maximum time that a rank may keep other ranks waiting: for a table, for a large file
GPU_SECONDS = 600.0  # maximum time that a GPU may wait for another GPU within a step; the first step may compile
_POLL_SECONDS = 0.0005
_STOP_SECONDS = 10.0  # the same limit after a request to stop: a launcher sends the request when a rank has ended
_REPORTED = "reported"
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13


class RankLostError(PeerError):
    """Another rank has ended or is unreachable."""


def label_range(labels: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return `rank`'s range [start, stop) of the labels [0, `labels`); the sizes of ranges differ by at most one."""
    return labels * rank // ranks, labels * (rank + 1) // ranks


class Group:
    """Group of one rank: every operation is the identity. `Group.of_environment` returns the launcher's group.

    All ranks call the same operations in the same order, with tensors of the same dtype and device. With several ranks,
    operations raise RankLostError if another rank has ended.
    """

    rank = 0
    ranks = 1

    @staticmethod
    def of_environment() -> "Group":
        """Join the ranks that torchrun launched; ALONE for a single rank. Raises InputError, PeerError."""
        ranks = ranks_of_environment()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _end_with_agent()
        return ALONE if ranks.ranks == 1 else join(ranks)

    @property
    def first(self) -> bool:
        """True on rank 0, which decides, reports, and publishes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` [...] with its sum over ranks, and return `tensor`; all ranks get bitwise equal sums."""
        return tensor

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to replace `tensor` [n] with its sum over ranks; return a function that waits for it and returns it."""
        return lambda: tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` [...] with its maximum over ranks, and return `tensor`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        """Concatenate the tensors [b_r, ...] of all ranks, without gradients; known `sizes` [G] save a message."""
        return tensor

    def all_gather_arrays(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Concatenate each array [n_r, ...] over all ranks in rank order, in one message; n_r may differ by rank."""
        return list(arrays)

    def all_to_all(self, messages: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Send the arrays messages[g], each [n, ...], to rank g; return the arrays that each rank sent to this rank."""
        return [list(message) for message in messages]

    def reduce_scatter(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Sum rows [sum b_r, D] over ranks; return this rank's rows [b_r, D]. `sizes` [G]: b_r of every rank."""
        return tensor

    def all_gather_objects(self, thing: T) -> list[T]:
        """Return the `thing` of every rank, in rank order. Ranks send pickles, so a `thing` should be small."""
        return [thing]

    def broadcast(self, thing: T) -> T:
        """Return rank 0's `thing`."""
        return thing

    def decide(self, action: Callable[[], T]) -> T:
        """Return the result of `action` on rank 0; only rank 0 runs it."""
        return self.broadcast(action() if self.first else None)  # type: ignore[arg-type, return-value]

    def sizes(self, count: int) -> list[int]:
        """Return each rank's `count`, [G]."""
        return [count]

    def before(self, count: int) -> int:
        """Return the sum of `count` over the ranks before this one."""
        return sum(self.sizes(count)[: self.rank])

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""

    def wait_for(self, tensor: torch.Tensor, is_stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Wait until `tensor` has been computed, which may need the work of other ranks. Raises RankLostError at a
        limit.

        A GPU cannot tell a rank that has ended from a slow rank; the limit is shorter after a request to stop.
        """

    def for_another_thread(self) -> "Group":
        """Return a group of the same ranks, with its own order of calls, for another thread; all ranks call this."""
        return self

    def first_to_report(self, status: int) -> int | None:
        """Return None on the first rank that ends early, which reports why; on others the `status` of the first."""
        return None

    def close(self) -> None:
        """End the group; call no operations afterwards."""


ALONE = Group()


def _end_with_agent() -> None:
    """End this rank when torchrun's agent on its machine ends, even by `kill -9`: nobody else stops it then."""
    end_with_parent()
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(os.environ.get(AGENT, os.getppid())), 0)  # it may have ended before the watch began
        except ProcessLookupError:
            raise PeerError("torchrun has ended, which started this rank. Start all ranks again.") from None


def join(ranks: Ranks) -> Group:
    """Join the other ranks at MASTER_ADDR and MASTER_PORT. Raises InputError, PeerError."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    wait, silence = timedelta(seconds=JOIN_SECONDS), timedelta(seconds=SILENCE_SECONDS)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        with Wait(f"all {ranks.ranks} ranks to join at {address}", seconds=JOIN_SECONDS):
            store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.ranks, timeout=wait))
            store.set_timeout(wait)
            meeting = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=meeting, rank=ranks.rank, world_size=ranks.ranks, timeout=silence)
    except ValueError as error:
        raise InputError(
            f"rank {ranks.rank} of {ranks.ranks} cannot find the other ranks: {_line(error)}. Launch with torchrun, "
            "which sets MASTER_ADDR and MASTER_PORT, or unset RANK and WORLD_SIZE."
        ) from error
    except (RuntimeError, OSError) as error:  # torch raises RuntimeErrors
        raise PeerError(
            f"rank {ranks.rank} of {ranks.ranks} did not reach the other ranks within {JOIN_SECONDS:g} seconds: "
            f"{_line(error)}. Check why a rank did not start."
        ) from error
    _limit_gpu_waits(None)
    return _Joined(ranks, dist.PrefixStore("extremis", store), backend, None)


class _Joined(Group):
    """Ranks joined by torch.distributed; `of` is the process group, None for the default group."""

    def __init__(self, ranks: Ranks, store: Any, backend: str, of: Any) -> None:
        self.rank, self.ranks = ranks
        self._store, self._backend, self._of = store, backend, of

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        work = self._call(dist.all_reduce, tensor, dist.ReduceOp.SUM, self._of, True)

        def wait() -> torch.Tensor:
            self._call(work.wait)
            return tensor

        return wait

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: torch.Tensor, how: Any) -> torch.Tensor:
        whole = tensor.contiguous()  # gloo would read a view as contiguous memory
        self._call(dist.all_reduce, whole, how, self._of)
        return tensor if whole is tensor else tensor.copy_(whole)

    def all_gather(self, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        sizes = sizes or self.sizes(len(tensor))
        # gloo gathers only tensors of equal sizes, so shorter tensors are padded.
        longest = max(sizes)
        part = tensor.detach().contiguous()
        if len(part) < longest:
            part = torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])])
        # [G, longest, ...]
        gathered = part.new_empty(self.ranks * longest, *part.shape[1:])
        if longest:
            self._call(_all_gather, gathered, part, self._of)
        if min(sizes) == longest:
            return gathered
        return torch.cat([gathered[r * longest : r * longest + size] for r, size in enumerate(sizes)])

    def all_gather_arrays(self, *arrays: np.ndarray) -> list[np.ndarray]:
        lengths = self.all_gather(torch.tensor([[len(array) for array in arrays]]), [1] * self.ranks).numpy()
        row_bytes = np.array([array.itemsize * int(np.prod(array.shape[1:])) for array in arrays])
        # Bytes of every array of every rank, [G, n], and each array's start within the message of its rank.
        sizes = lengths * row_bytes
        message = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
        totals = sizes.sum(1)
        received = self.all_gather(torch.from_numpy(message), totals.tolist()).numpy()
        starts = (np.cumsum(totals) - totals)[:, None] + np.cumsum(sizes, 1) - sizes
        return [
            np.concatenate([received[low : low + size] for low, size in zip(starts[:, n], sizes[:, n], strict=True)])
            .view(array.dtype)
            .reshape(-1, *array.shape[1:])
            for n, array in enumerate(arrays)
        ]

    def all_to_all(self, messages: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        lengths = torch.tensor([[[len(array) for array in message] for message in messages]])
        # Lengths of the arrays that every rank sends to this rank, [G, n], and the bytes of one row of each array.
        arriving = self.all_gather(lengths, [1] * self.ranks)[:, self.rank].numpy()
        row_bytes = np.array([array.itemsize * int(np.prod(array.shape[1:])) for array in messages[self.rank]])
        sent = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for message in messages for array in message]
        sizes = arriving * row_bytes
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        leaving, message = (lengths[0].numpy() * row_bytes).sum(1), torch.from_numpy(np.concatenate(sent))
        self._call(dist.all_to_all_single, received, message, sizes.sum(1).tolist(), leaving.tolist(), self._of)
        pieces = iter(np.split(received.numpy(), np.cumsum(sizes)[:-1]))
        return [
            [next(pieces).view(array.dtype).reshape(-1, *array.shape[1:]) for array in messages[self.rank]]
            for _ in range(self.ranks)
        ]

    def reduce_scatter(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = tensor.new_empty(self.ranks, sizes[self.rank], *tensor.shape[1:])
        own = [sizes[self.rank]] * self.ranks
        self._call(dist.all_to_all_single, parts.flatten(0, 1), tensor.contiguous(), own, sizes, self._of)
        return parts.sum(0)

    def all_gather_objects(self, thing: T) -> list[T]:
        objects: list[Any] = [None] * self.ranks
        self._call(dist.all_gather_object, objects, thing, self._of)
        return objects

    def broadcast(self, thing: T) -> T:
        holder = [thing]
        self._call(dist.broadcast_object_list, holder, 0, self._of)
        return holder[0]

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def wait_for(self, tensor: torch.Tensor, is_stop_requested: Callable[[], bool] = lambda: False) -> None:
        if tensor.device.type == "cuda":
            made = torch.cuda.Event()
            made.record()
            self._wait_until(made.query, is_stop_requested)

    def _wait_until(self, is_done: Callable[[], bool], is_stop_requested: Callable[[], bool]) -> None:
        began, seconds = time.monotonic(), GPU_SECONDS
        for _ in waiting("the other ranks in a step", seconds=GPU_SECONDS, every=_POLL_SECONDS):
            if is_done():
                return
            waited = time.monotonic() - began
            if is_stop_requested():
                seconds = min(seconds, waited + _STOP_SECONDS)
            if waited >= seconds:
                break
        raise RankLostError(
            f"rank {self.rank} of {self.ranks}: the GPU has waited {time.monotonic() - began:.0f} seconds for another "
            "rank, which has ended or is stuck. The messages of that rank are above, or in its own output. Continue "
            f"with {option('resume', True)}, on any number of ranks."
        )

    def for_another_thread(self) -> Group:
        of = self._call(dist.new_group, None, timedelta(seconds=SILENCE_SECONDS), self._backend)
        _limit_gpu_waits(of)
        return _Joined(Ranks(self.rank, self.ranks), self._store, self._backend, of)

    def first_to_report(self, status: int) -> int | None:
        try:
            first = self._store.compare_set(_REPORTED, "", f"{self.rank} {status}").decode()
        except RuntimeError:  # the rank that runs the store has ended
            return None
        rank, _, status_of_first = first.partition(" ")
        return None if rank == str(self.rank) else int(status_of_first)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(self._of)

    def sizes(self, count: int) -> list[int]:
        counts: list[int] = self.all_gather(torch.tensor([count]), [1] * self.ranks).tolist()
        return counts

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of an operation of torch.distributed. Raises RankLostError in place of torch's errors."""
        try:
            with Wait("the other ranks", seconds=SILENCE_SECONDS):
                return operation(*arguments)
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.ranks} lost another rank, which was killed or cannot be reached "
                f"({_line(error)}). The messages of that rank are above, or in its own output. Continue with "
                f"{option('resume', True)}, on any number of ranks."
            ) from error


def _limit_gpu_waits(of: Any) -> None:
    """Make nccl end a process whose GPU waits longer than `wait_for`; gloo keeps its own limit."""
    if torch.cuda.is_available():
        group: Any = of or dist.group.WORLD
        nccl = group._get_backend(torch.device("cuda"))
        if hasattr(nccl, "_set_default_timeout"):
            nccl._set_default_timeout(timedelta(seconds=GPU_SECONDS + _STOP_SECONDS))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
