"""Embeddings of labels' texts by a model's encoder."""

from collections.abc import Iterator

import torch
from torch.nn.functional import normalize

from schemas.layout import DataLayout
from schemas.table import Table
from trainer.inputs import require_inputs
from trainer.model import Model


def embed_texts(model: Model, data: DataLayout, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield what `embed_labels` does, on the unit sphere: float32 [n, D], without the column of a bias."""
    for first, z in embed_labels(model, data, start, stop):
        yield first, normalize(z[:, : model.encoder.dimension].float())


@torch.no_grad()
def embed_labels(model: Model, data: DataLayout, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (l, z [n, D] of labels [l, l + n)) for all of [start, stop), a row group at a time.

    Raises InputError for labels without the columns that the encoder reads, TableError.
    """
    table = Table.open(data.labels, "labels")
    require_inputs(table, model.inputs)
    first = 0
    for rows in table.batches(model.columns):
        low, high = (min(max(end - first, 0), rows.num_rows) for end in (start, stop))
        if low < high:
            yield first + low, model.embed_table(rows.slice(low, high - low), labels=True)
        first += rows.num_rows
