"""Embeddings of queries by an encoder that does not change: each is encoded once (NGAME, appendix C, module M2)."""

import tempfile
from collections.abc import Sequence

import numpy as np
import torch

from trainer.encoders import Encoder
from trainer.stream import Batch, Source


class FrozenEmbeddings:
    """x of training rows by their ids, encoded without dropout when they are first needed.

    A scratch file of [N, D] float16 holds them, and every x is rounded to it: a run that is resumed encodes again and
    gets the same. Row ids belong to tables: with other tables all are encoded again.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tables: list[str] = []
        self._x = np.empty((0, encoder.dimension), np.float16)
        self._encoded = np.zeros(0, bool)

    def begin(self, sources: Sequence[Source]) -> None:
        """Begin an epoch over `sources`: forget the rows of others."""
        tables = [source.table.manifest.digest for source in sources]
        if tables == self._tables:
            return
        self._tables = tables
        rows = sum(source.rows for source in sources)
        with tempfile.TemporaryFile(prefix="extremis-frozen-") as scratch:  # the map keeps it
            self._x = np.memmap(scratch, np.float16, "w+", shape=(max(1, rows), self._encoder.dimension))
        self._encoded = np.zeros(rows, bool)

    def of(self, batch: Batch) -> torch.Tensor:
        """Return x [B, D] float32 of a batch of the sources, on the encoder's device."""
        new = np.flatnonzero(~self._encoded[batch.rows])
        if len(new):
            encoded = self._encoder.encode(self._encoder.prepare(batch.inputs.take(new)))
            self._x[batch.rows[new]] = encoded.float().cpu().numpy()
            self._encoded[batch.rows[new]] = True
        device = next(iter(self._encoder.tensors().values())).device
        return torch.as_tensor(self._x[batch.rows].astype(np.float32), device=device)
