"""Rank labels by their vectors, over ranks; the best k on a device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize

from schemas import PAD
from schemas.errors import InputError, option
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of
from search.topk import Block, configure_faiss, score, search_exactly, unpack
from search.torch_topk import Rows, Scored, top_k, top_of_product
from trainer.device import CPU
from trainer.group import ALONE, Group
from trainer.inputs import Inputs
from trainer.model import Model, embed_texts

_MANY_QUERIES, _MANY_ROWS = 1 << 10, 1 << 13
By = Literal["classifier", "labels", "sum", "fused"]
Ranked = tuple[np.ndarray, np.ndarray]  # scores [B, k], best first, and label ids int64 [B, k]
_BATCH = 256  # number of queries with label rows that are gathered together


@dataclass(frozen=True, eq=False)
class LabelRows:
    """The `rows` [n, D] of labels [first, first + n): all labels, or the labels of one rank of `group`."""

    rows: Rows
    first: int = 0
    group: Group = ALONE

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return getattr(self.rows, "device", CPU)

    def of(self, rows: Rows) -> "LabelRows":
        """Return a copy of these labels with different `rows`."""
        return replace(self, rows=rows)

    def score(self, x: torch.Tensor, ids: np.ndarray) -> np.ndarray:
        """Multiply the rows of labels `ids` [B, S] by x [B, D or more]: float32 [B, S], 0 for labels that no rank has.

        All ranks have the same queries and get the same result.
        """
        inside = torch.from_numpy((ids >= self.first) & (ids < self.first + len(self.rows)))
        if isinstance(self.rows, torch.Tensor) and self.device == x.device == CPU and self.rows.dtype == torch.float32:
            # Rows are read in place: to gather them takes 30 times as long.
            of_rank = np.where(inside, ids - self.first, PAD)
            own = torch.from_numpy(score(x[:, : self.rows.shape[1]].float().numpy(), self.rows.numpy(), of_rank))
            return self.group.sum(own.masked_fill(~inside, 0)).numpy()
        places = torch.from_numpy(ids - self.first).masked_fill(~inside, 0)
        scores = torch.zeros(ids.shape)
        for low in range(0, len(ids) if inside.any() else 0, _BATCH):
            part = slice(low, low + _BATCH)
            gathered = self.rows[places[part].reshape(-1).to(self.device)]
            gathered = gathered.to(x.device).float().unflatten(0, places[part].shape)
            scores[part] = torch.einsum("bsd,bd->bs", gathered, x[part, : gathered.shape[2]].float()).cpu()
        return self.group.sum(scores * inside).numpy()


def filtered_top_k(
    queries: torch.Tensor, labels: LabelRows, k: int, filters: Ragged, candidates: np.ndarray | None = None
) -> Ranked:
    """Search like `top_k`, but exclude each query's filtered labels: return scores [B, k], ids [B, k] int64.

    The result is the same as with filtering before ranking: the search finds k labels plus the length of the longest
    row in `filters`, because filtered labels may fill the first k ranks. All ranks have the same queries and get the
    same result. `candidates` [C] int64, ascending: the candidate labels; None: all labels.
    """
    depth, first, group, among = k + filters.longest, labels.first, labels.group, None
    if candidates is not None:
        of_rank = candidates[(candidates >= first) & (candidates < first + len(labels.rows))]
        among = torch.from_numpy(of_rank - first).to(labels.device)
    scores, ids = top_k(queries, labels.rows, depth, among=among, top=_top_of_product)
    ids = torch.where(ids == PAD, PAD, ids + first) if first else ids
    if group.ranks > 1:
        # [G B, k] -> [B, G k]: ties in the order of ranks, which is ascending by id
        scores, ids = (
            group.all_gather(part, [len(part)] * group.ranks).unflatten(0, (group.ranks, -1)).transpose(0, 1).flatten(1)
            for part in (scores, ids)
        )
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, ids = scores[:, :depth], ids.gather(1, order[:, :depth])
    kept, kept_scores = filters.filter_ranking(ids.cpu().numpy(), scores.cpu().numpy(), k)
    return kept_scores, kept


def _top_of_product(queries: torch.Tensor, rows: torch.Tensor, k: int) -> Scored:
    """Return the same as `top_of_product`, up to rounding.

    For many queries and rows on a CPU, Faiss avoids a matrix of scores and takes half the time.
    """
    few = len(queries) < _MANY_QUERIES or len(rows) < _MANY_ROWS or not k
    if few or queries.device != CPU or queries.dtype != torch.float32 or find_spec("faiss") is None:
        return top_of_product(queries, rows, k)
    configure_faiss(None)
    ids, scores = unpack(search_exactly(Block(0, rows.numpy()), queries.numpy(), k))
    return torch.from_numpy(scores), torch.from_numpy(ids)


class Rerank(Protocol):
    """Other scores of the best labels of each query."""

    def rank(
        self, x: Any, labels: LabelRows, search: Any, k: int, filters: Ragged, candidates: Any, inputs: Any
    ) -> Ranked:
        """Rerank what `search` finds, given a width, filters and candidates: the result of `Ranking.top_k`."""

    def scores(self, x: Any, labels: LabelRows, search: Any, listed: np.ndarray, inputs: Inputs | None) -> np.ndarray:
        """Score the labels `listed` [B, S], padded with -1: float32 [B, S]."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Ranks labels by the scores of x with `labels`; `rerank` reranks the best labels."""

    labels: LabelRows
    rerank: Rerank | None = None

    @classmethod
    def of(cls, model: Model, group: Group = ALONE, rerank: Rerank | None = None) -> "Ranking":
        """Rank by the vectors that the model was trained with."""
        return cls(LabelRows(model.head.vectors, model.head.start, group), rerank)

    @classmethod
    def by_texts(cls, model: Model, data: DataLayout, group: Group = ALONE, add: bool = False) -> "Ranking":
        """Rank by the labels' texts; `add`: add the classifier's scores. Raises InputError, TableError."""
        texts = embed_label_texts(model, data)
        rows = torch.nn.functional.pad(texts, (0, model.width - texts.shape[1]))
        rows = rows + model.head.vectors.to(rows) if add else rows
        return cls(LabelRows(rows, model.head.start, group))

    def top_k(
        self,
        x: torch.Tensor,
        k: int,
        filters: Ragged,
        candidates: np.ndarray | None = None,
        inputs: Inputs | None = None,
    ) -> Ranked:
        """Return (scores [B, k], ids [B, k] int64) of the best labels, best first, the same on all ranks.

        `filters`: labels to exclude for each query. `candidates` [C] ascending: the candidates; None: all labels.
        `inputs`: the inputs that x was computed from, which a linear ranker reads.
        """
        search = partial(filtered_top_k, x, self.labels)
        if self.rerank is None:
            return search(k, filters, candidates)
        return self.rerank.rank(x, self.labels, search, k, filters, candidates, inputs)

    def scores(self, x: torch.Tensor, ids: np.ndarray, inputs: Inputs | None = None) -> np.ndarray:
        """Return the scores float32 [B, S] of labels `ids` [B, S]; padded with -1. Arguments as in `top_k`."""
        if self.rerank is None:
            return self.labels.score(x, ids)
        return self.rerank.scores(x, self.labels, partial(filtered_top_k, x, self.labels), ids, inputs)


def embed_label_texts(model: Model, data: DataLayout) -> torch.Tensor:
    """Return the embeddings E(z) of this rank's labels, scaled to length 1, float32 [n, D].

    Raises InputError if the head has no classifier, or if the labels have no texts.
    """
    head = model.head
    if not head.has_rows:
        raise InputError(
            f"{option('scores')} has no effect with this method, because labels are scored only by their texts. Leave "
            f"{option('scores')} out."
        )
    texts = torch.empty(head.stop - head.start, model.encoder.dimension, device=model.device)
    for first, rows in embed_texts(model, data, head.start, head.stop):
        texts[first - head.start :][: len(rows)] = rows
    return texts


@torch.no_grad()
def score_rows(
    model: Model,
    rows: pa.Table,
    named: Sequence[Sequence[int]],
    k: int,
    candidates: np.ndarray | None = None,
    rerank: Rerank | None = None,
) -> tuple[np.ndarray, np.ndarray, list[list[float]]]:
    """Return (scores [B, k], ids [B, k] best first, padded with -1, scores of `named[i]` for each row i).

    `rows` contain the columns that the model reads, and filter pairs, if any. `candidates` [C]: labels that may be
    predicted, ascending; None: all.
    """
    x, inputs, ranking = model.embed_table(rows), Inputs.of(rows), Ranking.of(model, rerank=rerank)
    scores, ids = ranking.top_k(x, k, filters_of(rows), candidates, inputs)
    of_named = ranking.scores(x, Ragged.from_lists(named).padded(), inputs)
    return scores, ids, [row[: len(labels)].tolist() for row, labels in zip(of_named, named, strict=True)]


NEIGHBOURS = 8
MAX_NUMBERS = 1 << 28  # maximum number of numbers in all vectors, which are copied


def nearest_labels(vectors: torch.Tensor, ids: Iterable[int]) -> dict[int, list[tuple[int, float]]]:
    """Return the NEIGHBOURS labels nearest to each of `ids`, with cosines; empty above MAX_NUMBERS numbers."""
    asked = np.asarray([label for label in ids if label < len(vectors) and vectors.numel() <= MAX_NUMBERS], np.int64)
    unit = normalize(vectors.float()) if len(asked) else vectors
    own = Ragged.from_counts(asked, np.ones(len(asked), np.int64))
    scores, found = filtered_top_k(unit[torch.from_numpy(asked)], LabelRows(unit), NEIGHBOURS, own)
    rows = zip(asked.tolist(), found.tolist(), scores.astype(float).round(3).tolist(), strict=True)
    return {label: [pair for pair in zip(near, cosines, strict=True) if pair[0] >= 0] for label, near, cosines in rows}
