"""The post-filter of every search: a row's positives and filtered labels are no negatives."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from search.block import Block, score, search
from search.candidates import EMPTY, best, unpack


@dataclass(frozen=True)
class Exclusions:
    """Labels to drop from each of B rows."""

    positives: Ragged
    filtered: Ragged

    @classmethod
    def of(cls, table: pa.Table) -> "Exclusions":
        """Read them from rows of a queries table, or of a labels table: a label's only positive is itself."""
        if "label_ids" in table.column_names:
            positives = list_column(table, "label_ids")
        else:
            positives = Ragged(table.column("label_id").to_numpy(), np.arange(table.num_rows + 1))
        return cls(positives, filters_of(table))

    def take(self, rows: np.ndarray) -> "Exclusions":
        """Return those of rows `rows` [B'] in that order."""
        return Exclusions(self.positives.take(rows), self.filtered.take(rows))

    def count_in(self, start: int, stop: int) -> np.ndarray:
        """Count the labels of [start, stop) that each row loses, at most: int64 [B]."""
        inside = (ids.keep((ids.values >= start) & (ids.values < stop)) for ids in (self.positives, self.filtered))
        return sum((ids.counts for ids in inside), np.zeros(self.positives.rows, np.int64))

    def concat(self, other: "Exclusions") -> "Exclusions":
        """Return these rows, then those of `other`."""
        return Exclusions(self.positives.concat(other.positives), self.filtered.concat(other.filtered))


def search_negatives(
    block: Block,
    queries: np.ndarray,
    exclusions: Exclusions,
    width: int,
    counts: Counter[str] | None = None,
    refine: int = 1,
) -> np.ndarray:
    """Return keys [B, width] of the block's best labels that are not excluded for the row: queries float32 [B, D].

    Fetches as many more as each row can lose, so that a row keeps `width` wherever the block has as many labels left.
    `counts` gets the candidates that were fetched, and those of them that were dropped, by reason.
    """
    keys = np.full((len(queries), width), EMPTY)
    losses = exclusions.count_in(block.start, block.stop)
    for rows in _tiers(losses):
        fetch = min(len(block.vectors), width + int(losses[rows].max()))
        fetched = search(block, queries[rows], fetch, refine)
        keys[rows] = best(_drop_excluded(fetched, exclusions.take(rows), counts), width)
    return keys


def positive_scores(block: Block, queries: np.ndarray, exclusions: Exclusions) -> tuple[np.ndarray, np.ndarray]:
    """Return (row int64 [V], score float32 [V]) of every positive that lies in the block."""
    rows, labels = exclusions.positives.row_of(), exclusions.positives.entries
    inside = (labels >= block.start) & (labels < block.stop)
    rows, positions = rows[inside], labels[inside].astype(np.int64) - block.start
    return rows, score(queries[rows], block.vectors, positions[:, None])[:, 0]


def _drop_excluded(keys: np.ndarray, exclusions: Exclusions, counts: Counter[str] | None) -> np.ndarray:
    label_ids, _ = unpack(keys)
    positive = exclusions.positives.contains(label_ids)
    filtered = exclusions.filtered.contains(label_ids) & ~positive
    if counts is not None:
        candidates = int((keys != EMPTY).sum())
        counts.update(
            candidates=candidates, positives_dropped=int(positive.sum()), filtered_dropped=int(filtered.sum())
        )
    return np.where(positive | filtered, EMPTY, keys)


def _tiers(losses: np.ndarray) -> Iterator[np.ndarray]:
    """Yield rows to search together: one row with a thousand positives must not widen the search of all others."""
    tiers = np.ceil(np.log2(np.maximum(losses, 32)))
    for tier in np.unique(tiers):
        yield np.flatnonzero(tiers == tier)
