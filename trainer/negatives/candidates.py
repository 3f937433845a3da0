"""Candidates of a batch from its positives, hard negatives and draws: each label once, and its use by each query."""

import numpy as np
import torch

from schemas import PAD
from schemas.ragged import Ragged
from schemas.randomness import Purpose, generator
from trainer.negatives.merge import merge, merge_with_pool, side_by_side
from trainer.stream.batch import Batch, Candidates, DrawnLabels

_NONE = np.empty(0, np.int64)


def join_hard(batch: Batch, hard: np.ndarray | None, others: np.ndarray) -> np.ndarray:
    """Join `others` [B, k] to hard negatives of the batch: each label once a query, and none of its positives."""
    others = np.sort(others.astype(np.int64, copy=False), axis=1)
    others[:, 1:][others[:, 1:] == others[:, :-1]] = PAD
    others[Ragged(batch.positives, batch.positive_offsets).contains(others)] = PAD
    if hard is None:
        return others
    others[Ragged.from_matrix(hard).contains(others)] = PAD
    return np.concatenate([hard, others], axis=1)


def shared_pool(
    batch: Batch,
    hard: np.ndarray | None,
    pool: np.ndarray,
    weight: float | np.ndarray,
    positive_weight: np.ndarray | None = None,
) -> Candidates:
    """Build candidates with one random pool for the whole batch.

    `pool` [k_r]: draws with replacement; each counts `weight` (L / k_r for an unbiased sum over every label outside
    P and H), or, as an array [L], its label's; repeated draws count repeatedly. A query's own P and H are masked in
    its pool. `positive_weight` [L], where given, weights the positives.
    """
    scalar = 1.0 if isinstance(weight, np.ndarray) else weight
    candidates = Candidates(*merge_with_pool(batch.positives, batch.positive_offsets, hard, pool, scalar))
    if isinstance(weight, np.ndarray):
        candidates.pool_weight[:] *= weight[candidates.ids[: len(candidates.pool_weight)]]
    if positive_weight is not None:
        candidates.pair_weight[candidates.pair_positive] = positive_weight[batch.positives]
    return candidates


def own_pool(
    batch: Batch,
    hard: np.ndarray | None,
    pool: np.ndarray,
    weight: float | np.ndarray,
    positive_weight: np.ndarray | None = None,
) -> Candidates:
    """Build candidates with a random pool for each query: `pool` [B, k_r], draws with replacement from [0, L), -1 pads.

    Draws that hit the query's own P or H are dropped; the others count `weight` each, as in `shared_pool`. What a
    query draws twice is one pair of twice the weight, so there are never more pairs than queries times labels.
    """
    rows = batch.positives, batch.positive_offsets, hard, pool
    if isinstance(weight, np.ndarray):
        pairs = merge(*rows, weight_of_others=0.0)
        weights = np.where(pairs.weight > 0, pairs.weight * weight[pairs.ids[pairs.place]], 1).astype(np.float32)
        pairs = pairs._replace(weight=weights)
    else:
        pairs = merge(*rows, weight)
    if positive_weight is not None:
        pairs.weight[pairs.positive] = positive_weight[batch.positives]
    return Candidates(*pairs, pool_weight=np.empty(0, np.float32), masked_query=_NONE, masked_pool=_NONE)


def drawn_labels(
    batch: Batch,
    hard: np.ndarray | torch.Tensor | None,
    pool: np.ndarray,
    weight: float | np.ndarray,
    positive_weight: np.ndarray | None = None,
) -> Candidates:
    """Build the candidates of `own_pool` for a device that merges them itself; `hard` may be there already."""
    late = hard if isinstance(hard, torch.Tensor) else None
    places = np.full(hard.shape, PAD, np.int32) if isinstance(hard, torch.Tensor) else hard
    labels = side_by_side(batch.positives, batch.positive_offsets, places, pool, with_pads=late is not None)
    weights = _pair_weights(batch.positives, labels.positive, positive_weight)
    weights[labels.draw] = weight[labels.label[labels.draw]] if isinstance(weight, np.ndarray) else weight
    hard_starts = None if late is None else labels.starts[:-1] + np.diff(batch.positive_offsets)
    return Candidates.to_merge(DrawnLabels(*labels[:3], weights, labels.starts, late, hard_starts))


def draw_positives(batch: Batch, count: int, seed: int) -> np.ndarray | None:
    """Draw the positives that the step learns, [sum P] bool: `count` of each query's; None for all (0)."""
    if not count:
        return None
    offsets = batch.positive_offsets
    query = np.repeat(np.arange(len(batch)), np.diff(offsets))
    order = np.lexsort((generator(seed, Purpose.POSITIVES, batch.epoch, batch.step).random(len(query)), query))
    drawn = np.empty(len(query), bool)
    drawn[order] = np.arange(len(query)) - offsets[query] < count
    return drawn


def labels_of(batch: Batch, hard: np.ndarray | None, drawn: np.ndarray | None = None) -> np.ndarray:
    """Return the labels that a batch brings, ascending and each once, int64 [C]: positives and negatives `hard`.

    Of the positives those that are `drawn` [sum P], all where it is None.
    """
    negatives = np.empty(0, np.int64) if hard is None else hard.ravel()
    positives = batch.positives if drawn is None else batch.positives[drawn]
    ids = np.unique(np.concatenate([positives.astype(np.int64), negatives]))
    return ids[ids != PAD]


def every_query_with(
    batch: Batch, ids: np.ndarray, positive_weight: np.ndarray | None = None, drawn: np.ndarray | None = None
) -> Candidates:
    """Build candidates of the labels `ids` [C] int64, ascending, for every query; positives are masked in the pool.

    Positives that are `drawn` [sum P] are learnt, all where it is None.
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
        pair_weight=_pair_weights(ids[place[learnt]], positive, positive_weight),
        pool_weight=np.ones(len(ids), np.float32),
        masked_query=query,
        masked_pool=place,
    )


def label_range(batch: Batch, start: int, stop: int, positive_weight: np.ndarray | None = None) -> Candidates:
    """Build candidates of every label of [start, stop) for every query: a chunk of one-vs-all (ASTRA, equation 1)."""
    return every_query_with(batch, np.arange(start, stop), positive_weight)


def _pair_weights(positives: np.ndarray, positive: np.ndarray, positive_weight: np.ndarray | None) -> np.ndarray:
    """Return the weights of pairs: for positives, in their order, that of their label where there is one, else 1."""
    weights = np.ones(len(positive), np.float32)
    if positive_weight is not None:
        weights[positive] = positive_weight[positives]
    return weights
