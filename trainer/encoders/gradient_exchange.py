"""Sums of an encoder's gradients over ranks, sent while the backward pass computes the remaining gradients."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from schemas.sizes import batch_by_size
from trainer.group import Group

_BUCKET_BYTES = 1 << 25


class GradientExchange:
    """Sums gradients of `parameters` over the ranks of `group`: run one or more backward passes, then call `finish`.

    Buckets are filled from the last parameter to the first, in the order of a backward pass. A full bucket is sent as
    soon as the previous bucket has been sent. At the end of the pass, the remaining buckets are sent. Every rank
    therefore sends the same buckets in the same order, whatever part of the batch the rank has.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
        self.group = group
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._expected = [True] * len(self._parameters)  # False: no gradient on any rank last time
        self._buckets: list[list[int]] = []
        self._missing: list[int] = []  # by bucket
        self._sums: list[Callable[[], torch.Tensor]] = []  # each waits for its bucket's sum

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send gradients during the backward pass that the block runs, if any. Raises RankLostError."""
        expected = (n for n in reversed(range(len(self._parameters))) if self._expected[n])
        self._buckets = list(batch_by_size(expected, lambda n: self._parameters[n].nbytes, _BUCKET_BYTES))
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums = []
        hooks = [
            self._parameters[n].register_post_accumulate_grad_hook(functools.partial(self._count_gradient, number))
            for number, bucket in enumerate(self._buckets)
            for n in bucket
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while len(self._sums) < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Replace gradients with their sums; a parameter without a gradient on any rank gets no gradient.

        Raises RankLostError.
        """
        if not self._parameters:
            return
        if not self._sums:  # gradients of several passes are sent now
            with self.sending():
                pass
        flags = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.uint8)
        has_gradient = self.group.max(flags).bool().tolist()
        for bucket, summed in zip(self._buckets, self._sums, strict=True):
            self._unpack(bucket, summed(), has_gradient)
        unexpected = [n for n, expected in enumerate(self._expected) if has_gradient[n] and not expected]
        if unexpected:
            self._unpack(unexpected, self.group.sum(self._pack(unexpected)), has_gradient)
        self._buckets, self._sums, self._expected = [], [], has_gradient

    def _count_gradient(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Count one gradient of bucket `number`, and send the buckets that are complete."""
        self._missing[number] -= 1
        while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
            self._send()

    def _send(self) -> None:
        self._sums.append(self.group.begin_sum(self._pack(self._buckets[len(self._sums)])))

    def _pack(self, numbers: list[int]) -> torch.Tensor:
        """Concatenate gradients, with zeros for missing gradients."""
        some = [self._parameters[n] for n in numbers]
        return torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).view(-1) for each in some])

    def _unpack(self, numbers: list[int], flat: torch.Tensor, has_gradient: list[bool]) -> None:
        parts = flat.split([self._parameters[n].numel() for n in numbers])
        for n, part in zip(numbers, parts, strict=True):
            self._parameters[n].grad = part.view_as(self._parameters[n]) if has_gradient[n] else None
