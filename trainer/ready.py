"""Batches made ready for a step while the step before is done: read, planned over all ranks, and looked up."""

import contextlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from trainer.candidates import Planner
from trainer.encoders import Encoder
from trainer.group import Group
from trainer.stream import Batch, JoinedStream


@dataclass(frozen=True)
class Ready:
    """This rank's `batch`, what its encoder needs of it, and `everyone`: the global batch with this rank's candidates.

    `everyone` is without inputs where there are other ranks.
    """

    batch: Batch
    everyone: Batch
    inputs: Any


def ready_batches(
    stream: JoinedStream, planner: Planner, encoder: Encoder, group: Group
) -> Generator[Ready, None, None]:
    """The rest of the stream's epoch, one batch ahead. `group` is used by the thread that works ahead, and by no other.

    All ranks ask for as many. Raises what the stream raises; RankLostError.
    """
    batches = iter(stream)

    def following() -> Ready | None:
        batch = next(batches, None)
        if batch is None:
            return None
        everyone = planner.gather(batch, group)
        if everyone.candidates is None:
            everyone = replace(everyone, candidates=planner(everyone))
        return Ready(batch, everyone, encoder.prepare(batch.inputs, (batch.epoch, batch.step), group.before))

    with contextlib.closing(batches), ThreadPoolExecutor(1, thread_name_prefix="extremis-ready") as ahead:  # type: ignore[type-var]
        # Every rank asks for the next before it does this one, so whoever ends here leaves no other one waiting.
        coming = ahead.submit(following)
        while (ready := coming.result()) is not None:
            coming = ahead.submit(following)
            yield ready
