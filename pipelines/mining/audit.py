"""Quality and cost of a mining run, stored with its tables.

A sample of rows is used to measure recall against exact search, the hardness of the negatives, and the fraction of
negatives that the previous table also contains. This fraction shows how fast negatives become stale. A profile records
the seconds per stage and the peak memory.
"""

import contextlib
import ctypes
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.mining.filters import weakest_positives
from pipelines.mining.inputs import EmbeddedSource
from schemas.errors import ExtremisError
from schemas.layout import RunLayout
from schemas.process import peak_bytes
from schemas.ragged import Ragged
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table, run_tables
from search.exclusions import Exclusions, ScoreRule, merge_passed, positive_scores, start_search
from search.topk import Block, unpack

_QUANTILES = {"p01": 0.01, "p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


class Audit(NamedTuple):
    """Results of exact search for S sampled rows.

    `exact` [S, F] are the best keys, excluding positives and filtered labels. `positive_scores` float32 [V] are the
    scores of positives, and `positive_rows` int64 [V] in [0, S) are the sampled rows of these positives.
    """

    exact: np.ndarray
    positive_rows: np.ndarray
    positive_scores: np.ndarray


def audit_block(block: Block, queries: np.ndarray, exclusions: Exclusions, width: int, rule: ScoreRule | None) -> Audit:
    """Search one block exactly for sampled queries [S, D], and score their positives in this block."""
    exact = start_search(block.exact, queries, exclusions, width, rule=rule)()
    return Audit(exact, *positive_scores(block, queries, exclusions))


def stack(audits: Sequence[Audit], width: int) -> Audit:
    """Concatenate the audits of different rows."""
    parts, rows = [Audit(np.empty((0, width), np.uint64), np.empty(0, np.int64), np.empty(0, np.float32))], 0
    for audit in audits:
        parts.append(audit._replace(positive_rows=audit.positive_rows + rows))
        rows += len(audit.exact)
    return Audit(*map(np.concatenate, zip(*parts, strict=True)))


def merge_audits(blocks: Sequence[Audit], width: int, rule: ScoreRule | None) -> Audit:
    """Merge audits of the same rows against different blocks into one audit against all labels."""
    exact, rows, scores = zip(*blocks, strict=True)
    return Audit(merge_passed(exact, width, rule), np.concatenate(rows), np.concatenate(scores))


def measure(table: np.ndarray, audit: Audit) -> dict[str, Any]:
    """Measure the quality of the sampled rows `table` (keys [S, K]) against exact search, `audit.exact` [S, K].

    recall_at_k: fraction of the negatives from exact search that the table contains. top1_above_weakest_positive: among
    rows with positives, the fraction of rows in which the hardest negative scores higher than the lowest-scoring
    positive.
    """
    label_ids, scores = unpack(table)
    exact, _ = unpack(audit.exact)
    hits, total = Ragged.from_matrix(exact).contains(label_ids).sum(), int((exact >= 0).sum())
    weakest = weakest_positives(len(table), audit.positive_rows, audit.positive_scores)
    some = np.isfinite(weakest)
    above = scores.max(axis=1, initial=-np.inf)[some] > weakest[some]
    return {
        "audit_queries": len(table),
        "recall_at_k": float(hits / total) if total else None,
        "score_quantiles": _quantiles(scores[label_ids >= 0]),
        "positive_score_quantiles": _quantiles(audit.positive_scores),
        "top1_above_weakest_positive": float(above.mean()) if above.size else None,
    }


def _quantiles(scores: np.ndarray) -> dict[str, float] | None:
    if not scores.size:
        return None
    values = np.quantile(np.sort(scores).astype(np.float64), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, (float(value) for value in values), strict=True))


def find_previous(run: str, sources: Sequence[EmbeddedSource], use_from: int | None) -> dict[str, Table]:
    """Return the run's newest tables of the same rows for an epoch before `use_from`, by source."""
    found = {}
    for source in sources:
        queries = source.queries
        for newest in itertools.islice(run_tables(RunLayout(run), source.name, before=use_from), 1):
            same = [shard.rows for shard in newest.table.shards] == [shard.rows for shard in queries.shards]
            same = same and newest.table.ids_of == source.ids_of
            if same and newest.table.parents["queries"] == queries.digest:
                found[source.name] = newest.table
    return found


def overlaps(previous: Table, shard: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray | None:
    """Return the fraction [S] of the negatives (keys [S, K]) of `rows` int64 [S] that `previous` also contains.

    Rows without negatives are left out. Returns None if the previous table is incomplete: another process may replace
    the table at any time.
    """
    label_ids, _ = unpack(keys)
    shares, first = [np.empty(0)], 0
    try:
        for table in previous.batches_of(shard, ["label_ids"]):
            inside = (rows >= first) & (rows < first + table.num_rows)
            old = matrix_column(table, "label_ids")[rows[inside] - first]
            new = label_ids[inside]
            hits = Ragged.from_matrix(np.sort(old, axis=1)).contains(new)
            sizes = (new >= 0).sum(axis=1)
            shares.append(hits.sum(axis=1)[sizes > 0] / sizes[sizes > 0])
            first += table.num_rows
    except (ExtremisError, IndexError):
        return None
    return np.concatenate(shares)


@dataclass
class Profile:
    """Profile of one or several work items: seconds are summed over workers, the peak is the maximum over processes."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the time and the peak memory of the `with` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.peak_bytes = max(self.peak_bytes, peak_bytes())

    def add(self, other: "Profile") -> "Profile":
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        return self

    def as_json(self) -> dict[str, Any]:
        seconds = {name: round(value, 3) for name, value in sorted(self.seconds.items())}
        return {"seconds": seconds, "peak_bytes": self.peak_bytes}


def release_memory() -> None:
    """Return the memory of a discarded block to the system, so that the next block can use it."""
    gc.collect()  # an error that was caught may be part of a cycle, with the frames that read the block
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
