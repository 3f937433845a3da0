"""Hard negatives of the table that the stream joins to the queries (ASTRA, Algorithm 1)."""

import torch

from trainer.negatives.base import NegativeSource, Sampled
from trainer.stream.batch import Batch


class Table(NegativeSource):
    """The joined table's K columns: mined with the model of a few epochs ago, without positives."""

    name = "table"

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled | None:
        return None if batch.hard is None else Sampled(batch.hard, ranked=True)
