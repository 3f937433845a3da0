"""Votes of training points: each point votes for each of its labels; the nearer a point, the larger its vote."""

import numpy as np

from schemas import PAD
from schemas.ragged import Ragged, SparseRows, is_first_key, offsets_of

NEIGHBOURS = 30
TEMPERATURE = 0.05


def count_votes(
    similarity: np.ndarray, rows: np.ndarray, labels: Ragged, temperature: float = TEMPERATURE
) -> SparseRows:
    """Count votes for labels: `rows` [B, K] int64 are the nearest training points, padded with -1, `similarity` [B, K].

    A point's vote is softmax(similarity / temperature) over a query's K points. Each of the point's labels gets the
    whole vote, so a label of all K points gets 1. `labels`: the labels of all points. Returns each query's labels,
    ascending, with votes.
    """
    listed, weight = rows != PAD, shares_of(similarity, rows, temperature)
    voted = labels.take(rows[listed])
    query, share = listed.nonzero()[0].repeat(voted.counts), weight[listed].repeat(voted.counts)
    stride = 1 + int(voted.values.max(initial=0))
    key = query * stride + voted.values
    order = key.argsort(kind="stable")
    key = key[order]
    first = is_first_key(key)
    votes = np.bincount(first.cumsum() - 1, share[order]).astype(np.float32)
    row, label = np.divmod(key[first], stride)
    return SparseRows(label, votes, offsets_of(np.bincount(row, minlength=len(rows))))


def shares_of(similarity: np.ndarray, rows: np.ndarray, temperature: float = TEMPERATURE) -> np.ndarray:
    """Return the votes of points, float64 [B, K]; arguments as in `count_votes`."""
    listed = rows != PAD
    scaled = np.where(listed, similarity.astype(np.float64) / temperature, -np.inf)
    weight = np.exp(scaled - np.where(listed.any(1), scaled.max(1, initial=-np.inf), 0)[:, None])
    return weight / np.maximum(weight.sum(1, keepdims=True), 1e-300)


def votes_of(votes: SparseRows, ids: np.ndarray) -> np.ndarray:
    """Return the votes for labels `ids` [B, K], float32; 0 for labels without votes and for padding (-1)."""
    stride = 2 + max(int(votes.ids.max(initial=0)), int(ids.max(initial=0)))
    keys = votes.row_of() * stride + votes.ids
    sought = np.arange(votes.rows)[:, None] * stride + ids
    if not len(keys):
        return np.zeros(ids.shape, np.float32)
    place = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
    return np.where((keys[place] == sought) & (ids != PAD), votes.values[place], np.float32(0))
