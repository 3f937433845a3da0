"""Build a batch's candidates from positives, hard negatives and draws: distinct labels, and which queries use them."""

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch

from schemas import PAD
from schemas.ragged import Ragged
from schemas.randomness import Purpose, generator
from trainer.negatives.draws import splitmix64
from trainer.negatives.merge import LabelLists, concatenate_labels, merge, merge_with_pool
from trainer.stream.batch import Batch, Candidates


def join_hard(batch: Batch, hard: np.ndarray | None, others: np.ndarray) -> np.ndarray:
    """Append `others` [B, k] to the hard negatives, without repeated labels and positives of the query."""
    others = np.sort(others.astype(np.int64, copy=False), axis=1)
    others[:, 1:][others[:, 1:] == others[:, :-1]] = PAD
    others[Ragged(batch.positives, batch.positive_offsets).contains(others)] = PAD
    if hard is None:
        return others
    others[Ragged.from_matrix(hard).contains(others)] = PAD
    return np.concatenate([hard, others], axis=1)


def shared_pool(batch: Batch, hard: LabelLists, pool: np.ndarray, weight: float | np.ndarray) -> Candidates:
    """Build candidates with one random pool for the whole batch.

    `pool` [k_r]: draws with replacement. Each draw has the weight `weight` (L / k_r for an unbiased sum over every
    label outside P and H), or the weight of its label if `weight` is an array [L]; a label counts once for each time it
    is drawn. For each query, its positives P and hard negatives H are masked in the pool.
    """
    scalar = 1.0 if isinstance(weight, np.ndarray) else weight
    candidates = merge_with_pool(batch.positives, batch.positive_offsets, hard, pool, scalar)
    if isinstance(weight, np.ndarray):
        candidates.pool_weight[:] *= weight[candidates.ids[: len(candidates.pool_weight)]]
    return candidates


def own_pool(batch: Batch, hard: LabelLists, pool: np.ndarray | Ragged, weight: float | np.ndarray) -> Candidates:
    """Build candidates with a random pool per query: `pool` [B, k_r], or rows of random draws, padded with -1.

    A draw that is already a positive or hard negative of the query is dropped; every other draw has the weight
    `weight`, as in `shared_pool`. A label that a query draws twice is one pair with twice the weight, so the number of
    pairs is at most the number of queries times the number of labels.
    """
    rows = batch.positives, batch.positive_offsets, hard, pool
    if not isinstance(weight, np.ndarray):
        return merge(*rows, weight)
    pairs = merge(*rows, weight_of_others=0.0)
    weights = np.where(pairs.pair_weight > 0, pairs.pair_weight * weight[pairs.ids[pairs.pair_label]], 1)
    return pairs._replace(pair_weight=weights.astype(np.float32))


def unmerged_candidates(
    batch: Batch, hard: LabelLists | torch.Tensor, pool: np.ndarray | Ragged, weight: float | np.ndarray
) -> Candidates:
    """Build the candidates of `own_pool` for a device that merges them itself; `hard` may already be on the device."""
    late = hard if isinstance(hard, torch.Tensor) else None
    places = np.full(hard.shape, PAD, np.int32) if isinstance(hard, torch.Tensor) else hard
    scalar = 1.0 if isinstance(weight, np.ndarray) else weight
    labels = concatenate_labels(
        batch.positives, batch.positive_offsets, places, pool, scalar, with_pads=late is not None
    )
    if isinstance(weight, np.ndarray):
        draws = labels.use & 1 == 1
        labels.weight[draws] = weight[labels.label[draws]]
    hard_starts = None if late is None else labels.starts[:-1] + np.diff(batch.positive_offsets)
    drawn = replace(labels, hard=late, hard_starts=hard_starts)
    none = np.empty(0, np.int64)
    return Candidates(none, none, none, np.empty(0, bool), np.empty(0, np.float32), drawn=drawn)


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
    base = 1 << 40  # labels are below 2**40 (`merge`)
    codes = filtered.row_of() * base + filtered.entries
    if (drawn := candidates.drawn) is not None:
        gone = np.isin((drawn.use >> 1).astype(np.int64) * base + drawn.label, codes) & (drawn.weight > 0)
        return candidates._replace(drawn=replace(drawn, weight=np.where(gone, np.float32(0), drawn.weight)))
    ids, drawn_ids = candidates.ids, candidates.ids[: len(candidates.pool_weight)]
    some = np.flatnonzero(np.isin(ids, filtered.entries)[candidates.pair_label] & ~candidates.pair_positive)
    gone = np.isin(candidates.pair_query[some].astype(np.int64) * base + ids[candidates.pair_label[some]], codes)
    kept = np.ones(len(candidates.pair_label), bool)
    kept[some[gone]] = False
    pairs = {name: getattr(candidates, name)[kept] for name in candidates._fields if name.startswith("pair_")}
    masked = candidates.masked_query.astype(np.int64) * base + drawn_ids[candidates.masked_pool]
    new = np.setdiff1d(codes[np.isin(codes % base, drawn_ids)], masked)
    query = np.append(candidates.masked_query, new // base).astype(candidates.masked_query.dtype)
    pool = np.append(candidates.masked_pool, np.searchsorted(drawn_ids, new % base))
    return candidates._replace(**pairs, masked_query=query, masked_pool=pool.astype(candidates.masked_pool.dtype))


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
    """Return label ids counted from `start`.

    Ids outside [start, stop) become padding in a matrix [B, k], and are removed from rows.
    """
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


def distinct_labels(batch: Batch, hard: LabelLists, drawn: np.ndarray | None = None) -> np.ndarray:
    """Return the distinct labels of a batch, ascending, int64 [C]: its positives and the negatives `hard`.

    Only the `drawn` positives [sum P] are included; None: all positives.
    """
    negatives = np.empty(0, np.int64) if hard is None else hard.values if isinstance(hard, Ragged) else hard.ravel()
    positives = batch.positives if drawn is None else batch.positives[drawn]
    ids = np.unique(np.concatenate([positives.astype(np.int64), negatives]))
    return ids[ids != PAD]


def candidates_for_every_query(
    batch: Batch, ids: np.ndarray, positive_weight: np.ndarray | None = None, drawn: np.ndarray | None = None
) -> Candidates:
    """Build candidates that score every query against the labels `ids` [C] int64, ascending.

    Positives are masked in the pool. The step trains on the `drawn` positives [sum P]; None: all positives.
    """
    query = np.repeat(np.arange(len(batch)), np.diff(batch.positive_offsets))
    place = np.searchsorted(ids, batch.positives)
    inside = place < len(ids)
    inside[inside] = ids[place[inside]] == batch.positives[inside]
    query, place = query[inside], place[inside].astype(np.int64)
    drawn_positives = slice(None) if drawn is None else drawn[inside]
    label = place[drawn_positives]
    weight = np.ones(len(label)) if positive_weight is None else positive_weight[ids[label]]
    return Candidates(
        ids=ids,
        pair_query=query[drawn_positives],
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
