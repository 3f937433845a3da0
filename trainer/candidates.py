"""Which labels each query is scored against: positives, hard and random negatives (ASTRA, Algorithm 1)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas.ragged import contains
from schemas.tables import PAD
from trainer.config import Negatives
from trainer.randomness import generator
from trainer.stream.batch import Batch


@dataclass(frozen=True)
class Candidates:
    """Labels to score, each once, and how queries use them.

    `ids` [C] int64: the rows of the classifier that the step touches. The first R of them are the shared pool: every
    query is scored against it with `pool_weight` [R] float32, except for what is its own positive or hard negative,
    (`struck_query`, `struck_pool`) [m]. Pairs score one query against one label: `pair_query` [n] ascending,
    `pair_label` [n] (index into ids), `pair_positive` [n] bool, `pair_weight` [n] float32.
    """

    ids: np.ndarray
    pair_query: np.ndarray
    pair_label: np.ndarray
    pair_positive: np.ndarray
    pair_weight: np.ndarray
    pool_weight: np.ndarray
    struck_query: np.ndarray
    struck_pool: np.ndarray


def plan_candidates(
    batch: Batch, options: Negatives, labels: int, seed: int, positive_weight: np.ndarray | None = None
) -> Iterator[Candidates]:
    """What a batch is scored against under `options`: one set, or chunks of all L labels (`pool = "all"`)."""
    if options.pool == "all":
        for start in range(0, labels, options.chunk):
            yield label_range(batch, start, min(start + options.chunk, labels), positive_weight)
        return
    at = {"seed": seed, "epoch": batch.epoch, "step": batch.step}
    hard = None if batch.hard is None else draw_hard(batch.hard, options.hard, **at)
    # Algorithm 1, step 8: before the first table, k_h + k_r negatives are all random.
    size = options.random if hard is not None else options.warmup or options.random + options.hard
    weight = labels / size if options.reweight and size else 1.0
    if options.pool == "shared":
        yield shared_pool(batch, hard, draw_pool(labels, size, **at), weight, positive_weight)
    else:
        pool = draw_pool(labels, size * len(batch), **at).reshape(len(batch), size)
        yield own_pool(batch, hard, pool, weight, positive_weight)


def draw_pool(labels: int, size: int, *, seed: int, epoch: int, step: int, stream: int = 0) -> np.ndarray:
    """`size` labels drawn uniformly with replacement from [0, labels), int64."""
    return generator(seed, "random pool", epoch, step, stream).integers(0, labels, size)


def draw_hard(hard: np.ndarray, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """`count` of the table's K columns [B, count], drawn anew each step; all of them where count = K."""
    if count >= hard.shape[1]:
        return hard
    columns = generator(seed, "hard columns", epoch, step).permutation(hard.shape[1])[:count]
    return hard[:, columns]


def known_pairs(batch: Batch, hard: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P and H of every query as (query, label, is positive), sorted by query, positives first. Pads are left out."""
    size = len(batch)
    query = np.repeat(np.arange(size), np.diff(batch.positive_offsets))
    label = batch.positives.astype(np.int64)
    positive = np.ones(len(label), bool)
    if hard is None or not hard.size:
        return query, label, positive
    kept = hard != PAD
    query = np.concatenate([query, np.repeat(np.arange(size), kept.sum(1))])
    label = np.concatenate([label, hard[kept].astype(np.int64)])
    positive = np.concatenate([positive, np.zeros(len(label) - len(positive), bool)])
    order = np.argsort(query, kind="stable")
    return query[order], label[order], positive[order]


def shared_pool(
    batch: Batch, hard: np.ndarray | None, pool: np.ndarray, weight: float, positive_weight: np.ndarray | None = None
) -> Candidates:
    """Candidates with one random pool for the whole batch.

    `pool` [k_r]: draws with replacement; each counts `weight` (L / k_r for an unbiased sum over every label outside
    P and H), and repeated draws count repeatedly. A query's own P and H are struck from its pool. `positive_weight`
    [L], where given, weights the positives.
    """
    query, label, positive = known_pairs(batch, hard)
    drawn, counts = np.unique(pool, return_counts=True)
    place = np.searchsorted(drawn, label)
    struck = (place < len(drawn)) & (drawn[np.minimum(place, len(drawn) - 1)] == label) if len(drawn) else place < 0
    others = np.unique(label[~struck])
    return Candidates(
        ids=np.concatenate([drawn, others]),
        pair_query=query,
        pair_label=np.where(struck, place, len(drawn) + np.searchsorted(others, label)),
        pair_positive=positive,
        pair_weight=_weights(label, positive, positive_weight),
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
    query, label, positive = known_pairs(batch, hard)
    known = np.concatenate([[0], np.cumsum(np.bincount(query, minlength=len(batch)))])
    fresh = ~contains(label, known, pool)
    stride = 1 + int(pool.max(initial=0))
    drawn, counts = np.unique(np.nonzero(fresh)[0] * stride + pool[fresh], return_counts=True)
    random_weights = (counts * weight).astype(np.float32)
    weights = np.concatenate([_weights(label, positive, positive_weight), random_weights])
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
        pair_weight=_weights(label + start, positive, positive_weight),
        pool_weight=np.ones(stop - start, np.float32),
        struck_query=query,
        struck_pool=label,
    )


def _weights(label: np.ndarray, positive: np.ndarray, positive_weight: np.ndarray | None) -> np.ndarray:
    if positive_weight is None:
        return np.ones(len(label), np.float32)
    return np.where(positive, positive_weight[label], 1.0).astype(np.float32)
