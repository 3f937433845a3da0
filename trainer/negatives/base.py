"""Sources of negatives: labels that a query is scored against in addition to its positives and random negatives."""

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
# Values of a recipe's `refresh.index` for indexes that only the trainer has.
FRESH = "fresh"  # no index: every label is scored with its present vector
MOST_FRESH = 1 << 17  # labels per rank up to which `auto` means FRESH
MIPS = "mips"  # K = sqrt(L) clusters of spherical k-means; a search visits tau = 64 clusters (MIPS-s, 4 and 5.1)


class Sampled(NamedTuple):
    """Label ids for the global batch: a matrix [B, k] in [0, L), padded with -1, or ragged rows of a rank's own labels.

    `ranked`: the labels of each row are sorted, best first, without repetitions or positives, and each step draws
    `negatives.hard` of the columns. If the labels are not ranked, every label is used unless the query already has it.
    A tensor stays on its device; its labels must be ranked, and the run must have no other source.
    """

    ids: np.ndarray | Ragged | torch.Tensor
    ranked: bool = False


class LabelVectors(Protocol):
    """Vectors [n, D] of a rank's labels [start, stop)."""

    start: int
    stop: int

    @property
    def vectors(self) -> torch.Tensor: ...

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return a float32 copy [n, D] of the vectors of `rows` [n], counted from `start`."""


@dataclass(frozen=True)
class SourceContext:
    """Arguments for opening a source; `on_device`: its labels may stay on the vectors' device, which merges them."""

    vectors: LabelVectors
    group: Group
    seed: int = 0
    on_device: bool = False


class NegativeSource(ABC):
    """A source of negatives; without state it overrides only `find`. A new one needs a section, named in astra.py."""

    name: ClassVar[str]
    stateful: ClassVar[bool] = False  # True: a resumed run needs the source's `state`, which one rank saves
    first_epoch: int = 0  # first epoch of use

    @abstractmethod
    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled | None:
        """Return negatives for the global batch with x [B, D]: a rank's own labels, or the same labels on all ranks."""

    def touch(self, rows: np.ndarray) -> None:  # noqa: B027
        """Record an update of the vectors of the distinct `rows` [C], counted from the rank's first row."""

    def after_step(self, global_step: int, epoch: int, step: int) -> None:  # noqa: B027
        """React to the end of a step: `step` of `epoch`, or `global_step` of the run, counted from 1."""

    def before_checkpoint(self) -> None:  # noqa: B027
        """Drop state that a run resumed from the checkpoint would not have."""

    def state(self) -> State:
        """Return the state for a resumed run: arrays by name, not copied; empty before the first use."""
        return {}

    def load(self, state: State) -> None:  # noqa: B027
        """Continue from a `state`. Raises ValueError if the state belongs to different options."""

    def figures(self) -> dict[str, float]:
        """Return measurements of the last step for the run's record."""
        return {}


class SourceSection(Options):
    """Options of one source: a subsection of the section `negatives` in a recipe."""

    hard: int | Literal["all"] = 0  # maximum number of labels per query; 0: the source is not used; "all": no maximum

    @property
    def most(self) -> int:
        """Maximum number of labels per query."""
        assert self.hard != "all"
        return self.hard

    def open(self, context: SourceContext) -> NegativeSource:
        """Build the source."""
        raise NotImplementedError


def used_sections(options: Options) -> list[SourceSection]:
    """Return the sections in `options` whose sources are used."""
    sections = (getattr(options, name) for name in type(options).model_fields)
    return [section for section in sections if isinstance(section, SourceSection) and section.hard]


class NegativeSources(list[NegativeSource]):
    """All sources of a run that need embeddings."""

    def find(self, batch: Batch, x: torch.Tensor) -> list[Sampled]:
        """Return the labels that each source in use at the batch's epoch finds for the batch; x [B, D]."""
        serving = (source for source in self if batch.epoch >= source.first_epoch)
        return [sampled for source in serving if (sampled := source.find(batch, x)) is not None]

    def figures(self) -> dict[str, float]:
        return {name: value for source in self for name, value in source.figures().items()}

    def state(self) -> State:
        """Return the states of all sources, as `source.array`."""
        return {f"{s.name}.{name}": array for s in self for name, array in s.state().items()}

    def load(self, state: State) -> None:
        """Continue from a `state`. Raises ValueError if the state belongs to different sources."""
        for source in self:
            prefix = f"{source.name}."
            own = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
            if own:
                source.load(own)
