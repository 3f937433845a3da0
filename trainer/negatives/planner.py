"""Plans of batches: the labels that each query is scored against (ASTRA, Algorithm 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from schemas import PAD
from trainer.group import Group
from trainer.inputs import Inputs
from trainer.negatives.base import JoinedTable, NegativeSource, Sampled, ids_within, within
from trainer.negatives.candidates import (
    draw_positives,
    drawn_labels,
    every_query_with,
    join_hard,
    label_range,
    labels_of,
    own_pool,
    shared_pool,
)
from trainer.negatives.draws import RandomPool, draw_hard
from trainer.stream.batch import Batch, Candidates
from trainer.stream.transfer import send


class Options(Protocol):
    """What a method says of its negatives (trainer.methods.recipe:Labels)."""

    @property
    def by_frequency(self) -> float: ...

    def columns(self, planner: "Planner", epoch: int) -> int: ...

    def candidates(self, planner: "Planner", batch: Batch, sampled: list[Sampled]) -> Candidates | None: ...

    def chunks(self, planner: "Planner", batch: Batch) -> Iterator[Candidates]: ...


@dataclass(frozen=True, eq=False)
class Planner:
    """Plan of a batch's candidates as a method's `options` say: a pure function of the batch, so any thread may run it.

    `labels`: L. `positive_weight` [L] float32, where given, weights the positives. A rank that holds the labels
    [start, stop), `part`, plans those of the global batch: its candidates are the part of one process's that lies
    there, with ids that count from start. Without a `part` there is one rank, which holds all. `mixtures`: k_h and k_r
    of each epoch, where they change. `frequency` [L]: the training points of each label, where draws go by it.
    `sources`: those that need no embeddings. `positives`: of each query that a step learns where it takes the labels of
    the batch, 0 for all. `retired` [L] bool: labels that are no random negatives. `merges`: False where a device merges
    the labels of own pools itself.
    """

    options: Options
    labels: int
    seed: int = 0
    positive_weight: np.ndarray | None = None
    part: tuple[int, int] | None = None
    mixtures: tuple[tuple[int, int], ...] = ()
    frequency: np.ndarray | None = None
    sources: tuple[NegativeSource, ...] = (JoinedTable(),)
    positives: int = 0
    retired: np.ndarray | None = None
    merges: bool = True

    def __call__(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> Candidates | None:
        """Return one set of candidates; None for a method whose chunks of all labels `chunks` gives.

        `sampled` comes from sources that need embeddings; a label is among a query's once.
        """
        return self.options.candidates(self, batch, self._sampled(batch, sampled))

    def chunks(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> Iterator[Candidates]:
        """Yield what a step goes through: the batch's candidates, or one chunk of labels after the other."""
        candidates = batch.candidates or self(batch, sampled)
        if candidates is not None:
            yield candidates
            return
        yield from self.options.chunks(self, self._own(batch))

    def draw(self, batch: Batch, count: int, own: bool, reweight: bool) -> tuple[np.ndarray, float | np.ndarray]:
        """Draw `count` labels, for each query its `own`, and return what each of them counts.

        That is 1 / (count q_l) with `reweight`, L / count of uniform ones, else 1.
        """
        weight = self._random.weight(count) if reweight and count else 1.0
        size = count * len(batch) if own else count
        return self._random.draw(size, seed=self.seed, epoch=batch.epoch, step=batch.step), weight

    def merge(
        self, batch: Batch, sampled: list[Sampled], drawn: np.ndarray, weight: float | np.ndarray, own: bool
    ) -> Candidates:
        """Merge positives, hard negatives out of `sampled`, and `drawn` labels of `weight`; each once for a query."""
        if len(sampled) == 1 and isinstance(sampled[0].ids, torch.Tensor):
            found = self._columns_on_device(batch, sampled[0].ids)
            return drawn_labels(batch, found, drawn.reshape(len(batch), -1), weight, self._weights)
        part, hard = self._own(batch), self._hard(batch, sampled)
        if not own:
            return shared_pool(part, hard, self._pool_within(drawn), weight, self._weights)
        pool = self._pool_within(drawn, PAD).reshape(len(batch), -1)
        build = own_pool if self.merges else drawn_labels
        return build(part, hard, pool, weight, self._weights)

    def of_batch(self, batch: Batch) -> Candidates:
        """Take what the batch brings: drawn positives and hard negatives of all queries, for every query."""
        drawn = draw_positives(batch, self.positives, self.seed)
        ids = labels_of(batch, self.of_table(batch), drawn)
        if self.part is None:
            return every_query_with(batch, ids, self.positive_weight, drawn)
        start, stop = self.part
        candidates = every_query_with(batch, ids[(ids >= start) & (ids < stop)], self.positive_weight, drawn)
        return replace(candidates, ids=candidates.ids - start)

    def range_of(self, batch: Batch, start: int, stop: int) -> Candidates:
        """Take every label of [start, stop), counted from this rank's first, for every query."""
        return label_range(batch, start, stop, self._weights)

    def gather(self, batch: Batch, group: Group) -> Batch:
        """Return the global batch, which is those of all ranks laid end to end: rows, positives, and their table.

        Of the table those negatives are left that the step counts.
        """
        if group.ranks == 1:
            return batch
        counts = np.diff(batch.positive_offsets)
        counted = self.of_table(batch)
        table = [] if counted is None else [np.ascontiguousarray(counted)]
        rows, positives, counts, *tables = group.gather_arrays(batch.rows, batch.positives, counts, *table)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Batch(batch.epoch, batch.step, rows, Inputs(), positives, offsets, tables[0] if tables else None)

    def of_table(self, batch: Batch) -> np.ndarray | None:
        """Return those negatives [B, k_h] of the batch's table [B, K] that this step counts; None without a table."""
        return None if batch.hard is None else self._columns(batch, batch.hard)

    def hard(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> np.ndarray | None:
        """Return the hard negatives [B, k] that a step counts, this rank's, from its first label; -1 pads.

        Those on a device are waited for.
        """
        return self._hard(batch, self._sampled(batch, sampled))

    def _sampled(self, batch: Batch, sampled: Sequence[Sampled]) -> list[Sampled]:
        """Return the negatives of all sources."""
        planned = (source.find(batch) for source in self.sources if batch.epoch >= source.first_epoch)
        return [*(each for each in planned if each is not None), *sampled]

    def _own(self, batch: Batch) -> Batch:
        """Return the batch with the positives that are this rank's."""
        return batch if self.part is None else within(batch, *self.part)

    def _hard(self, batch: Batch, sampled: Sequence[Sampled]) -> np.ndarray | None:
        """Return the hard negatives of all sources that the step counts, this rank's; each label once a query."""
        ranked = [self._columns(batch, _on_host(each.ids)) for each in sampled if each.ranked]
        others = [_on_host(each.ids) for each in sampled if not each.ranked]
        first, rest = self._labels_within(ranked), self._labels_within(others)
        return first if rest is None else join_hard(self._own(batch), first, rest)

    def _labels_within(self, found: list[np.ndarray]) -> np.ndarray | None:
        """Return label ids [B, k] side by side, those of other ranks as pads; None where there are none."""
        if not found:
            return None
        ids = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        return ids if self.part is None else ids_within(ids, *self.part)

    def _columns(self, batch: Batch, ranked: np.ndarray) -> np.ndarray:
        """Draw those of ranked negatives [B, K] that this step counts, for each query its own."""
        count = self.options.columns(self, batch.epoch)
        return draw_hard(ranked, batch.rows, count, seed=self.seed, epoch=batch.epoch, step=batch.step)

    def _columns_on_device(self, batch: Batch, ranked: torch.Tensor) -> torch.Tensor:
        """Return the same of negatives on a device."""
        columns = self._columns(batch, np.tile(np.arange(ranked.shape[1]), (len(ranked), 1)))
        return ranked.gather(1, send(columns, ranked.device))

    @cached_property
    def _random(self) -> RandomPool:
        share = self.options.by_frequency
        return RandomPool(self.labels, share, 1.0, self.frequency, self.part, self.retired)

    @property
    def _weights(self) -> np.ndarray | None:
        weights = self.positive_weight
        return weights if self.part is None or weights is None else weights[slice(*self.part)]

    def _pool_within(self, pool: np.ndarray, pad: int | None = None) -> np.ndarray:
        """Return this rank's draws of `pool`; others become `pad` where there is one, or are left out."""
        if self.part is None:
            return pool
        start, stop = self.part
        inside = (pool >= start) & (pool < stop)
        return pool[inside] - start if pad is None else np.where(inside, pool - start, pad)


def _on_host(ids: np.ndarray | torch.Tensor) -> np.ndarray:
    """Return label ids [B, k] as an array; those of a device are waited for."""
    return ids.cpu().numpy() if isinstance(ids, torch.Tensor) else ids
