"""Which labels each query is scored against: positives, hard and random negatives (ASTRA, Algorithm 1)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from schemas.ragged import Ragged
from schemas.randomness import Purpose, generator
from schemas.tables import PAD
from trainer.config import Negatives
from trainer.group import Group
from trainer.inputs import Inputs
from trainer.negatives.curriculum import Mixture
from trainer.negatives.merge import merge
from trainer.negatives.random_pool import Draws
from trainer.stream.batch import Batch, Candidates

_NONE = np.empty(0, np.int64)

# Hard negatives [B, k] of a batch with the labels of a rank, -1 pads: what the model as it is at the step says.
Find = Callable[[Batch], np.ndarray]


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans a batch's candidates under `options`: a pure function of the batch, so any thread may run it.

    `labels`: L. `positive_weight` [L] float32, where given, weights the positives. A rank that holds the labels
    [start, stop), `part`, plans those of the global batch: its candidates are the part of one process's that lies
    there, with ids that count from start. Without a `part` there is one rank, which holds all. `course`: how many hard
    and random negatives each epoch has, where that changes. `frequency` [L]: the training points of each label, where
    draws go by it.
    """

    options: Negatives
    labels: int
    seed: int = 0
    positive_weight: np.ndarray | None = None
    part: tuple[int, int] | None = None
    course: tuple[Mixture, ...] = ()
    frequency: np.ndarray | None = None

    def __call__(self, batch: Batch, find: Find | None = None) -> Candidates | None:
        """One set of candidates; None under `pool = "all"`, whose chunks of all labels `chunks` gives.

        What `find` gives is added to the table's hard negatives; a label is among a query's once.
        """
        options = self.options
        if options.pool == "all":
            return None
        hard = self._hard(batch)
        # Algorithm 1, step 8: before the first hard negatives, k_h + k_r negatives are all random.
        some = hard is not None or find is not None
        size = self._mixture(batch).random if some else options.warmup or options.random + options.hard
        weight = self._draws.weight(size) if options.reweight and size else 1.0
        draws = size if options.pool == "shared" else size * len(batch)
        pool = self._draws.pool(draws, seed=self.seed, epoch=batch.epoch, step=batch.step)
        batch = self._with_hard(batch, hard, find)
        if options.pool == "shared":
            return shared_pool(batch, batch.hard, self._own_draws(pool), weight, self._weights)
        return own_pool(batch, batch.hard, self._own_draws(pool, PAD).reshape(len(batch), size), weight, self._weights)

    def chunks(self, batch: Batch, find: Find | None = None) -> Iterator[Candidates]:
        """What a step goes through: the batch's candidates, or one chunk of labels after the other."""
        planned = batch.candidates or self(batch, find)
        if planned is not None:
            yield planned
            return
        start, stop = self.part or (0, self.labels)
        batch = self._own(batch, None)
        for first in range(0, stop - start, self.options.chunk):
            yield label_range(batch, first, min(first + self.options.chunk, stop - start), self._weights)

    def gather(self, batch: Batch, group: Group) -> Batch:
        """The global batch, which is those of all ranks laid end to end: its rows, positives and hard negatives."""
        if group.ranks == 1:
            return batch
        counts = np.diff(batch.positive_offsets)
        hard = self._hard(batch)
        table = [] if hard is None else [np.ascontiguousarray(hard)]
        rows, positives, counts, *tables = group.gather_arrays(batch.rows, batch.positives, counts, *table)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Batch(batch.epoch, batch.step, rows, Inputs(), positives, offsets, tables[0] if tables else None)

    def drawn(self, batch: Batch) -> Batch:
        """The batch with those of its hard negatives that this step counts."""
        return replace(batch, hard=self._hard(batch))

    def hard(self, batch: Batch, find: Find | None = None) -> np.ndarray | None:
        """The hard negatives [B, k] that a step with the batch counts, this rank's, from its first label; -1 pads."""
        return self._with_hard(batch, self._hard(batch), find).hard

    def _with_hard(self, batch: Batch, hard: np.ndarray | None, find: Find | None) -> Batch:
        """This rank's part of the batch, with `hard` of a table or an index and what `find` gives."""
        batch = self._own(batch, hard)
        return batch if find is None else replace(batch, hard=joined(batch, find(batch)))

    def _hard(self, batch: Batch) -> np.ndarray | None:
        if batch.hard is None:
            return None
        count = self._mixture(batch).hard
        return draw_hard(batch.hard, count, seed=self.seed, epoch=batch.epoch, step=batch.step)

    def _mixture(self, batch: Batch) -> Mixture:
        return self.course[batch.epoch] if self.course else Mixture(self.options.hard, self.options.random)

    @cached_property
    def _draws(self) -> Draws:
        options = self.options
        return Draws(self.labels, options.frequency_share, options.frequency_power, self.frequency, self.part)

    @property
    def _weights(self) -> np.ndarray | None:
        weights = self.positive_weight
        return weights if self.part is None or weights is None else weights[slice(*self.part)]

    def _own(self, batch: Batch, hard: np.ndarray | None) -> Batch:
        """Positives and `hard` negatives of the batch that are this rank's, counted from its first label."""
        batch = replace(batch, hard=hard)
        return batch if self.part is None else within(batch, *self.part)

    def _own_draws(self, pool: np.ndarray, pad: int | None = None) -> np.ndarray:
        """The draws of `pool` that are this rank's; others become `pad` where there is one, or are left out."""
        if self.part is None:
            return pool
        start, stop = self.part
        inside = (pool >= start) & (pool < stop)
        return pool[inside] - start if pad is None else np.where(inside, pool - start, pad)


def within(batch: Batch, start: int, stop: int) -> Batch:
    """The batch with its labels of [start, stop) alone, counted from start: other positives are gone, others pads."""
    inside = (batch.positives >= start) & (batch.positives < stop)
    ends = np.concatenate([[0], np.cumsum(inside)])
    hard = batch.hard
    if hard is not None:
        hard = np.where((hard >= start) & (hard < stop), hard - start, PAD)
    return replace(
        batch,
        positives=batch.positives[inside] - start,
        positive_offsets=ends[batch.positive_offsets],
        hard=hard,
    )


def draw_hard(hard: np.ndarray, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """`count` of the table's K columns [B, count], drawn anew each step; all of them where count = K."""
    if count >= hard.shape[1]:
        return hard
    columns = generator(seed, Purpose.HARD_COLUMNS, epoch, step).permutation(hard.shape[1])[:count]
    return hard[:, columns]


def joined(batch: Batch, found: np.ndarray) -> np.ndarray:
    """The batch's hard negatives and those `found` [B, k], each label once a query and none of its positives."""
    found = np.sort(found.astype(np.int64, copy=False), axis=1)
    found[:, 1:][found[:, 1:] == found[:, :-1]] = PAD
    found[Ragged(batch.positives, batch.positive_offsets).contains(found)] = PAD
    if batch.hard is None:
        return found
    found[Ragged.from_matrix(batch.hard).contains(found)] = PAD
    return np.concatenate([batch.hard, found], axis=1)


def shared_pool(
    batch: Batch,
    hard: np.ndarray | None,
    pool: np.ndarray,
    weight: float | np.ndarray,
    positive_weight: np.ndarray | None = None,
) -> Candidates:
    """Candidates with one random pool for the whole batch.

    `pool` [k_r]: draws with replacement; each counts `weight` (L / k_r for an unbiased sum over every label outside
    P and H), or, as an array [L], its label's; repeated draws count repeatedly. A query's own P and H are struck from
    its pool. `positive_weight` [L], where given, weights the positives.
    """
    ids, counts, query, place, positive, struck, _ = merge(pool, batch.positives, batch.positive_offsets, hard)
    return Candidates(
        ids=ids,
        pair_query=query,
        pair_label=place,
        pair_positive=positive,
        pair_weight=_weights(batch.positives, positive, positive_weight),
        pool_weight=(counts * _at(weight, ids[: len(counts)])).astype(np.float32),
        struck_query=query[struck],
        struck_pool=place[struck],
    )


def own_pool(
    batch: Batch,
    hard: np.ndarray | None,
    pool: np.ndarray,
    weight: float | np.ndarray,
    positive_weight: np.ndarray | None = None,
) -> Candidates:
    """Candidates with a random pool for each query: `pool` [B, k_r], draws with replacement from [0, L), -1 pads.

    Draws that hit the query's own P or H are dropped; the others count `weight` each, as in `shared_pool`. What a
    query draws twice is one pair of twice the weight, so there are never more pairs than queries times labels.
    """
    merged = merge(_NONE, batch.positives, batch.positive_offsets, hard, pool)
    # Ascending: of millions of labels, rows that lie near each other are then read after each other.
    ids, rank = _ascending(merged.ids)
    label = merged.ids[merged.place] if isinstance(weight, np.ndarray) else _NONE
    known = merged.draws == 0
    weights = (merged.draws * _at(weight, label)).astype(np.float32)
    weights[known] = _weights(batch.positives, merged.positive[known], positive_weight)
    return Candidates(
        ids=ids,
        pair_query=merged.query,
        pair_label=rank[merged.place],
        pair_positive=merged.positive,
        pair_weight=weights,
        pool_weight=np.empty(0, np.float32),
        struck_query=_NONE,
        struck_pool=_NONE,
    )


def draw_positives(batch: Batch, count: int, seed: int) -> np.ndarray | None:
    """Which positives the step learns, [sum P] bool: `count` of each query's, drawn each step; None for all (0)."""
    if not count:
        return None
    offsets = batch.positive_offsets
    query = np.repeat(np.arange(len(batch)), np.diff(offsets))
    order = np.lexsort((generator(seed, Purpose.POSITIVES, batch.epoch, batch.step).random(len(query)), query))
    drawn = np.empty(len(query), bool)
    drawn[order] = np.arange(len(query)) - offsets[query] < count
    return drawn


def among(
    batch: Batch, ids: np.ndarray, positive_weight: np.ndarray | None = None, drawn: np.ndarray | None = None
) -> Candidates:
    """The labels `ids` [C] int64, ascending, for every query, counted once; positives are struck from the negatives.

    Of the batch's positives those that are `drawn` [sum P] are learnt, all where it is None.
    """
    query = np.repeat(np.arange(len(batch)), np.diff(batch.positive_offsets))
    place = np.searchsorted(ids, batch.positives)
    inside = place < len(ids)
    inside[inside] = ids[place[inside]] == batch.positives[inside]
    query, place = query[inside], place[inside].astype(np.int64)
    learnt = slice(None) if drawn is None else drawn[inside]
    positive = np.ones(len(place[learnt]), bool)
    return Candidates(
        ids=ids,
        pair_query=query[learnt],
        pair_label=place[learnt],
        pair_positive=positive,
        pair_weight=_weights(ids[place[learnt]], positive, positive_weight),
        pool_weight=np.ones(len(ids), np.float32),
        struck_query=query,
        struck_pool=place,
    )


def label_range(batch: Batch, start: int, stop: int, positive_weight: np.ndarray | None = None) -> Candidates:
    """Every label of [start, stop) for every query, counted once: a chunk of one-vs-all (ASTRA, equation 1)."""
    return among(batch, np.arange(start, stop), positive_weight)


def _ascending(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct `ids` [C] in order, and the place of each there, int32; C < 2**24, as `merge` has it."""
    # Id and place as one number: sorting numbers takes a quarter of the time of sorting places by them.
    places = np.arange(len(ids))
    both = np.sort((ids << 24) | places)
    rank = np.empty(len(ids), np.int32)
    rank[both & 0xFFFFFF] = places
    return both >> 24, rank


def _at(weight: float | np.ndarray, labels: np.ndarray) -> float | np.ndarray:
    """The weight of each of `labels`."""
    return weight[labels] if isinstance(weight, np.ndarray) else weight


def _weights(positives: np.ndarray, positive: np.ndarray, positive_weight: np.ndarray | None) -> np.ndarray:
    """1 for every pair; for the positives, in the order of the pairs, their label's weight where there is one."""
    weights = np.ones(len(positive), np.float32)
    if positive_weight is not None:
        weights[positive] = positive_weight[positives]
    return weights
