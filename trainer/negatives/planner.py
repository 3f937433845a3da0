"""Plan batches: choose the labels that each query is scored against (ASTRA, Algorithm 1)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from schemas import PAD
from schemas.options import whole_number
from schemas.ragged import Ragged
from trainer.group import Group
from trainer.inputs import Inputs
from trainer.negatives.base import Sampled
from trainer.negatives.candidates import (
    candidates_for_every_query,
    distinct_labels,
    draw_positives,
    join_hard,
    own_pool,
    range_candidates,
    restrict_ids,
    restrict_to_labels,
    shared_pool,
    split_by_rank,
    unmerged_candidates,
    weigh_positives,
    without_filtered,
)
from trainer.negatives.draws import RandomPool, draw_hard
from trainer.stream.batch import Batch, Candidates
from trainer.stream.transfer import send


class NegativesOptions(Protocol):
    """Interface of a method's options for negatives (trainer.methods.recipe:NegativesSection)."""

    @property
    def by_frequency(self) -> float: ...

    def columns(self, planner: "Planner", epoch: int) -> int: ...

    def candidates(self, planner: "Planner", batch: Batch, sampled: list[Sampled]) -> Candidates | None: ...

    def chunks(self, planner: "Planner", batch: Batch) -> Iterator[Candidates]: ...


@dataclass(frozen=True)
class GlobalBatch:
    """A batch of all ranks: `local` contains this rank's rows, `sizes` [G] the number of rows of each rank.

    `gathered` contains the row ids of all ranks, the positives and hard negatives that this rank plans for, and
    candidates if the batch is already planned. `stop_requested`: a rank was asked to stop before the batch was
    gathered.
    """

    local: Batch
    gathered: Batch
    sizes: list[int]
    stop_requested: bool


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans a batch's candidates with a method's `options`: a pure function of the batch that any thread may call.

    `labels`: L. `positive_weight` [L] float32, if given, weights the positives. `label_ranges`: the labels [start,
    stop) of every rank. This rank is number `rank`, and plans only the candidates in its range, with ids counted from
    start; all ranks together plan what a single process would plan. Without `label_ranges` a rank plans for all labels.
    `negative_counts`: k_h and k_r of each epoch, if they change. `frequency` [L]: number of training points of each
    label, if draws depend on it. `positives`: number of positives per query that a step trains on, for methods that use
    the labels of the batch; 0: all. `retired` [L] bool: labels that must not be random negatives. `merges`: False if a
    device merges the labels of pools per query itself.
    """

    options: NegativesOptions
    labels: int
    seed: int = 0
    positive_weight: np.ndarray | None = None
    label_ranges: tuple[tuple[int, int], ...] = ()
    rank: int = 0
    negative_counts: tuple[tuple[int, int], ...] = ()
    frequency: np.ndarray | None = None
    positives: int = 0
    retired: np.ndarray | None = None
    merges: bool = True

    def __post_init__(self) -> None:
        whole_number("labels", self.labels, 1)

    def __call__(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> Candidates | None:
        """Return one set of candidates; None for a method that uses `chunks` of all labels.

        `sampled` comes from sources that need embeddings; each label counts once per query.
        """
        candidates = self.options.candidates(self, batch, self._sampled(batch, sampled))
        return candidates and self._without_filtered(batch, candidates)

    def chunks(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> Iterator[Candidates]:
        """Yield the candidates of a step: the candidates of the batch, or one chunk of labels at a time."""
        candidates = batch.candidates or self(batch, sampled)
        if candidates is not None:
            yield candidates
            return
        for chunk in self.options.chunks(self, self._own(batch)):
            yield self._without_filtered(batch, chunk)

    def _without_filtered(self, batch: Batch, candidates: Candidates) -> Candidates:
        start, stop = self.label_range or (0, self.labels)
        return without_filtered(candidates, batch.filtered and restrict_ids(batch.filtered, start, stop))

    @property
    def label_range(self) -> tuple[int, int] | None:
        """Labels [start, stop) of this rank; None: all labels."""
        return self.label_ranges[self.rank] if self.label_ranges else None

    def draw(
        self, batch: Batch, count: int, own: bool, reweight: bool
    ) -> tuple[np.ndarray | Ragged, float | np.ndarray]:
        """Draw `count` labels, per query if `own`; return this rank's part, counted from the rank's first label.

        Also return the weights of the labels: with `reweight`, 1 / (count q_l), which is L / count for uniform draws;
        else 1.
        """
        weight = self._random.weight(count) if reweight and count else 1.0
        if own:
            return self._random.draw_own(count, batch.rows, seed=self.seed, epoch=batch.epoch, step=batch.step), weight
        return self._random.draw(count, seed=self.seed, epoch=batch.epoch, step=batch.step), weight

    def merge(
        self, batch: Batch, sampled: list[Sampled], drawn: np.ndarray | Ragged, weight: float | np.ndarray
    ) -> Candidates:
        """Merge positives, hard negatives in `sampled` and labels `drawn` with `weight`, each label once per query."""
        if len(sampled) == 1 and isinstance(sampled[0].ids, torch.Tensor):
            assert isinstance(drawn, Ragged), "a device merges only own pools"
            ranked = sampled[0].ids
            if batch.filtered is not None:
                own = torch.from_numpy(batch.filtered.padded()).to(ranked.device)[:, None]
                ranked = ranked.masked_fill((ranked[:, :, None] == own).any(dim=2), PAD)
            columns = self._columns(batch, np.tile(np.arange(ranked.shape[1]), (len(ranked), 1)))
            candidates = unmerged_candidates(batch, ranked.gather(1, send(columns, ranked.device)), drawn, weight)
            return weigh_positives(candidates, batch, self._weights)
        part, hard = self._own(batch), self._hard(batch, sampled)
        if not isinstance(drawn, Ragged):
            return weigh_positives(shared_pool(part, hard, drawn, weight), part, self._weights)
        build = own_pool if self.merges else unmerged_candidates
        return weigh_positives(build(part, hard, drawn, weight), part, self._weights)

    def batch_candidates(self, batch: Batch) -> Candidates:
        """Return candidates for every query: the drawn positives and the hard negatives of all queries in the batch."""
        drawn = self.drawn_positives(batch)
        ids = distinct_labels(batch, self.table_negatives(batch), drawn)
        if self.label_range is None:
            return candidates_for_every_query(batch, ids, self.positive_weight, drawn)
        start, stop = self.label_range
        candidates = candidates_for_every_query(batch, ids[(ids >= start) & (ids < stop)], self.positive_weight, drawn)
        return candidates._replace(ids=candidates.ids - start)

    def drawn_positives(self, batch: Batch) -> np.ndarray | None:
        """Return which positives a step trains on, [sum P] bool; None: all."""
        return (
            draw_positives(batch, self.positives, self.seed) if batch.drawn_positives is None else batch.drawn_positives
        )

    def range_candidates(self, batch: Batch, start: int, stop: int) -> Candidates:
        """Return the labels [start, stop), counted from this rank's first label, as candidates for every query."""
        return range_candidates(batch, start, stop, self._weights)

    def gather(self, batch: Batch, group: Group, stop_requested: bool = False) -> GlobalBatch:
        """Gather and concatenate the batches of all ranks, with their row ids. Raises RankLostError.

        A rank sends to each other rank the positives in that rank's label range, and the negatives from the table in
        this range that the step uses; without `label_ranges`, a rank sends all of them.
        """
        if group.ranks == 1:
            return GlobalBatch(batch, batch, [len(batch)], stop_requested)
        columns, drawn_positives = [Ragged(batch.positives, batch.positive_offsets)], self.drawn_positives(batch)
        hard = self.table_negatives(batch)
        if hard is not None:
            columns.append(hard if isinstance(hard, Ragged) else Ragged.from_matrix(hard))
        messages = [[batch.rows, np.array([stop_requested])] for _ in range(group.ranks)]
        for column, marks in zip(columns, (drawn_positives, None), strict=False):
            for message, (counts, own) in zip(messages, self._split_by_rank(column, group.ranks), strict=True):
                message += [counts, column.values[own]] if marks is None else [counts, column.values[own], marks[own]]
        if batch.filtered is not None:
            messages = [[*message, batch.filtered.counts, batch.filtered.values] for message in messages]
        arrived = group.all_to_all(messages)
        rows, askers, *received = (np.concatenate(each) for each in zip(*arrived, strict=True))
        positives, received, filtered = Ragged.from_counts(received[1], received[0]), received[2:], None
        if batch.filtered is not None:
            *received, counts, values = received
            filtered = Ragged.from_counts(values, counts)
        if drawn_positives is not None:
            drawn_positives, *received = received
        hard = Ragged.from_counts(received[1], received[0]) if received else None
        number = batch.epoch, batch.step
        gathered = Batch(*number, rows, Inputs(), *positives, hard, None, drawn_positives, None, filtered)
        return GlobalBatch(batch, gathered, [len(message[0]) for message in arrived], bool(askers.any()))

    def _split_by_rank(self, rows: Ragged, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray | slice]]:
        """For each rank, yield the number of labels that it gets from each row [b], and their positions in `rows`."""
        if not self.label_ranges:
            yield from itertools.repeat((rows.counts, slice(None)), ranks)
            return
        counts, order, ends = split_by_rank(rows, np.array([0, *(stop for _, stop in self.label_ranges)]))
        yield from zip(counts, np.split(order, ends), strict=True)

    def table_negatives(self, batch: Batch) -> np.ndarray | Ragged | None:
        """Return the negatives [B, k_h] that this step uses from the batch's table [B, K]; None without a table."""
        return None if batch.hard is None else self._columns(batch, batch.hard)

    def hard(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> np.ndarray | None:
        """Return this rank's hard negatives [B, k] in a step, as ids counted from its first label, padded with -1.

        Waits for negatives that are still on a device.
        """
        hard = self._hard(batch, self._sampled(batch, sampled))
        return None if hard is None else _matrix(hard)

    def _sampled(self, batch: Batch, sampled: Sequence[Sampled]) -> list[Sampled]:
        """Return the negatives of all sources: the joined table, and `sampled`."""
        return [*([] if batch.hard is None else [Sampled(batch.hard, ranked=True)]), *sampled]

    def _own(self, batch: Batch) -> Batch:
        """Return the batch with only the positives of this rank."""
        return batch if self.label_range is None else restrict_to_labels(batch, *self.label_range)

    def _hard(self, batch: Batch, sampled: Sequence[Sampled]) -> np.ndarray | Ragged | None:
        """Return this rank's hard negatives in the step, from all sources; a label counts once per query."""
        ranked = [self._columns(batch, _on_host(each.ids)) for each in sampled if each.ranked]
        others = [_on_host(each.ids) for each in sampled if not each.ranked]
        ranked_labels, other_labels = self._own_labels(ranked), self._own_labels(others)
        if other_labels is None:
            return ranked_labels
        return join_hard(
            self._own(batch), None if ranked_labels is None else _matrix(ranked_labels), _matrix(other_labels)
        )

    def _own_labels(self, label_ids: list[np.ndarray | Ragged]) -> np.ndarray | Ragged | None:
        """Return this rank's label ids per query, counted from the rank's first label; None if `label_ids` is empty."""
        if not label_ids:
            return None
        ids = label_ids[0] if len(label_ids) == 1 else np.concatenate([_matrix(each) for each in label_ids], axis=1)
        return ids if self.label_range is None else restrict_ids(ids, *self.label_range)

    def _columns(self, batch: Batch, ranked: np.ndarray | Ragged) -> np.ndarray | Ragged:
        """Draw the columns of ranked negatives [B, K] that this step uses, separately for each query.

        Negatives from other ranks are already drawn.
        """
        if isinstance(ranked, Ragged):
            return ranked
        count = self.options.columns(self, batch.epoch)
        return draw_hard(ranked, batch.rows, count, seed=self.seed, epoch=batch.epoch, step=batch.step)

    @cached_property
    def _random(self) -> RandomPool:
        share = self.options.by_frequency
        return RandomPool(self.labels, share, self.frequency, self.label_range, self.retired)

    @property
    def _weights(self) -> np.ndarray | None:
        weights = self.positive_weight
        return weights if self.label_range is None or weights is None else weights[slice(*self.label_range)]


def _on_host(ids: np.ndarray | Ragged | torch.Tensor) -> np.ndarray | Ragged:
    """Return label ids as an array or rows; waits for labels on a device."""
    return ids.cpu().numpy() if isinstance(ids, torch.Tensor) else ids


def _matrix(ids: np.ndarray | Ragged) -> np.ndarray:
    """Return label ids as a matrix [B, k], padded with -1."""
    return ids.padded() if isinstance(ids, Ragged) else ids
