"""Exact search of a checkpoint's vectors for the queries of a split, a block of vectors at a time."""

import numpy as np
import torch

from schemas.layout import DataLayout, RunLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from trainer.checkpoints import latest_checkpoint
from trainer.model import load_encoder
from trainer.stream import open_queries

BLOCK_ROWS = 1 << 14


@torch.no_grad()
def top_of_split(data: str, run: str, split: str, k: int) -> tuple[np.ndarray, Ragged]:
    """Return the ids [N, k] of the best labels of each query of `split`, best first, and the right labels of each.

    Uses the newest checkpoint of `run`, with one file in memory at a time. Raises InputError, TableError.
    """
    model = load_encoder(DataLayout(data), RunLayout(run), step="newest")
    embedded, right = [], []
    for rows in open_queries(DataLayout(data), split).batches([*model.columns, "label_ids"]):
        embedded.append(model.embed_table(rows).float())
        right.append(list_column(rows, "label_ids"))
    x = torch.cat(embedded)
    scores, ids = torch.full((len(x), k), -torch.inf), torch.full((len(x), k), -1)
    checkpoint = latest_checkpoint(RunLayout(run))
    assert checkpoint is not None
    for first, rows in checkpoint.rows(0, checkpoint.labels):
        for low in range(0, len(rows["weight"]), BLOCK_ROWS):
            block = rows["weight"][low : low + BLOCK_ROWS].float()
            keep_best(scores, ids, x @ block.T, first + low)
    values = np.concatenate([some.values for some in right])
    counts = np.concatenate([some.counts for some in right])
    return ids.numpy(), Ragged.from_counts(values, counts)


def keep_best(scores: torch.Tensor, ids: torch.Tensor, block: torch.Tensor, first: int) -> None:
    """Merge `block` [N, R], the scores of labels [first, first + R), into the best `scores` and `ids` [N, k].

    A query without a better score in the block costs one maximum; after a few blocks this is true of most queries.
    """
    k = scores.shape[1]
    better = (block.amax(dim=1) > scores[:, -1]).nonzero().flatten()
    if not len(better):
        return
    values, columns = block[better].topk(min(k, block.shape[1]), dim=1)
    values = torch.cat([scores[better], values], dim=1)
    columns = torch.cat([ids[better], columns + first], dim=1)
    values, order = values.sort(dim=1, descending=True, stable=True)
    scores[better], ids[better] = values[:, :k], columns.gather(1, order[:, :k])
