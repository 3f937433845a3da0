"""The texts of labels as a model's encoder embeds them, on the unit sphere."""

from collections.abc import Iterator

import torch
from torch.nn.functional import normalize

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shards import iterate
from trainer.inputs import require_inputs
from trainer.model import Model


@torch.no_grad()
def embed_texts(model: Model, data: DataLayout, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(l, E(z) float32 [n, D] of length 1 of labels [l, l + n)) for all of [start, stop), a row group at a time.

    Raises InputError where labels have not what the encoder reads, TableError.
    """
    manifest = open_manifest(data.labels, "labels")
    require_inputs(data.labels, manifest, model.inputs)
    first = 0
    for rows in iterate(data.labels, manifest, model.columns):
        low, high = (min(max(end - first, 0), rows.num_rows) for end in (start, stop))
        if low < high:
            x = model.embed_table(rows.slice(low, high - low), labels=True)[:, : model.encoder.dimension]
            yield first + low, normalize(x.float())
        first += rows.num_rows
