"""Global batches: the parts that all ranks have of a batch, gathered and planned ahead of the steps on them."""

import contextlib
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from trainer.group import Group
from trainer.negatives.planner import Planner
from trainer.stream import Batch, JoinedStream

_BATCHES_AHEAD = 1  # beyond those that threads plan


@dataclass(frozen=True)
class GlobalBatch:
    """A batch of all ranks: `part` is this rank's rows of it, `sizes` [G] are the rows of each rank's.

    `whole` has the row ids, positives and hard negatives of all parts, and candidates where it is planned already.
    """

    part: Batch
    whole: Batch
    sizes: list[int]


def gather_batch(part: Batch, planner: Planner, group: Group) -> GlobalBatch:
    """Gather the batch of which `part` is this rank's. Raises RankLostError."""
    return GlobalBatch(part, planner.gather(part, group), group.sizes(len(part)))


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of `stream` on all ranks of `group`.

    Of several ranks each has a thread that gathers them, over a group of its own, ahead of the steps, and `threads`
    that plan them where `plans`; with 0 threads all is done in line. Whoever does not iterate to the end closes the
    iterator after the same step on every rank.
    """

    stream: JoinedStream
    planner: Planner
    group: Group
    threads: int = 1
    plans: bool = False

    def __iter__(self) -> Generator[GlobalBatch, None, None]:
        if self.threads and self.group.ranks > 1:
            yield from self._prefetch()
        else:
            for part in self.stream:
                yield gather_batch(part, self.planner, self.group)

    def _prefetch(self) -> Generator[GlobalBatch, None, None]:
        # What is handed out is done even where the iterator is closed: other ranks may be waiting in it.
        with (
            contextlib.closing(iter(self.stream)) as parts,
            ThreadPoolExecutor(self.threads, thread_name_prefix="extremis-plan") as planners,
            ThreadPoolExecutor(1, thread_name_prefix="extremis-gather") as gatherer,
        ):

            def gather_next() -> Future[GlobalBatch] | None:
                part = next(parts, None)
                if part is None:
                    return None
                return planners.submit(self._plan, gather_batch(part, self.planner, self.group))

            pending = deque(gatherer.submit(gather_next) for _ in range(self.threads + _BATCHES_AHEAD))
            while (planned := pending.popleft().result()) is not None:
                pending.append(gatherer.submit(gather_next))
                yield planned.result()

    def _plan(self, batch: GlobalBatch) -> GlobalBatch:
        if not self.plans:
            return batch
        return replace(batch, whole=replace(batch.whole, candidates=self.planner(batch.whole)))
