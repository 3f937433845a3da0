"""Scores of a few queries: of their best labels, and of labels that are named."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from schemas.ragged import Ragged
from trainer.evaluation.search import LabelRows, filtered_top_k
from trainer.model import Model


@torch.no_grad()
def score_rows(
    model: Model, rows: pa.Table, named: Sequence[Sequence[int]], k: int, trained: int | None = None
) -> tuple[np.ndarray, np.ndarray, list[list[float]]]:
    """Return (scores [B, k], ids [B, k] best first, -1 pads, scores of `named[i]` for each row i).

    `rows` hold the model's columns; no filter is applied. `trained`: only labels before it are predicted.
    """
    x = model.embed_table(rows)
    vectors = model.head.vectors
    among = None if trained is None else np.arange(trained)
    scores, ids = filtered_top_k(x, LabelRows(vectors), k, Ragged.empty(len(x)), among)
    named_scores = [
        (vectors[torch.as_tensor(labels, dtype=torch.int64, device=vectors.device)].to(x) @ query).tolist()
        for query, labels in zip(x, named, strict=True)
    ]
    return scores, ids, named_scores
