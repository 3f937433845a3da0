"""One optimizer step on all ranks: encode the parts, score the whole batch against each rank's labels, update.

The encoder is data-parallel: a rank encodes its part of the batch, and sends its embeddings x to every rank. The head
is model-parallel: a rank scores the global batch x [B, D] against its own labels. The gradients on x are summed over
the ranks, and a rank back-propagates those of its part. `GlobalBatches` gathers and plans batches ahead of their steps.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from trainer.device import send
from trainer.group import ALONE, Group
from trainer.heads import BeforeChange, HeadStep, QueryEmbeddings
from trainer.model import Model
from trainer.negatives.base import NegativeSources, Sampled
from trainer.negatives.planner import GlobalBatch, Planner
from trainer.second_loss import SecondLoss
from trainer.stream import Batch, JoinedStream
from trainer.stream.batch import Candidates

_BATCHES_AHEAD = 1  # batches gathered beyond the batches that threads plan
# Looks at the global batch, x [B, D] and the sampled negatives of the batch, before any parameter changes.
StepHook = Callable[[Batch, torch.Tensor, list[Sampled]], None]


@dataclass
class Clock:
    """Seconds spent on each activity since `restart`."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        self.seconds, self._last = {}, time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        time_now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + time_now - self._last
        self._last = time_now


@dataclass(frozen=True)
class StepContext:
    """What all steps of a run share; `clip` limits the norm of an encoder's gradients (0: no limit)."""

    model: Model
    planner: Planner
    queries: QueryEmbeddings
    group: Group = ALONE
    negative_sources: NegativeSources = field(default_factory=NegativeSources)
    clock: Clock = field(default_factory=Clock)
    before_change: BeforeChange = lambda candidates, merged_ids: None
    clip: float = 0.0
    second_loss: SecondLoss | None = None


@dataclass(frozen=True)
class StepResult:
    """Result of `step` of the epoch, the same on every rank: loss (float64 tensor []), row ids [B], x [B, D]."""

    step: int
    loss: torch.Tensor
    rows: np.ndarray
    x: torch.Tensor


def take_step(
    context: StepContext,
    batch: Batch | GlobalBatch,
    number: int,
    factor: float,
    hook: StepHook | None = None,
    update: bool = True,
) -> StepResult:
    """Train on a global batch at step `number` of the run; `batch` is the global batch or this rank's part of it.

    `factor` scales every learning rate. Without `update`, the head updates its rows, but the encoders only keep their
    gradients, without a sum over ranks. Raises RankLostError, or a StorageError of a checkpoint.
    """
    model, group, clock = context.model, context.group, context.clock
    global_batch = context.planner.gather(batch, group) if isinstance(batch, Batch) else batch
    clock.lap("gather")
    gathered, sizes = global_batch.gathered, global_batch.sizes
    first = sum(sizes[: group.rank])  # this rank's part is rows [first, first + b) of the global batch
    part = context.queries.embed(global_batch.local, first)
    clock.lap("encode")
    x = group.all_gather(model.head.extend(part), sizes)  # with a column of ones if the vectors have a bias
    clock.lap("gather")
    sampled = context.negative_sources.find(gathered, x)
    if sampled:
        clock.lap("search")
    if hook is not None:
        hook(gathered, x, sampled)
        clock.lap("look")
    step = HeadStep(gathered, x, sampled, context.planner, number, factor, context.before_change)
    loss, on_x = model.head.learn(step)  # of this rank's labels; on_x is the gradient on x
    if context.second_loss is not None:
        own = slice(first, first + len(part)), slice(part.shape[1])  # without the column of ones
        second, gradient = context.second_loss.learn(global_batch.local, x[own], len(x))
        loss = loss + second
        on_x[own] += gradient
    clock.lap("classify")
    result = StepResult(gathered.step, group.sum(loss).double(), gathered.rows, x)
    if context.queries.trains:
        gradient = group.reduce_scatter(on_x, sizes)[:, : part.shape[1]]
        clock.lap("gather")
        context.queries.backward(gradient)
        model.head.backward()
        if update:
            for encoder in model.encoders.values():
                encoder.reduce(group)
                encoder.update(factor, context.clip)
            model.head.drop_cached_vectors()
            clock.lap("update")
    return result


@dataclass(frozen=True)
class GlobalBatches:
    """The global batches of an epoch of `stream`.

    With several ranks, a thread of each rank gathers batches ahead of the steps, over its own `group`, so that its
    messages do not mix with those of the steps; if `plans`, `threads` more threads plan the batches. With 0 threads, or
    one rank (whose stream plans), the caller's thread does all work. A caller that does not iterate to the end must
    close the iterator after the same step on every rank. `is_stop_requested`: whether this rank has been asked to stop;
    the next gathered batch informs the other ranks.
    """

    stream: JoinedStream
    planner: Planner
    group: Group
    threads: int = 1
    plans: bool = False
    is_stop_requested: Callable[[], bool] = lambda: False

    def __iter__(self) -> Generator[GlobalBatch, None, None]:
        if self.threads and self.group.ranks > 1:
            yield from self._gather_ahead()
        else:
            for part in self.stream:
                yield self.planner.gather(part, self.group, self.is_stop_requested())

    def _gather_ahead(self) -> Generator[GlobalBatch, None, None]:
        # Leaving the pools finishes what they have begun: other ranks may be waiting for this rank's batch.
        with (
            contextlib.closing(iter(self.stream)) as parts,
            ThreadPoolExecutor(self.threads, thread_name_prefix="extremis-plan") as planners,
            ThreadPoolExecutor(1, thread_name_prefix="extremis-gather") as gatherer,
        ):

            def gather_next() -> Future[GlobalBatch] | None:
                part = next(parts, None)
                if part is None:
                    return None
                gathered = self.planner.gather(part, self.group, self.is_stop_requested())
                return planners.submit(self._plan, gathered)

            pending = deque(gatherer.submit(gather_next) for _ in range(self.threads + _BATCHES_AHEAD))
            while (planned := pending.popleft().result()) is not None:
                pending.append(gatherer.submit(gather_next))
                yield planned.result()

    def _plan(self, batch: GlobalBatch) -> GlobalBatch:
        if not self.plans:
            return batch
        return replace(batch, gathered=replace(batch.gathered, candidates=self.planner(batch.gathered)))


def plan_for_device(
    plan: Callable[[Batch], Candidates | None], device: torch.device, batch: Batch
) -> Candidates | None:
    """Plan a batch, and send the labels to `device` if the device merges them; threads call this ahead of the step."""
    candidates = plan(batch)
    if candidates is None or candidates.drawn is None:
        return candidates
    return candidates._replace(drawn=send(candidates.drawn, device))
