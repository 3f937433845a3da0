"""Filter search results: remove a row's positives, labels with the same text as a positive, and filtered labels."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from search.topk import EMPTY, Block, best, merge, score, search, unpack


class Subbatches(NamedTuple):
    """Division of a batch into sub-batches of at most `max_rows` rows.

    `run` is the function that searches the sub-batches: `map`, or the `map` of a pool.
    """

    run: Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]] = map
    max_rows: int | None = None


WHOLE_BATCH = Subbatches()
DEEPEST = 8192  # ranks of a block that are searched at most for rows that a rule leaves short
_DEEPER = 4  # factor from one search of such rows to the next
_USUAL = 64  # usual number of labels that a row may lose; rows that fetch more are searched in sub-batches


class Exclusions(NamedTuple):
    """Labels to drop from each of B rows.

    `same_text`: labels with the same text as a positive, including the positives.
    """

    positives: Ragged
    filtered: Ragged
    same_text: Ragged

    @classmethod
    def of(cls, table: pa.Table) -> "Exclusions":
        """Read exclusions from a table of queries or labels.

        Without `label_ids`, the only positive of a row is the row itself.
        """
        if "label_ids" in table.column_names:
            positives = list_column(table, "label_ids")
        else:
            own = "label_id" if "label_id" in table.column_names else "query_id"
            positives = Ragged(table.column(own).to_numpy(), np.arange(table.num_rows + 1))
        return cls(positives, filters_of(table), Ragged.empty(table.num_rows))

    @classmethod
    def join(cls, parts: Iterable["Exclusions"]) -> "Exclusions":
        """Return the exclusions of the rows of all `parts`, in order."""
        return cls(*map(Ragged.join, zip([Ragged.empty(0)] * 3, *parts, strict=True)))

    def take(self, rows: np.ndarray) -> "Exclusions":
        """Return the exclusions of `rows` [B'], in the order of `rows`."""
        return Exclusions(*(ids.take(rows) for ids in self))

    def count_in(self, start: int, stop: int) -> np.ndarray:
        """Return an upper bound on the number of labels in [start, stop) that each row loses, int64 [B]."""
        inside = (ids.keep((ids.values >= start) & (ids.values < stop)) for ids in self)
        return sum((ids.counts for ids in inside), np.zeros(self.positives.rows, np.int64))


class ScoreRule(NamedTuple):
    """A rule about scores that lets `enough` labels of every row pass, if a deeper search finds them.

    `drop(keys, rows, counts)` returns the keys [b, F] of `rows` [b], best first, with EMPTY for labels that do not
    pass, and counts these labels.
    """

    drop: Callable[[np.ndarray, np.ndarray, Counter[str]], np.ndarray]
    enough: int


def start_search(
    block: Block,
    queries: np.ndarray,
    exclusions: Exclusions,
    width: int,
    counts: Counter[str] | None = None,
    refine: int = 1,
    subbatches: Subbatches = WHOLE_BATCH,
    rule: ScoreRule | None = None,
) -> Callable[[], np.ndarray]:
    """Start a search of the block for the best labels of queries float32 [B, D], without excluded labels.

    Call the returned function to wait for the keys [B, width]. The search fetches one extra candidate for each
    candidate that a row can lose, so `width` labels remain if the block has enough labels. Rows in which `rule` leaves
    too few of these labels are searched again, four times as deep each time, up to the DEEPEST best labels. `counts` is
    updated with the number of fetched candidates, and of dropped candidates per reason.
    """
    keys = np.full((len(queries), width), EMPTY)
    losses = exclusions.count_in(block.start, block.stop)
    most = subbatches.max_rows or max(1, len(queries))

    def split(rows: np.ndarray, depth: int, loss: int) -> list[tuple[np.ndarray, int, int]]:
        fetch = min(len(block.vectors), depth + loss)
        step = max(1, most * min(fetch, width + _USUAL) // max(1, fetch))
        return [(rows[at : at + step], depth, loss) for at in range(0, len(rows), step)]

    def search_rows(part: tuple[np.ndarray, int, int]) -> Counter[str]:
        total, parts = Counter[str](), [part]
        for rows, depth, loss in parts:  # no recursion: a function that refers to itself would keep the block in memory
            fetched = search(block, queries[rows], min(len(block.vectors), depth + loss), refine)
            left, dropped = drop_excluded(fetched, exclusions.take(rows))
            if rule is not None:
                left, by_rule = best(left, depth), Counter[str]()
                passed = rule.drop(left, rows, by_rule)
                short = ((passed != EMPTY).sum(axis=1) < rule.enough) & (left[:, -1] != EMPTY)
                if depth < min(DEEPEST, len(block.vectors)) and short.any():
                    parts += split(rows[short], min(_DEEPER * depth, DEEPEST), loss)
                    rows, by_rule = rows[~short], Counter()
                    dropped = drop_excluded(fetched[~short], exclusions.take(rows))[1]
                    passed = rule.drop(left[~short], rows, by_rule)
                left = passed
                total.update(by_rule)
            keys[rows] = best(left, width)
            total.update(dropped)
        return total

    # Rows of similar losses are searched together, so that a row with a thousand positives does not slow down the other
    # rows. The number to fetch depends on the whole batch, so that a search in sub-batches finds the same labels.
    tiers = np.ceil(np.log2(np.maximum(losses, 32)))
    together = [np.flatnonzero(tiers == tier) for tier in np.unique(tiers)]
    parts = [part for rows in together for part in split(rows, width, int(losses[rows].max()))]
    drops = subbatches.run(search_rows, parts)

    def finish() -> np.ndarray:
        for dropped in drops:
            if counts is not None:
                counts.update(dropped)
        return keys

    return finish


def merge_passed(blocks: Sequence[np.ndarray], width: int, rule: ScoreRule | None) -> np.ndarray:
    """Merge keys [B, F] of different blocks, as `merge` does, without keys that do not pass `rule`."""
    if rule is None:
        return merge(blocks, width)
    keys = np.sort(np.concatenate(blocks, axis=1), axis=1)
    return best(rule.drop(keys, np.arange(len(keys)), Counter()), width)


def positive_scores(block: Block, queries: np.ndarray, exclusions: Exclusions) -> tuple[np.ndarray, np.ndarray]:
    """Return (row int64 [V], score float32 [V]) of every positive in the block."""
    rows, labels = exclusions.positives.row_of(), exclusions.positives.entries
    inside = (labels >= block.start) & (labels < block.stop)
    rows, positions = rows[inside], labels[inside].astype(np.int64) - block.start
    return rows, score(queries[rows], block.vectors, positions[:, None])[:, 0]


def drop_excluded(keys: np.ndarray, exclusions: Exclusions) -> tuple[np.ndarray, Counter[str]]:
    """Return keys [B, F] with EMPTY for excluded labels, and the numbers of candidates and of drops per reason."""
    label_ids, _ = unpack(keys)
    dropped = Counter(candidates=int((keys != EMPTY).sum()))
    gone = np.zeros(keys.shape, bool)
    for ids, rule in zip(exclusions, ("positives_dropped", "filtered_dropped", "same_text_dropped"), strict=True):
        hits = ids.contains(label_ids) & ~gone
        dropped[rule] = int(hits.sum())
        gone |= hits
    return np.where(gone, EMPTY, keys), dropped
