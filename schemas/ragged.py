"""Ragged rows: lists of entries, and lists of (id, value) pairs.

As in an Arrow list array, row i is the half-open range `offsets[i]` to `offsets[i + 1]` of the entries; `offsets[0]`
need not be 0. A negative label id is padding, at any position in a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from schemas import PAD

_FEW = 8  # up to this many entries per row, comparing all entries costs less than a binary search
Kind = TypeVar("Kind", bound="_Rows")


class _Rows(tuple[np.ndarray, ...]):
    """B rows of entries: one or more columns [V], and `offsets` [B + 1] integer."""

    __slots__ = ()

    @property
    def rows(self) -> int:
        return len(self[-1]) - 1

    def row_of(self) -> np.ndarray:
        """Return the row of each entry, int64."""
        return np.arange(self.rows).repeat(counts_of(self[-1]))

    @classmethod
    def join(cls: type[Kind], parts: Iterable[Kind]) -> Kind:
        """Return the rows of all `parts` (at least one), in order."""
        own = [(*(column[part[-1][0] : part[-1][-1]] for column in part[:-1]), counts_of(part[-1])) for part in parts]
        *columns, counts = map(np.concatenate, zip(*own, strict=True))
        return cls(*columns, offsets_of(counts))  # type: ignore[call-arg]

    def slice(self: Kind, start: int, stop: int) -> Kind:
        """Return rows [start, stop); all but the offsets are views."""
        bounds = self[-1][start : stop + 1]
        return self._select(slice(bounds[0], bounds[-1]), bounds - bounds[0])

    def take(self: Kind, rows: np.ndarray) -> Kind:
        """Return the rows with indices `rows` [B'], in the order of `rows`."""
        starts = self[-1][rows]
        counts = self[-1][rows + 1] - starts
        offsets = offsets_of(counts)
        return self._select(np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts), offsets)

    def keep(self: Kind, mask: np.ndarray) -> Kind:
        """Return all rows, keeping only the entries for which `mask` [V] is true."""
        return self if mask.all() else self._select(mask, offsets_of(mask)[self[-1]])

    def _select(self: Kind, entries: Any, offsets: np.ndarray) -> Kind:
        return type(self)(*(column[entries] for column in self[:-1]), offsets)  # type: ignore[call-arg]


class _Ragged(NamedTuple):
    values: np.ndarray
    offsets: np.ndarray


class Ragged(_Rows, _Ragged):
    """B rows of entries: `values` [V], `offsets` [B + 1] integer."""

    __slots__ = ()

    @classmethod
    def from_counts(cls, values: np.ndarray, counts: np.ndarray) -> "Ragged":
        """Return rows of `counts` [B] entries; `values` contains the entries of all rows, end to end."""
        return cls(values, offsets_of(counts))

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Return the rows of `rows`, int64."""
        entries = np.array([entry for row in rows for entry in row], np.int64)
        return cls.from_counts(entries, np.array([len(row) for row in rows], np.int64))

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> "Ragged":
        """Return the rows of `matrix` [B, K]."""
        return cls(matrix.reshape(-1), np.arange(len(matrix) + 1) * matrix.shape[1])

    @classmethod
    def empty(cls, rows: int) -> "Ragged":
        """Return `rows` rows without entries, int64."""
        return cls(np.empty(0, np.int64), np.zeros(rows + 1, np.int64))

    @property
    def counts(self) -> np.ndarray:
        """Number of entries in each row, [B]."""
        return counts_of(self.offsets)

    @property
    def longest(self) -> int:
        """Number of entries in the longest row; 0 if there are no rows."""
        return int(self.counts.max(initial=0))

    @property
    def entries(self) -> np.ndarray:
        """Values of all rows as a view, without values before the first or after the last row."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    def padded(self) -> np.ndarray:
        """Return int64 [B, longest], padded at the end of each row."""
        rows = np.full((self.rows, self.longest), PAD, np.int64)
        rows[np.arange(rows.shape[1]) < self.counts[:, None]] = self.entries
        return rows

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Return whether `ids[i, j]` is an entry of row i: ids [B, K] integer -> bool [B, K], False for padding.

        Raises ValueError if `ids` has a different number of rows.
        """
        if ids.ndim != 2 or ids.shape[0] != self.rows:
            raise ValueError(f"expected ids of shape ({self.rows}, K), one row for each ragged row; got {ids.shape}")
        ids = ids.astype(np.int64, copy=False)
        if not len(self.entries):
            return np.zeros(ids.shape, dtype=bool)
        if self.longest <= _FEW:
            hits = np.zeros(ids.shape, dtype=bool)
            for column in self.padded().T:
                hits |= ids == column[:, None]
            return hits & (ids >= 0)
        values = np.asarray(self.entries, dtype=np.int64)
        # Row and id form one number, so that one binary search over all rows replaces a search per row.
        stride = 1 + max(int(values.max(initial=PAD)), int(ids.max(initial=PAD)))
        keys = (self.row_of() * stride + values)[values >= 0]
        if not keys.size or not ids.size:
            return np.zeros(ids.shape, dtype=bool)
        keys.sort()
        sought = np.arange(self.rows)[:, None] * stride + ids
        nearest = np.minimum(np.searchsorted(keys, sought), keys.size - 1)
        return (keys[nearest] == sought) & (ids >= 0)

    def filter_ranking(self, ids: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best `k` ids of each ranking that are not in its ragged row, padded with -1 and -inf.

        ids [B, K'] best first, scores [B, K'] floating -> ids [B, k], scores [B, k] of the same dtypes, in the same
        order. The result equals filtering before ranking if K' >= min(L, k + longest).
        Raises ValueError if `ids` has a different number of rows.
        """
        removed = self.contains(ids) | (ids < 0)
        if not removed.any():
            return pad_columns(ids[:, :k], k, PAD), pad_columns(scores[:, :k], k, -np.inf)
        order = np.argsort(removed, axis=1, kind="stable")[:, :k]
        removed = take_per_row(removed, order)
        kept = np.where(removed, ids.dtype.type(PAD), take_per_row(ids, order))
        kept_scores = np.where(removed, scores.dtype.type(-np.inf), take_per_row(scores, order))
        return pad_columns(kept, k, PAD), pad_columns(kept_scores, k, -np.inf)


class _SparseRows(NamedTuple):
    ids: np.ndarray
    values: np.ndarray
    offsets: np.ndarray


class SparseRows(_Rows, _SparseRows):
    """B sparse rows: `ids` [V] integer with `values` [V] float32, `offsets` [B + 1] integer.

    Features are int32 ids, sorted and unique within a row.
    """

    __slots__ = ()

    def best(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (values [B, k], ids int64 [B, k]), best first, ties by ascending id, padded with -inf and -1."""
        row = self.row_of()
        order = np.lexsort((self.ids, -self.values, row))
        rank = np.arange(len(row)) - self.offsets[row]
        kept = rank < k
        values, ids = np.full((self.rows, k), -np.inf, self.values.dtype), np.full((self.rows, k), PAD, np.int64)
        values[row[kept], rank[kept]] = self.values[order][kept]
        ids[row[kept], rank[kept]] = self.ids[order][kept]
        return values, ids


def pad_columns(rows: np.ndarray, width: int, fill: float | np.number = 0) -> np.ndarray:
    """Append `fill` to each row, up to [B, width]."""
    if rows.shape[1] == width:
        return rows
    wide = np.full((len(rows), width), fill, rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


def take_per_row(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the entries of each row [B, S] at positions `order` [B, k], five times as fast as np.take_along_axis."""
    return rows[np.arange(len(rows))[:, None], order]


def is_repeated(ids: np.ndarray) -> np.ndarray:
    """Return whether an id also occurs earlier in its row: ids [B, K] integer -> bool [B, K]."""
    order = np.argsort(ids, axis=1, kind="stable")
    ranked, again = take_per_row(ids, order), np.zeros(ids.shape, bool)
    again[np.arange(len(ids))[:, None], order[:, 1:]] = ranked[:, 1:] == ranked[:, :-1]
    return again


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Return the offsets, int64 [B + 1] and starting at 0, of rows with `counts` [B] entries."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    return offsets


def counts_of(offsets: np.ndarray) -> np.ndarray:
    """Return the number of entries in each row, [B], from `offsets` [B + 1]."""
    return offsets[1:] - offsets[:-1]


def is_first_key(keys: np.ndarray) -> np.ndarray:
    """Return whether each of the ascending `keys` [n] is the first key with its value, bool [n]."""
    first = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first


def batches_by_length(lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Yield batches of rows with the `lengths` [B], longest rows first; a padded batch has at most `budget` entries."""
    order, start = np.argsort(-lengths, kind="stable"), 0
    while start < len(order):
        stop = start + max(1, budget // max(1, int(lengths[order[start]])))
        yield order[start:stop]
        start = stop
