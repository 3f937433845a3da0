"""Measure the ranks of a step's hard negatives among all labels under the current model (MIPS-s, Figure 3)."""

import numpy as np
import torch

from schemas import PAD
from trainer.group import Group
from trainer.stream import Batch

ROWS = 64  # maximum number of rows of a batch to rank
LABELS = 1 << 16  # labels scored at a time
_TIE = 1e-9  # scores with a smaller relative difference may differ only by the rounding of their sums


def describe(ranks: np.ndarray) -> dict[str, float]:
    """Return the quantiles of `ranks` [n], and the fractions of ranks below 10, 100 and 1000."""
    quantiles = np.quantile(ranks, (0.1, 0.5, 0.9), method="inverted_cdf").tolist()
    names = ("rank_p10", "rank_p50", "rank_p90")
    within = {f"within_{first}": float((ranks < first).mean()) for first in (10, 100, 1000)}
    return {"negatives": len(ranks), **dict(zip(names, quantiles, strict=True)), **within}


@torch.no_grad()
def measure(
    vectors: torch.Tensor, start: int, x: torch.Tensor, batch: Batch, hard: np.ndarray, group: Group
) -> np.ndarray:
    """Return one rank per (query, hard negative), [n] int64 ascending: the number of non-positives that score higher.

    Uses the first rows of the global batch. Every rank calls the function and gets the same result. `vectors` [n, D]:
    vectors of the rank's labels, the first of which is label `start`. x [B, D]. `hard` [B, k]: labels of this rank,
    counted from `start`, padded with -1.
    """
    rows = min(ROWS, len(batch))
    x, hard = x[:rows].double(), hard[:rows]
    ids = torch.from_numpy(np.where(hard == PAD, 0, hard)).to(vectors.device)
    mine = torch.einsum("bd,bkd->bk", x, vectors[ids].to(x))
    mine = mine.masked_fill(torch.from_numpy(hard == PAD).to(x.device), -torch.inf)
    widths = group.sizes(hard.shape[1])
    if not sum(widths):
        return np.empty(0, np.int64)
    # Scores [k, B] of all ranks are concatenated and sorted in each row, so one search serves all scores.
    scores = torch.sort(group.all_gather(mine.T.contiguous(), widths).T.contiguous(), dim=1).values
    above = group.sum(_above(scores, x, vectors, start, batch, rows))
    return np.sort(above[torch.isfinite(scores)].cpu().numpy())


def _above(
    scores: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor, start: int, batch: Batch, rows: int
) -> torch.Tensor:
    """For each of the `scores` [rows, k], ascending in each row, count the non-positive `vectors` that score higher."""
    counts = torch.zeros(rows, scores.shape[1] + 1, dtype=torch.int64, device=x.device)
    offsets = batch.positive_offsets[: rows + 1]
    query = np.repeat(np.arange(rows), np.diff(offsets))
    label = batch.positives[: offsets[-1]].astype(np.int64) - start
    for first in range(0, len(vectors), LABELS):
        chunk = x @ vectors[first : first + LABELS].to(x).T
        inside = (label >= first) & (label < first + chunk.shape[1])
        chunk[query[inside], label[inside] - first] = -torch.inf
        place = torch.searchsorted(scores, chunk - _TIE * (1 + chunk.abs()))  # number of lower scores
        counts.scatter_add_(1, place, torch.ones_like(place))
    # A label at place p scores higher than the first p scores.
    return counts.flip(1).cumsum(1).flip(1)[:, 1:]
