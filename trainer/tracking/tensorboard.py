"""Tracking with TensorBoard: event files in the run's folder."""

from collections.abc import Mapping
from typing import Any

from trainer.tracking.watchers import RunFacts, Watcher

FOLDER = "tensorboard"


class TensorBoard(Watcher):
    """Writes numbers to RUN/tensorboard."""

    def __init__(self, facts: RunFacts, _: bool = True) -> None:
        self._events = facts.folder / FOLDER
        self._writer: Any = None

    def start(self, step: int, identity: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._events), purge_step=step if step else None)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
