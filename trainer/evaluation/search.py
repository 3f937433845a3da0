"""Exact search for the best labels of queries, with predictions struck out before the cut at k."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from schemas.errors import ExtremisError
from schemas.ragged import Ragged
from schemas.tables import PAD
from trainer.group import ALONE, Group

BLOCK_ROWS = 1 << 16


class Rows(Protocol):
    """[L, D] that is read a slice at a time: a tensor, or what takes one from files."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Chosen:
    """The rows `ids` [C] of `vectors`, which are gathered a block at a time."""

    vectors: Any
    ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        chosen: torch.Tensor = self.vectors[self.ids[rows]]
        return chosen


__all__ = ["BLOCK_ROWS", "filtered_top_k", "top_k"]


@torch.no_grad()
def top_k(
    queries: torch.Tensor, vectors: Rows, k: int, block_rows: int = BLOCK_ROWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greatest inner products of each query: queries [B, D], vectors [L, D] -> scores [B, k], ids [B, k] int64.

    Best first, equal scores by ascending id; -inf and -1 pad where k > L. Blocks of `block_rows` vectors are moved
    to the queries' device and widened to float32 at least, so that memory is [B, block_rows] and vectors may be half
    precision or memory-mapped. Raises ExtremisError where a score is not a number.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries = queries.to(dtype)
    scores = queries.new_empty((len(queries), 0))
    ids = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
    for start in range(0, len(vectors), block_rows):
        block = vectors[start : start + block_rows].to(device=queries.device, dtype=dtype)
        block_scores, block_ids = _top_of_block(queries @ block.T, min(k, len(block)))
        # What came before has lower ids: a stable sort by score alone keeps the order of ties.
        scores = torch.cat([scores, block_scores], dim=1)
        ids = torch.cat([ids, block_ids + start], dim=1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, ids = scores[:, :k], ids.gather(1, order[:, :k])
    if scores.isnan().any():
        raise ExtremisError(
            "a score is not a number: the queries or the vectors hold NaN or infinity. "
            "Training has diverged; go back to an earlier checkpoint or lower the learning rate."
        )
    missing = (0, k - scores.shape[1])
    return (
        torch.nn.functional.pad(scores, missing, value=-torch.inf),
        torch.nn.functional.pad(ids, missing, value=PAD),
    )


def filtered_top_k(
    queries: torch.Tensor,
    vectors: Rows,
    k: int,
    filters: Ragged,
    block_rows: int = BLOCK_ROWS,
    group: Group = ALONE,
    first: int = 0,
    among: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`top_k` without each query's filtered labels: scores [B, k], ids [B, k] int64, equal to filtering before ranking.

    k + the longest row of `filters` are fetched: a row of 51 filtered labels can empty a top-5 ten times over. Each
    rank of `group` has the same queries and the vectors of its own labels, the first of which is `first`; all get the
    same answer. `among` [C] int64, ascending: the rows of `vectors`, a tensor, that are candidates; without, all are.
    """
    depth = k + filters.longest
    if among is None:
        scores, ids = top_k(queries, vectors, depth, block_rows)
    else:
        scores, places = top_k(queries, _Chosen(vectors, torch.from_numpy(among)), depth, block_rows)
        ids = torch.from_numpy(np.append(among, PAD)).to(places.device)[places]  # a pad, -1, takes the last
    if group.ranks > 1:
        scores, ids = _best_of(scores, torch.where(ids == PAD, PAD, ids + first), depth, group)
    kept, kept_scores = filters.filter_ranking(ids.cpu().numpy(), scores.cpu().numpy(), k)
    return kept_scores, kept


def _best_of(scores: torch.Tensor, ids: torch.Tensor, k: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greatest of what the ranks found, [B, k] each: equal scores by ascending id, as ranks hold them."""
    sizes = [len(scores)] * group.ranks
    # [G B, k] -> [B, G k]
    scores, ids = (
        group.gather(part, sizes).unflatten(0, (group.ranks, -1)).transpose(0, 1).flatten(1) for part in (scores, ids)
    )
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return scores[:, :k], ids.gather(1, order[:, :k])


def _top_of_block(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greatest of each row of [B, R], equal ones by ascending column: values [B, k], columns [B, k]."""
    width = scores.shape[1]
    values, columns = scores.topk(min(k + 1, width), dim=1)
    # topk may keep any of several equal scores; which ones matters only where the cut at k falls between equals.
    cut = (values[:, k - 1] == values[:, k]).nonzero().flatten() if 0 < k < width else torch.empty(0, dtype=torch.int64)
    columns, _ = columns[:, :k].sort(dim=1)
    if len(cut):
        columns[cut] = scores[cut].sort(dim=1, descending=True, stable=True).indices[:, :k]
        columns, _ = columns.sort(dim=1)
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)
