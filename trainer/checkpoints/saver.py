"""Saving and loading all that a run goes on from: model, negatives' sources, progress, the stream's place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from trainer.checkpoints.checkpoint import Checkpoint
from trainer.checkpoints.writer import CheckpointWriter, Contents, Tensors

NEGATIVES = "negatives"  # the part with the state of sources of negatives


class SavedModel(Protocol):
    """A model as a checkpoint sees it."""

    @property
    def head(self) -> Any: ...

    def parts(self) -> Mapping[str, Tensors]: ...

    def load_to_train(self, checkpoint: Checkpoint) -> None: ...


class SavedSources(Protocol):
    """Sources of negatives as a checkpoint sees them."""

    def state(self) -> dict[str, np.ndarray]: ...

    def load(self, state: dict[str, np.ndarray]) -> None: ...

    def before_checkpoint(self) -> None: ...


@dataclass(frozen=True)
class Saver:
    """Saves a run through `writer`; `digest` is that of its data, `labels` L."""

    writer: CheckpointWriter
    model: SavedModel
    sources: SavedSources
    digest: str
    labels: int

    def save(self, state: Mapping[str, Any], best: int | None) -> None:
        """Begin to write a checkpoint with `state`; that of step `best` outlives newer ones. Raises StorageError."""
        self.sources.before_checkpoint()
        self.writer.save(
            Contents(
                step=state["progress"]["global_step"],
                parts={**self.model.parts(), **self._sources_part()},
                rows=self.model.head.rows(),
                first=self.model.head.start,
                labels=self.labels,
                state=state,
                parents={"data": self.digest},
                best=best,
            )
        )

    def load(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Go on from a checkpoint; returns its state. Raises TableError."""
        self.model.load_to_train(checkpoint)
        if checkpoint.has(NEGATIVES):
            self.sources.load({name: value.numpy() for name, value in checkpoint.tensors(NEGATIVES).items()})
        return checkpoint.state

    def _sources_part(self) -> dict[str, Tensors]:
        """Return the sources' state as a part of the checkpoint; none without state."""
        state = self.sources.state()
        return {NEGATIVES: {name: torch.from_numpy(array) for name, array in state.items()}} if state else {}
