"""By which scores labels are ranked: the classifier's, those of the labels' texts, their sum, or both fused."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from trainer.evaluation.fusion.fused import Fused
from trainer.evaluation.label_embeddings import embed_texts
from trainer.evaluation.search import Rows, filtered_top_k
from trainer.group import ALONE, Group
from trainer.model import Model

By = Literal["classifier", "labels", "sum", "fused"]


@dataclass(frozen=True, eq=False)
class Ranking:
    """`rows` [n, D] of this rank's labels, from `first` on, meet x; `fused`, where given, ranks the best anew."""

    rows: Rows
    first: int = 0
    group: Group = ALONE
    fused: Fused | None = None

    @classmethod
    def of(cls, model: Model, group: Group = ALONE, fused: Fused | None = None) -> "Ranking":
        """By the vectors that the model was trained with."""
        return cls(model.head.vectors, model.head.start, group, fused)

    @classmethod
    def by_texts(cls, model: Model, data: DataLayout, group: Group = ALONE, add: bool = False) -> "Ranking":
        """By the labels' texts; `add` adds the classifier's scores. Raises as `texts_of`."""
        texts = texts_of(model, data)
        rows = torch.nn.functional.pad(texts, (0, model.width - texts.shape[1]))
        return cls(rows + model.head.vectors.float() if add else rows, model.head.start, group)

    def top_k(
        self, x: torch.Tensor, k: int, struck: Ragged, among: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scores [B, k], ids [B, k] int64) of all labels, or `among` [C] ascending, best first: the same on all ranks.

        `struck`: the labels that each query is not to have.
        """
        if among is not None:
            among = among[(among >= self.first) & (among < self.first + len(self.rows))] - self.first
        depth = max(k, self.fused.shortlist) if self.fused else k
        scores, ids = filtered_top_k(x, self.rows, depth, struck, group=self.group, first=self.first, among=among)
        return self.fused.rank(x, scores, ids, k) if self.fused else (scores, ids)


def texts_of(model: Model, data: DataLayout) -> torch.Tensor:
    """E(z) float32 [n, D] of length 1 of this rank's labels. InputError: no classifier, or labels without texts."""
    head = model.head
    if not head.has_rows:
        raise InputError(
            "head.kind = 'label-encoder': labels have the scores of their texts alone, and no others beside them."
        )
    texts = torch.empty(head.stop - head.start, model.encoder.dimension)
    for first, rows in embed_texts(model, data, head.start, head.stop):
        texts[first - head.start :][: len(rows)] = rows
    return texts
