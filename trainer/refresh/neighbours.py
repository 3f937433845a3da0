"""Memory of a run's training points: the labels of every point, and a key, which is the point's embedding in a dump."""

import numpy as np
import torch

from schemas.errors import TableError
from schemas.layout import RunLayout
from schemas.mapped import ScratchFile, ScratchRows
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from trainer.device import send
from trainer.losses import vote_loss
from trainer.methods.rae import MemorySection
from trainer.stream import Batch, Source

_WHAT = "a memory of training points"


class Neighbours:
    """Keys of all points, [N, D] float16 of length 1, and their labels, in memory-mapped scratch files.

    Keys come from the dump that the table of neighbours was mined from. A point without an embedding there, which the
    run does not train on, is never a neighbour.
    """

    def __init__(self, run: RunLayout, options: MemorySection) -> None:
        self._run, self._options, self._table = run, options, ""

    def begin(self, sources: list[Source]) -> None:
        """Begin an epoch: read the keys if the table is new. Raises TableError if the keys are missing."""
        (source,) = sources
        table = source.negatives
        if table is None or table.digest == self._table:
            return
        url = self._run.embeddings(table.parameters["epoch"], source.name)
        if (dump := Table.find(url, "embeddings")) is None:
            raise TableError(f"{url}: the keys of {table.url} are missing. Restore the file, or start a new run.")
        table.require_made_from("embeddings", dump)
        if not self._table:  # later tables have the same rows
            labels = ScratchRows(_WHAT)
            for group in source.table.batches(["label_ids"]):
                labels.add(list_column(group, "label_ids"))
            self._labels = labels.mapped()
        self._keys = np.empty((0, 0), np.float16)  # frees the space of the earlier keys
        scratch = ScratchFile(_WHAT).reserve(2 * max(1, dump.rows) * dump.dimension)
        self._keys = np.ndarray((dump.rows, dump.dimension), np.float16, scratch)
        self._known = np.zeros(dump.rows, bool)
        for first, vectors in dump.vectors():
            rows, lengths = slice(first, first + len(vectors)), np.linalg.norm(vectors.astype(np.float32), axis=1)
            self._known[rows] = lengths > 0
            self._keys[rows] = vectors / np.where(lengths > 0, lengths, 1)[:, None]
        self._table = table.digest

    def learn(self, batch: Batch, x: torch.Tensor, queries: int) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """Return the loss on a rank's part of a batch of `queries`, and its gradient at x [b, D]; 0 without a table."""
        if batch.hard is None or not len(batch):
            return 0.0, 0.0
        assert isinstance(batch.hard, np.ndarray)
        near, x = np.maximum(batch.hard, 0).astype(np.int64), x.detach().requires_grad_()
        found, keys = (batch.hard >= 0) & self._known[near], send(self._keys[near], x.device)
        own, theirs = Ragged(batch.positives, batch.positive_offsets), self._labels.take(near.ravel())
        votes = vote_loss(x, keys, found, own, theirs, self._options.temperature)
        loss = votes * (self._options.weight / queries)
        return loss.detach(), torch.autograd.grad(loss, x)[0]
