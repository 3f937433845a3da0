"""Rankings of labels: by the classifier's scores, those of the labels' texts, their sum, or both fused."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from trainer.evaluation.fusion.fused import Fused
from trainer.evaluation.label_embeddings import embed_texts
from trainer.evaluation.search import LabelRows, filtered_top_k
from trainer.group import ALONE, Group
from trainer.model import Model

By = Literal["classifier", "labels", "sum", "fused"]


@dataclass(frozen=True, eq=False)
class Ranking:
    """A ranking by the scores of x with `labels`; with `fused` the best of them are ranked again."""

    labels: LabelRows
    fused: Fused | None = None

    @classmethod
    def of(cls, model: Model, group: Group = ALONE, fused: Fused | None = None) -> "Ranking":
        """Rank by the vectors that the model was trained with."""
        return cls(LabelRows(model.head.vectors, model.head.start, group), fused)

    @classmethod
    def by_texts(cls, model: Model, data: DataLayout, group: Group = ALONE, add: bool = False) -> "Ranking":
        """Rank by the labels' texts; `add` adds the classifier's scores. Raises as `embed_label_texts`."""
        texts = embed_label_texts(model, data)
        rows = torch.nn.functional.pad(texts, (0, model.width - texts.shape[1]))
        rows = rows + model.head.vectors.to(rows) if add else rows
        return cls(LabelRows(rows, model.head.start, group))

    def top_k(
        self, x: torch.Tensor, k: int, filters: Ragged, among: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], ids [B, k] int64) of the best labels, best first, the same on all ranks.

        `filters`: labels that each query leaves out. `among` [C] ascending: the candidates; without, all labels.
        """
        depth = max(k, self.fused.shortlist) if self.fused else k
        scores, ids = filtered_top_k(x, self.labels, depth, filters, among)
        return self.fused.rank(x, self.labels, (scores, ids), k, filters, among) if self.fused else (scores, ids)


def embed_label_texts(model: Model, data: DataLayout) -> torch.Tensor:
    """Return E(z) of length 1 of this rank's labels, float32 [n, D].

    Raises InputError: a head without a classifier, or labels without texts.
    """
    head = model.head
    if not head.has_rows:
        raise InputError(
            "head.kind = 'label-encoder': labels have the scores of their texts alone, and no others beside them."
        )
    texts = torch.empty(head.stop - head.start, model.encoder.dimension, device=model.device)
    for first, rows in embed_texts(model, data, head.start, head.stop):
        texts[first - head.start :][: len(rows)] = rows
    return texts
