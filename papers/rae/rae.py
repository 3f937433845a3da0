"""RAE-XMC: a dual encoder with a memory of training points; the nearest points vote for their labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import model_validator
from torch.nn.functional import normalize

from schemas.errors import TableError
from schemas.layout import RunLayout
from schemas.mapped import ScratchFile, ScratchRows
from schemas.options import Options, key
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from trainer.device import send
from trainer.methods.dexml import DualEncoder, TextTableSchedule
from trainer.methods.recipe import MOST, NegativesSection
from trainer.methods.sections import TableSchedule
from trainer.second_loss import SecondLoss
from trainer.stream import Batch, Source

_WHAT = "a memory of training points"


class MemorySection(Options):
    """Memory of training points: their embeddings from two epochs earlier, without gradient."""

    neighbours: int = key(
        24,
        "K, the number of nearest other points per point; each of the K points votes for its own labels",
        ge=1,
        le=MOST,
    )
    weight: float = key(1.0, "weight of the loss on votes, added to the loss on the batch's labels; 0: no votes", ge=0)
    temperature: float = key(0.05, "tau of the votes: cosines are divided by tau", gt=0)


class Rae(DualEncoder):
    """`loss` over the labels of the batch, plus a loss on the votes of each query's nearest points (from tables)."""

    negatives: NegativesSection = NegativesSection()  # labels of the batch
    memory: MemorySection = MemorySection()
    refresh: TextTableSchedule = TextTableSchedule()

    @property
    def tables(self) -> TableSchedule | None:
        return self.refresh if self.memory.weight else None

    @property
    def table_parameters(self) -> dict[str, Any]:
        return {"table_width": self.memory.neighbours, "index": self.refresh.index, "by": "points"}

    def second_loss(self, run: RunLayout) -> Neighbours | None:
        return Neighbours(run, self.memory, self.encoder.dimension) if self.memory.weight else None

    @model_validator(mode="after")
    def _check_memory(self) -> Rae:
        if self.data.mix or self.data.label_texts or self.data.by_parts:
            others = "data.mix, data.label_texts, data.parts and data.replay"
            raise ValueError(f"method = {self.method!r} needs all points of a single split: leave out {others}")
        if not self.encoder.normalize:
            raise ValueError(f"method = {self.method!r} needs unit vectors: set encoder.normalize = true")
        return self


class Neighbours(SecondLoss):
    """Keys of all points, [N, D] float16 of length 1, and their labels, in memory-mapped scratch files.

    Keys come from the dump that the table of neighbours was mined from. A point without an embedding there, which the
    run does not train on, is never a neighbour.
    """

    def __init__(self, run: RunLayout, options: MemorySection, dimension: int) -> None:
        self._run, self._options, self._dimension, self._table = run, options, dimension, ""

    def scratch_bytes(self, rows: int) -> int:
        return rows * (2 * self._dimension + 8)  # with the labels

    def begin(self, sources: list[Source]) -> None:
        """Read the keys if the table is new. Raises TableError if the keys are missing."""
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
        """Return the loss of the votes and its gradient at x [b, D]; 0 without a table."""
        if batch.hard is None or not len(batch):
            return 0.0, 0.0
        assert isinstance(batch.hard, np.ndarray)
        near, x = np.maximum(batch.hard, 0).astype(np.int64), x.detach().requires_grad_()
        found, keys = (batch.hard >= 0) & self._known[near], send(self._keys[near], x.device)
        own, theirs = Ragged(batch.positives, batch.positive_offsets), self._labels.take(near.ravel())
        votes = vote_loss(x, keys, found, own, theirs, self._options.temperature)
        loss = votes * (self._options.weight / queries)
        return loss.detach(), torch.autograd.grad(loss, x)[0]


def vote_loss(
    x: torch.Tensor, keys: torch.Tensor, found: np.ndarray, own: Ragged, theirs: Ragged, temperature: float
) -> torch.Tensor:
    """Return the sum over queries x [B, D] of -mean(log(votes)), where the mean is over `own` labels that have votes.

    Neighbours vote with the softmax of cos(x, keys [B, K, D]) / `temperature` over the neighbours that were `found`
    [B, K] (bool). A label's votes are the sum over the neighbours with this label; `theirs` are the labels of the B * K
    neighbours.
    """
    s = torch.einsum("bd,bkd->bk", normalize(x, dim=1), keys.to(x.dtype)) / temperature
    log_share = s.masked_fill(send(~found, x.device), torch.finfo(s.dtype).min).log_softmax(1).flatten()
    theirs = theirs.keep(np.repeat(found.ravel(), theirs.counts))
    neighbour, stride = theirs.row_of(), 1 + max(int(ids.entries.max(initial=0)) for ids in (own, theirs))
    pairs = own.row_of() * stride + own.entries, neighbour // found.shape[1] * stride + theirs.entries
    number = np.unique(np.concatenate(pairs), return_inverse=True)[1]  # number of each pair of query and label
    label, vote, weight = number[: len(pairs[0])], number[len(pairs[0]) :], 1 / np.repeat(own.counts, own.counts)
    label, vote, weight, neighbour = send((label, vote, weight, neighbour), x.device)
    each = log_share[neighbour]
    # In logarithms: a far neighbour's share may be too small for a float.
    greatest = each.new_full((len(number),), -torch.inf).scatter_reduce(0, vote, each.detach(), "amax")
    total = torch.zeros_like(greatest).index_add(0, vote, (each - greatest[vote]).exp())
    voted = total[label] > 0
    label = label[voted]
    return -(weight[voted].to(x.dtype) @ (greatest[label] + total[label].log()))
