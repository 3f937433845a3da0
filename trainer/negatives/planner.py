"""A batch's candidates: its positives P, hard negatives H and random labels R, merged and weighed.

`Planner` does this for the labels of one rank, and exchanges batches between ranks; the functions below it, on arrays,
build candidates with an own pool per query, with a shared pool, or with the same labels for every query.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numba
import numpy as np
import torch

from schemas import PAD
from schemas.options import whole_number
from schemas.ragged import Ragged
from schemas.randomness import Purpose, generator
from trainer.device import send
from trainer.group import Group
from trainer.inputs import Inputs
from trainer.negatives.base import Sampled
from trainer.negatives.draws import RandomPool, draw_hard, splitmix64
from trainer.negatives.merge import LabelLists, concatenate_labels, merge, merge_with_pool
from trainer.stream.batch import Batch, Candidates, Margins


class NegativesOptions(Protocol):
    """A method's options for negatives (trainer.methods.recipe:NegativesSection); `columns` returns an epoch's k_h."""

    @property
    def by_frequency(self) -> float: ...

    @property
    def margins(self) -> Margins: ...

    def columns(self, planner: Planner, epoch: int) -> int: ...

    def candidates(self, planner: Planner, batch: Batch, sampled: list[Sampled]) -> Candidates | None: ...

    def chunks(self, planner: Planner, batch: Batch) -> Iterator[Candidates]: ...


@dataclass(frozen=True)
class GlobalBatch:
    """A batch of all ranks: `local` contains this rank's rows, `sizes` [G] the number of rows of each rank.

    `gathered`: row ids of all ranks, the positives and hard negatives in this rank's label range; candidates if
    planned. `stop_requested`: a rank was asked to stop before the batch was gathered, so all ranks stop together.
    """

    local: Batch
    gathered: Batch
    sizes: list[int]
    stop_requested: bool


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans a batch's candidates: a pure function of the batch that any thread may call.

    `options`: the method's, which call back `draw` and `merge`, `batch_candidates` or `range_candidates`. `labels`: L.
    `positive_weight` [L] float32, if given, weights the positives. `label_ranges`: the labels [start, stop) of every
    rank. This rank is number `rank`, and plans only the candidates in its range, with ids counted from start; all ranks
    together plan what a single process would plan. Without `label_ranges` a rank plans for all labels.
    `negative_counts`: k_h and k_r of each epoch, if they change. `frequency` [L]: number of training points of each
    label, if draws depend on it. `positives`: number of positives per query that a step trains on, for methods that use
    the labels of the batch; 0: all. `retired` [L] bool: labels that must not be random negatives. `merges`: False if a
    device merges the labels of own pools itself.
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

    @property
    def label_range(self) -> tuple[int, int] | None:
        """Labels [start, stop) of this rank; None: all labels."""
        return self.label_ranges[self.rank] if self.label_ranges else None

    def __call__(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> Candidates | None:
        """Return the candidates of a batch in one set; None for a method whose candidates come in `chunks`.

        `sampled`: hard negatives from sources that need the queries' embeddings, in addition to the batch's table.
        """
        candidates = self.options.candidates(self, batch, self._sampled(batch, sampled))
        return candidates and self._without_filtered(batch, candidates)

    def chunks(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> Iterator[Candidates]:
        """Yield the candidates of a step: one set, planned ahead or now, or all labels, one chunk at a time."""
        candidates = batch.candidates or self(batch, sampled)
        if candidates is not None:
            yield candidates
            return
        for chunk in self.options.chunks(self, self._rank_part(batch)):
            yield self._without_filtered(batch, chunk)

    def _without_filtered(self, batch: Batch, candidates: Candidates) -> Candidates:
        start, stop = self.label_range or (0, self.labels)
        return without_filtered(candidates, batch.filtered and restrict_ids(batch.filtered, start, stop))

    def draw(
        self, batch: Batch, count: int, own: bool, reweight: bool
    ) -> tuple[np.ndarray | Ragged, float | np.ndarray]:
        """Draw a pool of `count` labels, or an own pool for each query; return the labels of it in this rank's range.

        Labels are counted from the rank's first label. Also return their weights, which are 1 without `reweight`, else
        1 / (count q_l), where q_l is the probability of label l: L / count for uniform draws. Own pools are Ragged.
        """
        weight = self._random_pool.weight(count) if reweight and count else 1.0
        place = {"seed": self.seed, "epoch": batch.epoch, "step": batch.step}
        pool = self._random_pool.draw_own(count, batch.rows, **place) if own else self._random_pool.draw(count, **place)
        return pool, weight

    def merge(
        self, batch: Batch, sampled: list[Sampled], pool: np.ndarray | Ragged, weight: float | np.ndarray
    ) -> Candidates:
        """Merge positives, hard negatives in `sampled` and `draw`'s `pool` with `weight`, a label once per query."""
        if len(sampled) == 1 and isinstance(sampled[0].ids, torch.Tensor):  # labels stay on the device: nothing waits
            assert isinstance(pool, Ragged), "a device merges only own pools"
            ranked = sampled[0].ids
            if batch.filtered is not None:
                filtered = torch.from_numpy(batch.filtered.padded()).to(ranked.device)[:, None]
                ranked = ranked.masked_fill((ranked[:, :, None] == filtered).any(dim=2), PAD)
            columns = self._draw_columns(batch, np.tile(np.arange(ranked.shape[1]), (len(ranked), 1)))
            candidates = unmerged_candidates(batch, ranked.gather(1, send(columns, ranked.device)), pool, weight)
            candidates = add_margins(candidates, batch, None, self.options.margins)
            return weigh_positives(candidates, batch, self._rank_positive_weight)
        part, hard = self._rank_part(batch), self._hard(batch, sampled)
        if not isinstance(pool, Ragged):
            candidates = shared_pool(part, hard, pool, weight)
        else:
            candidates = (own_pool if self.merges else unmerged_candidates)(part, hard, pool, weight)
        candidates = add_margins(candidates, part, hard, self.options.margins)
        return weigh_positives(candidates, part, self._rank_positive_weight)

    def batch_candidates(self, batch: Batch) -> Candidates:
        """Return candidates for every query: the drawn positives and the hard negatives of all queries in the batch."""
        drawn, (start, stop) = self.drawn_positives(batch), self.label_range or (0, self.labels)
        ids = distinct_labels(batch, self.table_negatives(batch), drawn)
        candidates = candidates_for_every_query(batch, ids[(ids >= start) & (ids < stop)], self.positive_weight, drawn)
        return candidates._replace(
            ids=candidates.ids - start, pool_margin=np.array(self.options.margins[0], np.float32)
        )

    def drawn_positives(self, batch: Batch) -> np.ndarray | None:
        """Return which of the batch's positives a step trains on, [sum P] bool; None: all."""
        drawn = batch.drawn_positives
        return draw_positives(batch, self.positives, self.seed) if drawn is None else drawn

    def range_candidates(self, batch: Batch, start: int, stop: int) -> Candidates:
        """Return the labels [start, stop), counted from this rank's first label, as candidates for every query."""
        return range_candidates(batch, start, stop, self._rank_positive_weight)

    def table_negatives(self, batch: Batch) -> np.ndarray | Ragged | None:
        """Return the negatives [B, k_h] that this step uses from the batch's table [B, K]; None without a table."""
        return None if batch.hard is None else self._draw_columns(batch, batch.hard)

    def hard(self, batch: Batch, sampled: Sequence[Sampled] = ()) -> np.ndarray | None:
        """Return this rank's hard negatives [B, k] of a step, counted from its first label; waits for a device."""
        hard = self._hard(batch, self._sampled(batch, sampled))
        return None if hard is None else _matrix(hard)

    def _sampled(self, batch: Batch, sampled: Sequence[Sampled]) -> list[Sampled]:
        return [*([] if batch.hard is None else [Sampled(batch.hard, ranked=True)]), *sampled]

    def _rank_part(self, batch: Batch) -> Batch:
        return batch if self.label_range is None else restrict_to_labels(batch, *self.label_range)

    def _hard(self, batch: Batch, sampled: Sequence[Sampled]) -> np.ndarray | Ragged | None:
        """Return this rank's hard negatives: k_h drawn of each ranked source, then all labels of other sources."""
        ranked = self._join([self._draw_columns(batch, _on_host(each.ids)) for each in sampled if each.ranked])
        others = self._join([_on_host(each.ids) for each in sampled if not each.ranked])
        if others is None:
            return ranked
        return join_hard(self._rank_part(batch), None if ranked is None else _matrix(ranked), _matrix(others))

    def _join(self, label_ids: list[np.ndarray | Ragged]) -> np.ndarray | Ragged | None:
        """Join the labels of sources per query, and restrict them to this rank's; None if there is no source."""
        if not label_ids:
            return None
        ids = label_ids[0] if len(label_ids) == 1 else np.concatenate([_matrix(each) for each in label_ids], axis=1)
        return ids if self.label_range is None else restrict_ids(ids, *self.label_range)

    def _draw_columns(self, batch: Batch, ranked: np.ndarray | Ragged) -> np.ndarray | Ragged:
        """Draw the k_h of K columns of ranked negatives [B, K] that this step uses, separately for each query."""
        if isinstance(ranked, Ragged):  # gathered: the rank of the query has drawn
            return ranked
        count = self.options.columns(self, batch.epoch)
        return draw_hard(ranked, batch.rows, count, seed=self.seed, epoch=batch.epoch, step=batch.step)

    @cached_property
    def _random_pool(self) -> RandomPool:
        return RandomPool(self.labels, self.options.by_frequency, self.frequency, self.label_range, self.retired)

    @property
    def _rank_positive_weight(self) -> np.ndarray | None:
        weights = self.positive_weight
        return weights if self.label_range is None or weights is None else weights[slice(*self.label_range)]

    def gather(self, batch: Batch, group: Group, stop_requested: bool = False) -> GlobalBatch:
        """Gather and concatenate the batches of all ranks, with their row ids. Raises RankLostError.

        A rank gets the positives and the table's negatives of the step that are in its label range, or all of them.
        """
        if group.ranks == 1:
            return GlobalBatch(batch, batch, [len(batch)], stop_requested)
        positives, drawn = Ragged(batch.positives, batch.positive_offsets), self.drawn_positives(batch)
        hard, filtered = self.table_negatives(batch), batch.filtered
        messages = []  # to each rank, in the order in which `received` is taken apart
        for counts, places in self._split_by_rank(positives, group.ranks):
            marks = [] if drawn is None else [drawn[places]]
            messages.append([batch.rows, np.array([stop_requested]), counts, positives.values[places], *marks])
        if hard is not None:
            hard = hard if isinstance(hard, Ragged) else Ragged.from_matrix(hard)
            for message, (counts, places) in zip(messages, self._split_by_rank(hard, group.ranks), strict=True):
                message += [counts, hard.values[places]]
        if filtered is not None:
            messages = [[*message, filtered.counts, filtered.values] for message in messages]
        arrived = group.all_to_all(messages)
        received = (np.concatenate(each) for each in zip(*arrived, strict=True))

        def take_rows() -> Ragged:
            counts = next(received)
            return Ragged.from_counts(next(received), counts)

        rows, stops, positives = next(received), next(received), take_rows()
        drawn = None if drawn is None else next(received)
        hard = None if hard is None else take_rows()
        filtered = None if filtered is None else take_rows()
        gathered = Batch(batch.epoch, batch.step, rows, Inputs(), *positives, hard, None, drawn, None, filtered)
        return GlobalBatch(batch, gathered, [len(message[0]) for message in arrived], bool(stops.any()))

    def _split_by_rank(self, rows: Ragged, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray | slice]]:
        """For each rank, yield the number of labels that it gets of each row [b], and their places in `rows.values`."""
        if not self.label_ranges:
            yield from itertools.repeat((rows.counts, slice(None)), ranks)
            return
        counts, order, ends = split_by_rank(rows, np.array([0, *(stop for _, stop in self.label_ranges)]))
        yield from zip(counts, np.split(order, ends), strict=True)


def _on_host(ids: np.ndarray | Ragged | torch.Tensor) -> np.ndarray | Ragged:
    """Waits for labels on a device."""
    return ids.cpu().numpy() if isinstance(ids, torch.Tensor) else ids


def _matrix(ids: np.ndarray | Ragged) -> np.ndarray:
    """Return label ids as a matrix [B, k], padded with -1."""
    return ids.padded() if isinstance(ids, Ragged) else ids


def shared_pool(batch: Batch, hard: LabelLists, pool: np.ndarray, weight: float | np.ndarray) -> Candidates:
    """Build candidates with one random pool for the whole batch.

    `pool` [k_r]: R, drawn with replacement. Each draw has the weight `weight` (L / k_r makes the sum over R an unbiased
    estimate of the sum over all labels outside P and H), or the weight of its label if `weight` is an array [L]; a
    label counts once for each time it is drawn. For each query, P and H are masked in the pool.
    """
    scalar = 1.0 if isinstance(weight, np.ndarray) else weight
    candidates = merge_with_pool(batch.positives, batch.positive_offsets, hard, pool, scalar)
    if isinstance(weight, np.ndarray):
        candidates.pool_weight[:] *= weight[candidates.ids[: len(candidates.pool_weight)]]
    return candidates


def own_pool(batch: Batch, hard: LabelLists, pool: np.ndarray | Ragged, weight: float | np.ndarray) -> Candidates:
    """Build candidates with a random pool per query: `pool` [B, k_r], or rows of random draws, padded with -1.

    A draw that is a positive or hard negative of the query is dropped; another draw has the weight `weight`, as in
    `shared_pool`. A label that a query draws twice is one pair with twice the weight.
    """
    lists = batch.positives, batch.positive_offsets, hard, pool
    if not isinstance(weight, np.ndarray):
        return merge(*lists, weight)
    pairs = merge(*lists, weight_of_others=0.0)  # weight 0 tells P and H from R, whose weight is its number of draws
    weights = np.where(pairs.pair_weight > 0, pairs.pair_weight * weight[pairs.ids[pairs.pair_label]], 1)
    return pairs._replace(pair_weight=weights.astype(np.float32))


def unmerged_candidates(
    batch: Batch, hard: LabelLists | torch.Tensor, pool: np.ndarray | Ragged, weight: float | np.ndarray
) -> Candidates:
    """Build the candidates of `own_pool` for a device that merges them itself; `hard` may already be on the device."""
    on_device = hard if isinstance(hard, torch.Tensor) else None  # the host leaves places for these labels
    on_host = np.full(hard.shape, PAD, np.int32) if isinstance(hard, torch.Tensor) else hard
    scalar = 1.0 if isinstance(weight, np.ndarray) else weight
    lists = batch.positives, batch.positive_offsets, on_host, pool
    labels = concatenate_labels(*lists, scalar, with_pads=on_device is not None)
    if isinstance(weight, np.ndarray):
        is_draw = labels.use & 1 == 1
        labels.weight[is_draw] = weight[labels.label[is_draw]]
    hard_starts = None if on_device is None else labels.starts[:-1] + np.diff(batch.positive_offsets)
    drawn = replace(labels, hard=on_device, hard_starts=hard_starts)
    none = np.empty(0, np.int64)
    return Candidates(none, none, none, np.empty(0, bool), np.empty(0, np.float32), drawn=drawn)


def distinct_labels(batch: Batch, hard: LabelLists, drawn: np.ndarray | None = None) -> np.ndarray:
    """Return the distinct labels of a batch, ascending, int64 [C]: `hard`, and the `drawn` positives (None: all)."""
    negatives = np.empty(0, np.int64) if hard is None else hard.values if isinstance(hard, Ragged) else hard.ravel()
    positives = batch.positives if drawn is None else batch.positives[drawn]
    ids = np.unique(np.concatenate([positives.astype(np.int64), negatives]))
    return ids[ids != PAD]


def candidates_for_every_query(
    batch: Batch, ids: np.ndarray, positive_weight: np.ndarray | None = None, drawn: np.ndarray | None = None
) -> Candidates:
    """Build candidates that score every query against the labels `ids` [C] int64, ascending.

    All positives are masked in the pool; those that are `drawn` [sum P] bool (None: all) are pairs to train on.
    """
    query = np.repeat(np.arange(len(batch)), np.diff(batch.positive_offsets))
    place = np.searchsorted(ids, batch.positives)
    inside = place < len(ids)  # which positives are among `ids`
    inside[inside] = ids[place[inside]] == batch.positives[inside]
    query, place = query[inside], place[inside].astype(np.int64)
    trained = slice(None) if drawn is None else drawn[inside]
    label = place[trained]
    weight = np.ones(len(label)) if positive_weight is None else positive_weight[ids[label]]
    return Candidates(
        ids=ids,
        pair_query=query[trained],
        pair_label=label,
        pair_positive=np.ones(len(label), bool),
        pair_weight=weight.astype(np.float32),
        pool_weight=np.ones(len(ids), np.float32),
        masked_query=query,
        masked_pool=place,
    )


def range_candidates(batch: Batch, start: int, stop: int, positive_weight: np.ndarray | None = None) -> Candidates:
    """Build candidates that score every query on labels [start, stop): a chunk of one-vs-all (ASTRA, equation 1)."""
    return candidates_for_every_query(batch, np.arange(start, stop), positive_weight)


def add_margins(candidates: Candidates, batch: Batch, hard: LabelLists, margins: Margins) -> Candidates:
    """Give random negatives and `hard` negatives, which come before a query's draws, their `margins`."""
    if not any(margins):
        return candidates
    if candidates.drawn is not None:
        return candidates._replace(drawn=replace(candidates.drawn, margins=margins))
    known = np.diff(batch.positive_offsets)
    if hard is not None:
        known = known + (hard.counts if isinstance(hard, Ragged) else (hard != PAD).sum(axis=1))
    draws_from = np.searchsorted(candidates.pair_query, np.arange(len(batch))) + known
    is_draw = np.arange(len(candidates.pair_query)) >= draws_from[candidates.pair_query]
    of_pairs = np.where(candidates.pair_positive, 0, np.where(is_draw, *margins)).astype(np.float32)
    return candidates._replace(pool_margin=np.array(margins[0], np.float32), pair_margin=of_pairs)


def weigh_positives(candidates: Candidates, batch: Batch, weight: np.ndarray | None) -> Candidates:
    """Give each positive of the batch the weight of its label in `weight` [L]; None: weight 1."""
    if weight is not None and candidates.drawn is not None:
        candidates.drawn.weight[candidates.drawn.weight < 0] = -weight[batch.positives]
    elif weight is not None:
        candidates.pair_weight[candidates.pair_positive] = weight[batch.positives]
    return candidates


def without_filtered(candidates: Candidates, filtered: Ragged | None) -> Candidates:
    """Return the candidates without pairs of a query and one of its `filtered` labels that is not a positive."""
    if filtered is None:
        return candidates
    base = 1 << 40  # labels are below 2**40 (`merge`), so that a query and a label are one number
    codes = filtered.row_of() * base + filtered.entries
    if (drawn := candidates.drawn) is not None:
        gone = np.isin((drawn.use >> 1).astype(np.int64) * base + drawn.label, codes) & (drawn.weight > 0)
        return candidates._replace(drawn=replace(drawn, weight=np.where(gone, np.float32(0), drawn.weight)))
    ids, pool_ids = candidates.ids, candidates.ids[: len(candidates.pool_weight)]
    some = np.flatnonzero(np.isin(ids, filtered.entries)[candidates.pair_label] & ~candidates.pair_positive)
    gone = np.isin(candidates.pair_query[some].astype(np.int64) * base + ids[candidates.pair_label[some]], codes)
    kept = np.ones(len(candidates.pair_label), bool)
    kept[some[gone]] = False
    columns = {name: getattr(candidates, name) for name in candidates._fields if name.startswith("pair_")}
    pairs = {name: column[kept] for name, column in columns.items() if len(column)}
    masked = candidates.masked_query.astype(np.int64) * base + pool_ids[candidates.masked_pool]
    new = np.setdiff1d(codes[np.isin(codes % base, pool_ids)], masked)
    query = np.append(candidates.masked_query, new // base).astype(candidates.masked_query.dtype)
    pool = np.append(candidates.masked_pool, np.searchsorted(pool_ids, new % base))
    return candidates._replace(**pairs, masked_query=query, masked_pool=pool.astype(candidates.masked_pool.dtype))


def join_hard(batch: Batch, hard: np.ndarray | None, others: np.ndarray) -> np.ndarray:
    """Append `others` [B, k] to `hard` [B, k_h]; repeated labels and positives of the query become padding."""
    others = np.sort(others.astype(np.int64, copy=False), axis=1)
    others[:, 1:][others[:, 1:] == others[:, :-1]] = PAD
    others[Ragged(batch.positives, batch.positive_offsets).contains(others)] = PAD
    if hard is None:
        return others
    others[Ragged.from_matrix(hard).contains(others)] = PAD
    return np.concatenate([hard, others], axis=1)


def draw_positives(batch: Batch, count: int, seed: int) -> np.ndarray | None:
    """Draw `count` positives of each query; return a mask [sum P] bool, or None for all positives (`count` = 0).

    A query's draw depends on its row id and the step, not on the rest of the batch.
    """
    if not count:
        return None
    key = generator(seed, Purpose.POSITIVES, batch.epoch, batch.step).integers(0, 1 << 64, dtype=np.uint64)
    drawn = np.zeros(len(batch.positives), bool)
    _mark_drawn(key, batch.rows.astype(np.uint64), batch.positive_offsets, count, drawn)
    return drawn


@numba.njit(nogil=True, cache=True)
def _mark_drawn(key, rows, offsets, count, drawn):  # type: ignore[no-untyped-def]
    """Mark the `count` positions of each row that have the smallest random numbers."""
    for row in range(len(rows)):
        own = drawn[offsets[row] : offsets[row + 1]]
        numbers = np.empty(len(own), np.uint64)
        for place in range(len(own)):
            numbers[place] = splitmix64(key, rows[row], np.uint64(place))
        own[np.argsort(numbers)[:count]] = True


def restrict_to_labels(batch: Batch, start: int, stop: int) -> Batch:
    """Return the batch with only its positives in [start, stop), counted from start, and without hard negatives."""
    own = restrict_ids(Ragged(batch.positives, batch.positive_offsets), start, stop)
    return replace(batch, positives=own.values, positive_offsets=own.offsets, hard=None, drawn_positives=None)


def restrict_ids(ids: np.ndarray | Ragged, start: int, stop: int) -> Any:
    """Return label ids counted from `start`; other ids become padding in a matrix, and are dropped from Ragged."""
    if not isinstance(ids, np.ndarray):
        own = ids.keep((ids.values >= start) & (ids.values < stop))
        return own._replace(values=own.values - start)
    return np.where((ids >= start) & (ids < stop), ids - start, PAD)


def split_by_rank(rows: Ragged, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign labels to ranks: rank g gets the labels in [bounds[g], bounds[g + 1]), and padding belongs to no rank.

    Return three arrays: the number of labels per rank and row, int32 [G, B]; the positions of labels in `rows.values`,
    ordered by rank and row; and the ends of all ranks except the last in this order, int64 [G - 1].
    """
    owner = np.empty(len(rows.values), np.int32)
    counts = np.zeros((len(bounds) - 1, rows.rows), np.int32)
    _find_owners(*rows, bounds, owner, counts)
    sizes = counts.sum(axis=1, dtype=np.int64)
    ends = np.cumsum(sizes)
    order = np.empty(ends[-1], np.int64)
    _order_by_rank(*rows, owner, ends - sizes, order)
    return counts, order, ends[:-1]


@numba.njit(nogil=True, cache=True)
def _find_owners(values, offsets, bounds, owner, counts):  # type: ignore[no-untyped-def]
    """Write the rank of each label (-1 for padding), and the number of labels per rank and row."""
    ranks = len(bounds) - 1
    share = ranks / max(1, bounds[ranks])
    for row in range(len(offsets) - 1):
        for place in range(offsets[row], offsets[row + 1]):
            label = values[place]
            rank = min(ranks - 1, int(label * share))  # ranges are about equal, so the rank differs by at most one
            while label < bounds[rank] and rank > 0:
                rank -= 1
            while label >= bounds[rank + 1]:
                rank += 1
            owner[place] = rank if label != PAD else -1
            counts[rank, row] += label != PAD


@numba.njit(nogil=True, cache=True)
def _order_by_rank(values, offsets, owner, ends, order):  # type: ignore[no-untyped-def]
    """Write the positions of labels ordered by rank; `ends` [G] contains the start of each rank, then its end."""
    for place in range(offsets[0], offsets[-1]):
        rank = owner[place]
        if rank >= 0:
            order[ends[rank]] = place
            ends[rank] += 1
