"""A few queries, looked at closely: what a model predicts for them, and how it scores labels that somebody names."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from schemas.ragged import Ragged
from trainer.evaluation.search import filtered_top_k
from trainer.model import Model


@torch.no_grad()
def look_closely(
    model: Model, rows: pa.Table, named: Sequence[Sequence[int]], k: int
) -> tuple[np.ndarray, np.ndarray, list[list[float]]]:
    """(scores [B, k], ids [B, k] best first, -1 pads, scores of `named[i]` for each row i).

    `rows` hold the model's columns; nothing is filtered out.
    """
    x = model.embed_table(rows)
    vectors = model.head.vectors
    scores, ids = filtered_top_k(x, vectors, k, Ragged.empty(len(x)))
    of_named = [
        (vectors[torch.as_tensor(labels, dtype=torch.int64)].to(x.dtype) @ one).tolist()
        for one, labels in zip(x, named, strict=True)
    ]
    return scores, ids, of_named
