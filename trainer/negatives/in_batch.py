"""In-batch negatives: positives of the batch's other queries (NGAME, Algorithm 1, step 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from schemas import PAD
from trainer.negatives.base import NegativeSource, Sampled, SourceContext, SourceSection, Vectors, ids_from, within

if TYPE_CHECKING:
    import torch

    from trainer.stream.batch import Batch


class InBatchSection(SourceSection):
    """Negatives from the batch; `negatives.in_batch = 20` is short for `negatives.in_batch.hard = 20`."""

    hard: int = Field(0, ge=0, description="other queries' positives a query, those with the highest scores")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, body: Any) -> Any:
        return {"hard": body} if isinstance(body, int) else body

    def open(self, context: SourceContext) -> InBatch:
        return InBatch(self.hard, context.vectors, context.first_epoch)


class InBatch(NegativeSource):
    """The `count` positives of other queries with the highest scores.

    NGAME takes those within a radius, which on the unit sphere is a lower bound of the score.
    """

    name = "in-batch"

    def __init__(self, count: int, vectors: Vectors, first_epoch: int = 0) -> None:
        self._count, self._vectors, self.first_epoch = count, vectors, first_epoch

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        assert x is not None
        batch = within(batch, self._vectors.start, self._vectors.stop)
        labels = np.unique(batch.positives).astype(np.int64)
        if not len(labels):
            return Sampled(np.full((len(batch), 0), PAD, np.int64))
        scores = x.float().cpu().numpy() @ self._vectors.read(labels).T
        place = np.searchsorted(labels, batch.positives)
        scores[np.repeat(np.arange(len(batch)), np.diff(batch.positive_offsets)), place] = -np.inf
        count = min(self._count, len(labels))
        best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        ids = np.where(np.isfinite(np.take_along_axis(scores, best, 1)), labels[best], PAD)
        return Sampled(ids_from(ids, self._vectors.start))
