"""Quality of a table on a sample of its rows: recall against exact search, and how hard its negatives are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from schemas.ragged import Ragged
from search.block import Block
from search.candidates import merge, unpack
from search.exclusions import Exclusions, positive_scores, start_search

_QUANTILES = {"p01": 0.01, "p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


class Audit(NamedTuple):
    """Results of exact search for S sampled rows.

    `exact` [S, F] are the best keys without positives and filtered labels; `positive_scores` float32 [V] belong to the
    sampled rows `positive_rows` int64 [V] in [0, S).
    """

    exact: np.ndarray
    positive_rows: np.ndarray
    positive_scores: np.ndarray


def audit_block(block: Block, queries: np.ndarray, exclusions: Exclusions, width: int) -> Audit:
    """Search one block exactly for sampled queries [S, D], and score their positives in this block."""
    exact = start_search(block.exact, queries, exclusions, width)()
    rows, scores = positive_scores(block, queries, exclusions)
    return Audit(exact, rows, scores)


def stack(audits: Sequence[Audit], width: int) -> Audit:
    """Join audits of different rows."""
    firsts = np.cumsum([0, *(len(audit.exact) for audit in audits)])
    return Audit(
        np.concatenate([np.empty((0, width), np.uint64), *(audit.exact for audit in audits)]),
        np.concatenate(
            [np.empty(0, np.int64), *(a.positive_rows + first for a, first in zip(audits, firsts, strict=False))]
        ),
        np.concatenate([np.empty(0, np.float32), *(audit.positive_scores for audit in audits)]),
    )


def merge_audits(blocks: Sequence[Audit], width: int) -> Audit:
    """Merge audits of the same rows against different blocks into one against all labels."""
    return Audit(
        merge([audit.exact for audit in blocks], width),
        np.concatenate([audit.positive_rows for audit in blocks]),
        np.concatenate([audit.positive_scores for audit in blocks]),
    )


def weakest_positives(rows: int, audit: Audit) -> np.ndarray:
    """Return the lowest score among the positives of each sampled row: float32 [rows], infinity without any."""
    weakest = np.full(rows, np.inf, np.float32)
    np.minimum.at(weakest, audit.positive_rows, audit.positive_scores)
    return weakest


def measure(table: np.ndarray, audit: Audit) -> dict[str, Any]:
    """Return the quality of the rows `table` (keys [S, K]) beside those that exact search gives, `audit.exact` [S, K].

    recall_at_k: share of exact search's negatives that the table holds. top1_above_weakest_positive: share of the rows
    with positives whose hardest negative scores above the lowest of them.
    """
    label_ids, scores = unpack(table)
    hardest = scores.max(axis=1, initial=-np.inf)
    exact, _ = unpack(audit.exact)
    hits = Ragged.from_matrix(exact).contains(label_ids).sum()
    weakest = weakest_positives(len(table), audit)
    has_positive = np.isfinite(weakest)
    above = hardest[has_positive] > weakest[has_positive]
    total = int((exact >= 0).sum())
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
