"""Scores of a batch's candidates: the pool's block by block, the pairs' one by one, normalisers over all ranks."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from trainer.group import Group
from trainer.rows.sparse_products import pair_scores
from trainer.stream.batch import Candidates

BLOCK = 1 << 14  # columns looked at together, so that what a pass needs beside the scores is small

Reading = Callable[[slice, torch.Tensor], torch.Tensor]  # (columns, s [B, c]) -> [B, c]


class Scores:
    """s = x.w of `candidates`, for x [B, D] and w [C, D] in float32 or float64, B the queries of all ranks.

    `pair` [n] with `query`, `label` [n], `positive` [n] bool and `weight` [n]; the pool [B, R] comes from `blocks`, its
    weights [R] in logarithms as `log_weight`. With `chunk`, no more than [B, chunk] of the pool is ever there, and
    every pass multiplies anew. A rank has the candidates of its own labels; `sum`, `max` and `logsumexp` are over those
    of all ranks.
    """

    def __init__(self, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, chunk: int, group: Group) -> None:
        self.x, self.w, self._group = x, w, group
        self.query, self.label = self._here(candidates.pair_query), self._here(candidates.pair_label)
        self.positive = self._here(candidates.pair_positive)
        self.weight = self._here(candidates.pair_weight).to(x.dtype)
        self.pair = pair_scores(x, w, self.query, self.label)
        self.pool_weight = self._here(candidates.pool_weight).to(x.dtype)
        self.log_weight = self.pool_weight.log()
        self._weighted = bool((candidates.pool_weight != 1).any())
        order = np.argsort(candidates.struck_pool, kind="stable")
        self._struck_pool = candidates.struck_pool[order]
        self._struck_query = candidates.struck_query[order]
        self._chunk = chunk
        self._kept = None if chunk and chunk < self.pool else self._score(0, self.pool)

    @property
    def queries(self) -> int:
        return len(self.x)

    @property
    def pool(self) -> int:
        """R, labels that every query is scored against."""
        return len(self.pool_weight)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(columns, s [B, c]) over the pool, -inf where struck; to be read."""
        step = self._chunk if self._kept is None else BLOCK
        for start in range(0, self.pool, step):
            stop = min(start + step, self.pool)
            yield (
                slice(start, stop),
                self._score(start, stop) if self._kept is None else self._kept[:, start:stop],
            )

    def spent(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The same blocks for the last time: what takes their place may be written into them."""
        if self._kept is None:
            yield from self.blocks()
        elif self.pool:
            kept, self._kept = self._kept, None
            yield slice(0, self.pool), kept

    def weighed(self, columns: slice, s: torch.Tensor) -> torch.Tensor:
        """s + log weight of a block [B, c]; s itself where every weight is 1."""
        return s + self.log_weight[columns] if self._weighted else s

    def by_query(self, values: torch.Tensor) -> torch.Tensor:
        """The sums [B] of the pairs' `values` [n], over all ranks."""
        return self.sum(values.new_zeros(self.queries).index_add_(0, self.query, values))

    def logsumexp(self, pair: torch.Tensor, read: Reading | None = None) -> torch.Tensor:
        """[B]: the logarithm of the sum of exp over the `pair` values [n] and the pool's, over all ranks.

        `read` turns a block of the pool into the values that are summed; without, s + log weight. -inf where there
        is nothing to sum.
        """
        found = self._pair_logsumexp(pair)
        for columns, s in self.blocks():
            values = (read or self.weighed)(columns, s)
            found = torch.logaddexp(found, values.logsumexp(1))
        most = self._group.max(found.clone())
        return most + self.sum((found - finite(most)).exp()).log()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over all ranks, in place."""
        return self._group.sum(values)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The greatest of `values` over all ranks, in place."""
        return self._group.max(values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [b, ...] of all ranks, laid end to end."""
        return self._group.gather(values)

    def struck_by_query(self) -> torch.Tensor:
        """The weight [B] of this rank's pool that is struck for each query."""
        columns = self._here(self._struck_pool)
        return self.x.new_zeros(self.queries).index_add_(0, self._here(self._struck_query), self.pool_weight[columns])

    def in_pool(self) -> torch.Tensor:
        """[n]: the weight in the pool of each pair's label, 0 where it is no label of the pool."""
        found = torch.zeros_like(self.weight)
        inside = self.label < self.pool
        found[inside] = self.pool_weight[self.label[inside]]
        return found

    def _score(self, start: int, stop: int) -> torch.Tensor:
        s = self.x @ self.w[start:stop].T
        low, high = np.searchsorted(self._struck_pool, [start, stop])
        s[self._here(self._struck_query[low:high]), self._here(self._struck_pool[low:high]) - start] = -torch.inf
        return s

    def _pair_logsumexp(self, pair: torch.Tensor) -> torch.Tensor:
        most = pair.new_full((self.queries,), -torch.inf).scatter_reduce_(0, self.query.long(), pair, "amax")
        part = (pair - finite(most)[self.query]).exp()
        return most + part.new_zeros(self.queries).index_add_(0, self.query, part).log()

    def _here(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.x.device)


def finite(values: torch.Tensor) -> torch.Tensor:
    """`values` with 0 for -inf: what is subtracted from scores that are all -inf."""
    return values.masked_fill(values == -torch.inf, 0.0)
