"""The label-encoder head: labels are encoded from their text, so there is no vector to keep for any of them (DEXML)."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from schemas.tables import PAD
from trainer.config import Recipe
from trainer.encoders.base import Encoder
from trainer.group import ALONE, Group, label_range
from trainer.heads.gradient_cache import LABELS, QUERIES, CachedEmbeddings
from trainer.heads.label_texts import LabelTexts
from trainer.inputs import Inputs
from trainer.losses import build_loss
from trainer.negatives.planner import among, draw_positives
from trainer.stream.batch import Batch


class Embedded(NamedTuple):
    """The mean loss over the queries of all ranks, and their x [B, D] as they were trained on."""

    loss: float
    x: torch.Tensor


class LabelEncoderHead:
    """Queries and labels through one encoder, or one each, and a loss over the labels of all ranks.

    With `negatives.pool = "all"` every step scores every label. With "batch" the pool is what the batch brings:
    positives of all its queries, and `negatives.hard` a query drawn from its row of the table, B(1 + m) labels at most.
    It stands where a classifier does, with `vectors` that are embeddings: a rank has those of [start, stop).
    """

    bias = False

    def __init__(
        self,
        recipe: Recipe,
        encoder: Encoder,
        texts: LabelTexts | None,
        label_encoder: Encoder | None = None,
        group: Group = ALONE,
    ) -> None:
        self._recipe, self._texts, self._group = recipe, texts, group
        self._encoder, self._label_encoder = encoder, label_encoder or encoder
        self._loss = build_loss(recipe.loss)
        self._vectors: torch.Tensor | None = None
        self.labels = 0 if texts is None else len(texts)
        self.start, self.stop = label_range(self.labels, group.rank, group.ranks)

    @property
    def encoders(self) -> dict[str, Encoder]:
        """By the name of their part of a checkpoint: that of the queries, and of the labels where it is another."""
        own = {} if self._label_encoder is self._encoder else {"label-encoder": self._label_encoder}
        return {"encoder": self._encoder, **own}

    @property
    def vectors(self) -> torch.Tensor:
        """z [stop - start, D] of this rank's labels, without dropout; kept until the next step or load."""
        if self._vectors is None:
            z = torch.empty(self.stop - self.start, self._encoder.dimension)
            size = self._recipe.head.label_batch
            for low in range(self.start, self.stop, size):
                high = min(low + size, self.stop)
                z[low - self.start : high - self.start] = self.embed(self.texts.take(np.arange(low, high)))
            self._vectors = z
        return self._vectors

    @property
    def texts(self) -> LabelTexts:
        assert self._texts is not None, "this model was loaded to embed what it is given"
        return self._texts

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, D] as it is: there is no bias."""
        return x

    def embed(self, inputs: Inputs) -> torch.Tensor:
        """z [n, D] of labels, without a graph."""
        return self._label_encoder.encode(self._label_encoder.prepare(inputs))

    def inputs(self, size: int = 1024) -> Iterator[Inputs]:
        """What the encoder reads of this rank's labels, `size` at a time: as many pieces on every rank."""
        most = -(-self.labels // self._group.ranks)
        for piece in range(0, most, size):
            low, high = (min(self.start + piece + end, self.stop) for end in (0, size))
            yield self.texts.take(np.arange(low, high))

    def forget(self) -> None:
        """The encoders have changed."""
        self._vectors = None

    def step(
        self, batch: Batch, everyone: Batch, factor: float, weight: np.ndarray | None = None, clip: float = 0.0
    ) -> Embedded:
        """One optimizer step: `batch` is this rank's part of the global one, `everyone`; all ranks get the same.

        `everyone` has the hard negatives that count (`Planner.gather`); `weight` [L] weighs the positives; `clip` is of
        `Encoder.update`.
        """
        found = self.backward(batch, everyone, weight)
        for encoder in self.encoders.values():
            encoder.reduce(self._group)
            encoder.update(factor, clip)
        self.forget()
        return found

    def backward(self, batch: Batch, everyone: Batch, weight: np.ndarray | None = None) -> Embedded:
        """As `step`, up to the encoders' own gradients, which are still to be summed over ranks."""
        head, group, key = self._recipe.head, self._group, (batch.epoch, batch.step)
        drawn = draw_positives(everyone, head.positives, self._recipe.train.seed)
        ids = self.pool(everyone, drawn)
        start, stop = label_range(len(ids), group.rank, group.ranks)
        share = np.asarray(ids[start:stop], np.int64)
        candidates = among(everyone, share, weight, drawn)
        sizes = group.sizes(len(batch))
        first = sum(sizes[: group.rank])
        queries = CachedEmbeddings(self._encoder, batch.inputs.slice, len(batch), head.query_batch, key, QUERIES, first)
        labels = CachedEmbeddings(
            self._label_encoder,
            lambda low, high: self.texts.take(share[low:high]),
            stop - start,
            head.label_batch,
            key,
            LABELS,
            start,
        )
        own, z = queries.embed(), labels.embed()
        x = group.gather(own.detach(), sizes).requires_grad_()
        part = self._loss(x, z, candidates, group) / len(x)
        part.backward()
        assert x.grad is not None
        assert z.grad is not None
        queries.backward(group.sum(x.grad)[first : first + len(batch)])
        labels.backward(z.grad)
        return Embedded(float(group.sum(part.detach())), x.detach())

    def pool(self, everyone: Batch, drawn: np.ndarray | None = None) -> np.ndarray | range:
        """The labels of a step over all ranks, ascending and each once; a rank encodes its share of them.

        Of the positives those that are `drawn` [sum P], all where it is None.
        """
        if self._recipe.negatives.pool == "all":
            return range(self.labels)
        hard = np.empty(0, np.int64) if everyone.hard is None else everyone.hard.ravel()
        own = everyone.positives if drawn is None else everyone.positives[drawn]
        ids = np.unique(np.concatenate([own.astype(np.int64), hard]))
        return ids[ids != PAD]
