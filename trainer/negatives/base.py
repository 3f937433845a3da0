"""Sources of negatives: labels that a query is scored against besides its positives and the random ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from schemas.options import Options

if TYPE_CHECKING:
    import numpy as np
    import torch

    from schemas.ragged import Ragged
    from trainer.group import Group
    from trainer.stream.batch import Batch

State = dict[str, Any]  # arrays by name
# Indexes that only the trainer has, by their names in a recipe's `refresh.index`.
FRESH = "fresh"  # none: every label is scored by its vector as it is
MOST_FRESH = 1 << 17  # labels of a rank up to which `auto` means that
MIPS = "mips"  # K = sqrt(L) clusters of spherical k-means, of which tau = 64 are searched (MIPS-s, sections 4 and 5.1)


class Sampled(NamedTuple):
    """Labels [B, k] of the global batch, ids of [0, L) with -1 pads; or rows of a rank's own labels.

    `ranked`: each row is best first, without repetitions and positives; `negatives.hard` of its columns are drawn for
    each step. Otherwise all count, except known labels. A tensor stays on its device: it must be ranked, and the only
    source.
    """

    ids: np.ndarray | Ragged | torch.Tensor
    ranked: bool = False


class Vectors(Protocol):
    """Vectors [n, D] of a rank's labels [start, stop)."""

    start: int
    stop: int

    @property
    def vectors(self) -> torch.Tensor: ...

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Copy `rows` [n], counted from `start`, as float32 [n, D]."""


@dataclass(frozen=True)
class SourceContext:
    """Facts that a source is opened with.

    `on_device`: its labels may stay on the vectors' device, which merges the labels of a batch.
    """

    vectors: Vectors
    group: Group
    seed: int = 0
    on_device: bool = False


class NegativeSource(ABC):
    """A source of negatives. A source without state overrides only `find`.

    A new source is a file with its section and its class, and an entry in trainer/methods/astra.py.
    """

    name: ClassVar[str]
    stateful: ClassVar[bool] = False  # True: a resumed run needs its `state`, which one rank saves
    first_epoch: int = 0  # that it serves

    @abstractmethod
    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled | None:
        """Return negatives of the global batch with embeddings x [B, D], or None.

        On several ranks each returns labels of its own range, or all the same labels.
        """

    def touch(self, rows: np.ndarray) -> None:  # noqa: B027
        """Note that vectors `rows` [C], counted from the rank's first, each once, are updated."""

    def after_step(self, global_step: int, epoch: int, step: int) -> None:  # noqa: B027
        """Follow `step` of `epoch`, which was number `global_step` of the run, counted from 1."""

    def before_checkpoint(self) -> None:  # noqa: B027
        """Drop state that a run resumed from the checkpoint will not have."""

    def state(self) -> State:
        """Return the state for a resumed run, as arrays by name, not copied; empty before the first use."""
        return {}

    def load(self, state: State) -> None:  # noqa: B027
        """Go on from a `state`. Raises ValueError if it is of other options."""

    def figures(self) -> dict[str, float]:
        """Return figures about the last step for the run's record."""
        return {}


class SourceSection(Options):
    """Options of one source, a table of a recipe's section `negatives`."""

    hard: int | Literal["all"] = 0  # labels a query, at most; 0: the source is not used; "all": all that it finds

    @property
    def most(self) -> int:
        """Labels that a query gets at most."""
        assert self.hard != "all"
        return self.hard

    def open(self, context: SourceContext) -> NegativeSource:
        """Build the source."""
        raise NotImplementedError


def used_sections(options: Options) -> list[SourceSection]:
    """Return the sections of sources among `options`, without unused ones."""
    sections = (getattr(options, name) for name in type(options).model_fields)
    return [section for section in sections if isinstance(section, SourceSection) and section.hard]


class NegativeSources(list[NegativeSource]):
    """All sources of a run that need embeddings."""

    def find(self, batch: Batch, x: torch.Tensor) -> list[Sampled]:
        """Return what each source that serves the batch's epoch finds for it; x [B, D]."""
        serving = (source for source in self if batch.epoch >= source.first_epoch)
        return [sampled for source in serving if (sampled := source.find(batch, x)) is not None]

    def figures(self) -> dict[str, float]:
        """Return figures of all sources about the last step."""
        return {name: value for source in self for name, value in source.figures().items()}

    def state(self) -> State:
        """Return the state of every source by its name; empty before the first use."""
        return {f"{s.name}.{name}": array for s in self for name, array in s.state().items()}

    def load(self, state: State) -> None:
        """Go on from a `state`. Raises ValueError if it is of other sources."""
        for source in self:
            prefix = f"{source.name}."
            own = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
            if own:
                source.load(own)
