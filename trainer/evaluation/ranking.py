"""Rankings of labels by the classifier's scores, by the scores of labels' texts, by the sum, or by fused scores."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of
from trainer.evaluation.search import LabelRows, filtered_top_k
from trainer.group import ALONE, Group
from trainer.inputs import Inputs
from trainer.model import Model, embed_texts

By = Literal["classifier", "labels", "sum", "fused"]


class Rerank(Protocol):
    """Other scores of the `shortlist` best labels of each query."""

    @property
    def shortlist(self) -> int:
        """Number of labels to rerank."""

    def rank(
        self,
        x: Any,
        labels: LabelRows,
        shortlisted: tuple[np.ndarray, np.ndarray],
        k: int,
        filters: Ragged,
        candidates: np.ndarray | None,
        inputs: Inputs | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rerank `shortlisted`, the scores and ids [B, S] of `labels` for x: the result of `Ranking.top_k`."""

    def scores(
        self, x: Any, labels: LabelRows, listed: tuple[np.ndarray, np.ndarray], inputs: Inputs | None
    ) -> np.ndarray:
        """Score only the labels in `listed`, scores and ids [B, S]: float32 [B, S]."""


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
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], ids [B, k] int64) of the best labels, best first, the same on all ranks.

        `filters`: labels to exclude for each query. `candidates` [C] ascending: the candidates; None: all labels.
        `inputs`: the inputs that x was computed from, which a linear ranker reads.
        """
        depth = max(k, self.rerank.shortlist) if self.rerank else k
        scores, ids = filtered_top_k(x, self.labels, depth, filters, candidates)
        if self.rerank is None:
            return scores, ids
        return self.rerank.rank(x, self.labels, (scores, ids), k, filters, candidates, inputs)

    def scores(self, x: torch.Tensor, ids: np.ndarray, inputs: Inputs | None = None) -> np.ndarray:
        """Return the scores float32 [B, S] of labels `ids` [B, S]; padded with -1. Arguments as in `top_k`."""
        pairs = self.labels.score(x, ids)
        return pairs if self.rerank is None else self.rerank.scores(x, self.labels, (pairs, ids), inputs)


def embed_label_texts(model: Model, data: DataLayout) -> torch.Tensor:
    """Return the embeddings E(z) of this rank's labels, scaled to length 1, float32 [n, D].

    Raises InputError if the head has no classifier, or if the labels have no texts.
    """
    head = model.head
    if not head.has_rows:
        raise InputError(
            "--scores has no effect with this method, because labels are scored only by their texts. Leave --scores "
            "out."
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
    counts = np.array([len(labels) for labels in named], np.int64)
    listed = Ragged.from_counts(np.array([label for labels in named for label in labels], np.int64), counts).padded()
    of_named = ranking.scores(x, listed, inputs)
    return scores, ids, [row[:count].tolist() for row, count in zip(of_named, counts, strict=True)]


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
