"""Where a step's hard negatives come from, beside the joined table or the trainer's own index: one class a source.

A source finds labels for a batch with the model as it is at the step. It has state only where it keeps something that
the classifier has moved away from since.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from schemas.ragged import Ragged
from schemas.tables import PAD
from trainer.config import Negatives
from trainer.negatives.lsh import LshSampler, Options, Rows
from trainer.stream.batch import Batch

State = dict[str, np.ndarray]


class NegativeSource(Protocol):
    """Labels of a rank are counted from its first. Positives, and labels that others find too, are left out later."""

    name: str

    def find(self, batch: Batch, x: np.ndarray, rows: Rows) -> np.ndarray:
        """Hard negatives [B, k] of the batch, -1 pads; x [B, D] its embeddings, `rows` the classifier's vectors."""

    def start(self, rows: Rows) -> None:
        """Before the first step with it, unless `load` brings what there was."""

    def touch(self, ids: np.ndarray) -> None:
        """Rows `ids` [C], each once, were updated."""

    def after_step(self, rows: Rows, global_step: int, epoch: int, step: int) -> None:
        """`step` of `epoch` was number `global_step` of the run, which counts from 1."""

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...


class InBatch:
    """Positives of the other queries of the batch: the `count` with the highest scores.

    NGAME, Algorithm 1, step 8, takes those within a radius, which on the unit sphere is a lower bound of the score.
    """

    name = "in-batch"

    def __init__(self, count: int) -> None:
        self._count = count

    def find(self, batch: Batch, x: np.ndarray, rows: Rows) -> np.ndarray:
        labels = np.unique(batch.positives).astype(np.int64)
        if not len(labels):
            return np.full((len(batch), 0), PAD, np.int64)
        scores = x @ rows(labels).T
        place = np.searchsorted(labels, batch.positives)
        scores[np.repeat(np.arange(len(batch)), np.diff(batch.positive_offsets)), place] = -np.inf
        count = min(self._count, len(labels))
        best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        return np.where(np.isfinite(np.take_along_axis(scores, best, 1)), labels[best], PAD)

    def start(self, rows: Rows) -> None:
        pass

    def touch(self, ids: np.ndarray) -> None:
        pass

    def after_step(self, rows: Rows, global_step: int, epoch: int, step: int) -> None:
        pass

    def state(self) -> State:
        return {}

    def load(self, state: State) -> None:
        pass


class Hashed:
    """Labels in the buckets of the query (LNS, Algorithm 1)."""

    name = "lsh"

    def __init__(self, sampler: LshSampler) -> None:
        self._sampler = sampler

    def find(self, batch: Batch, x: np.ndarray, rows: Rows) -> np.ndarray:
        positives = Ragged(batch.positives, batch.positive_offsets)
        return self._sampler.sample(x, positives, epoch=batch.epoch, step=batch.step).padded()

    def start(self, rows: Rows) -> None:
        self._sampler.build(rows)

    def touch(self, ids: np.ndarray) -> None:
        self._sampler.touch(ids)

    def after_step(self, rows: Rows, global_step: int, epoch: int, step: int) -> None:
        self._sampler.after_step(rows, global_step, epoch=epoch, step=step)

    def state(self) -> State:
        return self._sampler.state()

    def load(self, state: State) -> None:
        self._sampler.load(state)


# One entry a source: what makes it of the recipe's section, or None where it gives nothing. (options, labels, D, seed)
Maker = Callable[[Negatives, int, int, int], NegativeSource | None]


def _in_batch(options: Negatives, labels: int, dimension: int, seed: int) -> NegativeSource | None:
    return InBatch(options.in_batch) if options.in_batch else None


def _hashed(options: Negatives, labels: int, dimension: int, seed: int) -> NegativeSource | None:
    lsh = options.lsh
    chosen = Options(most=lsh.hard, **lsh.model_dump(exclude={"hard"}))
    return Hashed(LshSampler(chosen, labels, dimension, seed)) if lsh.hard else None


MAKERS: tuple[Maker, ...] = (_in_batch, _hashed)


class Sources:
    """All sources of a recipe together: what they find, laid side by side. `rows` reads the classifier's vectors."""

    def __init__(self, sources: Sequence[NegativeSource], rows: Rows, first_epoch: int = 0) -> None:
        self._sources, self._rows, self._first_epoch = sources, rows, first_epoch
        self._started = False

    @classmethod
    def of(cls, options: Negatives, rows: Rows, labels: int, dimension: int, seed: int) -> "Sources | None":
        """Those that `options` ask for, over `labels` vectors [D]; None where there are none."""
        made = [maker(options, labels, dimension, seed) for maker in MAKERS]
        sources = [source for source in made if source is not None]
        return cls(sources, rows, options.start) if sources else None

    @property
    def stateful(self) -> bool:
        """Whether a resumed run needs more than the classifier to go on with the same negatives."""
        return any(not isinstance(source, InBatch) for source in self._sources)

    def finder(self, epoch: int, x: np.ndarray) -> Callable[[Batch], np.ndarray] | None:
        """What finds [B, sum of k] hard negatives, -1 pads, for a batch with embeddings x [B, D]; None too early."""
        if epoch < self._first_epoch:
            return None
        for source in () if self._started else self._sources:
            source.start(self._rows)
        self._started = True
        return lambda batch: np.concatenate([s.find(batch, x, self._rows) for s in self._sources], axis=1)

    def touch(self, ids: np.ndarray) -> None:
        """Rows `ids` [C], each once, were updated."""
        for source in self._sources if self._started else ():
            source.touch(ids)

    def after_step(self, global_step: int, epoch: int, step: int) -> None:
        """`step` of `epoch` was number `global_step` of the run, which counts from 1."""
        for source in self._sources if self._started else ():
            source.after_step(self._rows, global_step, epoch, step)

    def state(self) -> State:
        """Of every source by its name; nothing before the first of them was asked."""
        if not self._started:
            return {}
        return {f"{s.name}.{name}": array for s in self._sources for name, array in s.state().items()}

    def load(self, state: State) -> None:
        """Go on from a `state`. Raises ValueError where it is that of other sources."""
        self._started = bool(state)
        for source in self._sources if state else ():
            prefix = f"{source.name}."
            source.load({name.removeprefix(prefix): a for name, a in state.items() if name.startswith(prefix)})
