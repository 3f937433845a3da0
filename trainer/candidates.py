"""Which labels each query is scored against: positives, hard and random negatives (ASTRA, Algorithm 1)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas.ragged import contains
from trainer.config import Negatives
from trainer.merge import merge
from trainer.randomness import generator
from trainer.stream.batch import Batch, Candidates

_NO_POOL = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans a batch's candidates under `options`: a pure function of the batch, so any thread may run it.

    `labels`: L. `positive_weight` [L] float32, where given, weights the positives.
    """

    options: Negatives
    labels: int
    seed: int = 0
    positive_weight: np.ndarray | None = None

    def __call__(self, batch: Batch) -> Candidates | None:
        """One set of candidates; None under `pool = "all"`, whose chunks of all L labels `chunks` gives."""
        options = self.options
        if options.pool == "all":
            return None
        at = {"seed": self.seed, "epoch": batch.epoch, "step": batch.step}
        hard = None if batch.hard is None else draw_hard(batch.hard, options.hard, **at)
        # Algorithm 1, step 8: before the first table, k_h + k_r negatives are all random.
        size = options.random if hard is not None else options.warmup or options.random + options.hard
        weight = self.labels / size if options.reweight and size else 1.0
        if options.pool == "shared":
            return shared_pool(batch, hard, draw_pool(self.labels, size, **at), weight, self.positive_weight)
        pool = draw_pool(self.labels, size * len(batch), **at).reshape(len(batch), size)
        return own_pool(batch, hard, pool, weight, self.positive_weight)

    def chunks(self, batch: Batch) -> Iterator[Candidates]:
        """What a step goes through: the batch's candidates, or one chunk of labels after the other."""
        planned = batch.candidates or self(batch)
        if planned is not None:
            yield planned
            return
        for start in range(0, self.labels, self.options.chunk):
            yield label_range(batch, start, min(start + self.options.chunk, self.labels), self.positive_weight)


def draw_pool(labels: int, size: int, *, seed: int, epoch: int, step: int, stream: int = 0) -> np.ndarray:
    """`size` labels drawn uniformly with replacement from [0, labels), int64."""
    return generator(seed, "random pool", epoch, step, stream).integers(0, labels, size)


def draw_hard(hard: np.ndarray, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """`count` of the table's K columns [B, count], drawn anew each step; all of them where count = K."""
    if count >= hard.shape[1]:
        return hard
    columns = generator(seed, "hard columns", epoch, step).permutation(hard.shape[1])[:count]
    return hard[:, columns]


def shared_pool(
    batch: Batch, hard: np.ndarray | None, pool: np.ndarray, weight: float, positive_weight: np.ndarray | None = None
) -> Candidates:
    """Candidates with one random pool for the whole batch.

    `pool` [k_r]: draws with replacement; each counts `weight` (L / k_r for an unbiased sum over every label outside
    P and H), and repeated draws count repeatedly. A query's own P and H are struck from its pool. `positive_weight`
    [L], where given, weights the positives.
    """
    ids, counts, query, place, positive, struck = merge(pool, batch.positives, batch.positive_offsets, hard)
    return Candidates(
        ids=ids,
        pair_query=query,
        pair_label=place,
        pair_positive=positive,
        pair_weight=_weights(batch.positives, positive, positive_weight),
        pool_weight=(counts * weight).astype(np.float32),
        struck_query=query[struck],
        struck_pool=place[struck],
    )


def own_pool(
    batch: Batch,
    hard: np.ndarray | None,
    pool: np.ndarray,
    weight: float,
    positive_weight: np.ndarray | None = None,
) -> Candidates:
    """Candidates with a random pool for each query: `pool` [B, k_r], draws with replacement from [0, L).

    Draws that hit the query's own P or H are dropped; the others count `weight` each, as in `shared_pool`. What a
    query draws twice is one pair of twice the weight, so there are never more pairs than queries times labels.
    """
    ids, _, query, place, positive, _ = merge(_NO_POOL, batch.positives, batch.positive_offsets, hard)
    label = ids[place]
    known = np.concatenate([[0], np.cumsum(np.bincount(query, minlength=len(batch)))])
    fresh = ~contains(label, known, pool)
    stride = 1 + int(pool.max(initial=0))
    drawn, counts = np.unique(np.nonzero(fresh)[0] * stride + pool[fresh], return_counts=True)
    random_weights = (counts * weight).astype(np.float32)
    weights = np.concatenate([_weights(batch.positives, positive, positive_weight), random_weights])
    query = np.concatenate([query, drawn // stride])
    label = np.concatenate([label, drawn % stride])
    positive = np.concatenate([positive, np.zeros(len(drawn), bool)])
    order = np.argsort(query, kind="stable")
    ids, index = np.unique(label, return_inverse=True)
    none = np.empty(0, np.int64)
    return Candidates(
        ids=ids,
        pair_query=query[order],
        pair_label=index[order],
        pair_positive=positive[order],
        pair_weight=weights[order],
        pool_weight=np.empty(0, np.float32),
        struck_query=none,
        struck_pool=none,
    )


def label_range(batch: Batch, start: int, stop: int, positive_weight: np.ndarray | None = None) -> Candidates:
    """Every label of [start, stop) for every query, counted once: a chunk of one-vs-all (ASTRA, equation 1)."""
    inside = (batch.positives >= start) & (batch.positives < stop)
    query = np.repeat(np.arange(len(batch)), np.diff(batch.positive_offsets))[inside]
    label = batch.positives[inside].astype(np.int64) - start
    positive = np.ones(len(label), bool)
    return Candidates(
        ids=np.arange(start, stop),
        pair_query=query,
        pair_label=label,
        pair_positive=positive,
        pair_weight=_weights(batch.positives[inside], positive, positive_weight),
        pool_weight=np.ones(stop - start, np.float32),
        struck_query=query,
        struck_pool=label,
    )


def _weights(positives: np.ndarray, positive: np.ndarray, positive_weight: np.ndarray | None) -> np.ndarray:
    """1 for every pair; for the positives, in the order of the pairs, their label's weight where there is one."""
    weights = np.ones(len(positive), np.float32)
    if positive_weight is not None:
        weights[positive] = positive_weight[positives]
    return weights
