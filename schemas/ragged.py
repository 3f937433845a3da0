"""Ragged rows of label ids: membership, and striking ids out of a ranking.

A ragged column is `values` [V] and `offsets` [B + 1], as in an Arrow list array: row i is the half-open range
`values[offsets[i]:offsets[i + 1]]`, and `offsets[0]` need not be 0. Negative ids are pads wherever they stand.
"""

import numpy as np

from schemas.tables import PAD


def longest(offsets: np.ndarray) -> int:
    """The most entries of any row of `offsets` [B + 1]; 0 without rows."""
    return int(np.diff(offsets).max(initial=0))


def no_entries(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`rows` empty ragged rows: values [0] int64, offsets [rows + 1]."""
    return np.empty(0, np.int64), np.zeros(rows + 1, np.int64)


def taken(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places [V'] in the values, offsets [B' + 1]) of the ragged rows `rows` [B'], in that order."""
    lengths = np.diff(offsets)[rows]
    found = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(found[-1]) + np.repeat(offsets[rows] - found[:-1], lengths), found


def padded(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Ragged rows as int64 [B, the longest], with pads behind each."""
    sizes = np.diff(offsets)
    rows = np.full((len(sizes), longest(offsets)), PAD, np.int64)
    rows[np.arange(rows.shape[1]) < sizes[:, None]] = values[offsets[0] : offsets[-1]]
    return rows


def contains(values: np.ndarray, offsets: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Whether `ids[i, j]` is an entry of ragged row i: ids [B, K] integer -> bool [B, K]. Pads never are.

    Raises ValueError where `ids` and `offsets` differ in rows.
    """
    rows = len(offsets) - 1
    if ids.ndim != 2 or ids.shape[0] != rows:
        raise ValueError(f"ids are [B, K] with one row a ragged row; got {ids.shape}, expected ({rows}, K)")
    values = np.asarray(values[offsets[0] : offsets[-1]], dtype=np.int64)
    ids = ids.astype(np.int64, copy=False)
    # Row and id make one number, so that one binary search over all rows replaces a search a row.
    stride = 1 + max(int(values.max(initial=PAD)), int(ids.max(initial=PAD)))
    keys = (np.repeat(np.arange(rows), np.diff(offsets)) * stride + values)[values >= 0]
    if not keys.size or not ids.size:
        return np.zeros(ids.shape, dtype=bool)
    keys.sort()
    wanted = np.arange(rows)[:, None] * stride + ids
    nearest = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return (keys[nearest] == wanted) & (ids >= 0)


def strike(
    ids: np.ndarray, scores: np.ndarray, values: np.ndarray, offsets: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best `k` of each ranking that are not in its ragged row; pads of -1 and -inf fill what is missing.

    ids [B, K'] best first, scores [B, K'] floating -> ids [B, k], scores [B, k] of the same dtypes, order kept.
    The result is that of striking before ranking where K' >= min(L, k + longest(offsets)).
    Raises ValueError where `ids` and `offsets` differ in rows.
    """
    gone = contains(values, offsets, ids) | (ids < 0)
    order = np.argsort(gone, axis=1, kind="stable")[:, :k]
    gone = np.take_along_axis(gone, order, axis=1)
    kept = np.where(gone, ids.dtype.type(PAD), np.take_along_axis(ids, order, axis=1))
    kept_scores = np.where(gone, scores.dtype.type(-np.inf), np.take_along_axis(scores, order, axis=1))
    missing = ((0, 0), (0, k - kept.shape[1]))
    return (
        np.pad(kept, missing, constant_values=PAD),
        np.pad(kept_scores, missing, constant_values=-np.inf),
    )
