"""The label-encoder head: labels are encoded from their text, so there is no vector to keep for any of them (DEXML)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from schemas.tables import PAD
from trainer.candidates import draw_hard
from trainer.config import Recipe
from trainer.encoders.base import Encoder
from trainer.gradcache import LABELS, QUERIES, CachedEmbeddings
from trainer.group import ALONE, Group, label_range
from trainer.losses import build_loss
from trainer.stream.batch import Batch, Candidates
from trainer.texts import LabelTexts


@dataclass(frozen=True)
class Pool:
    """The labels of a step, over all ranks: `ids` [C] int64 ascending, each once, of which a rank encodes its share.

    `positives` [sum P] and `offsets` [B + 1] are those of the queries of all ranks, in rank order.
    """

    ids: np.ndarray | range
    positives: np.ndarray
    offsets: np.ndarray

    def candidates(self, start: int, stop: int, positive_weight: np.ndarray | None = None) -> Candidates:
        """Labels `ids[start:stop]` for every query: all are its negatives but its positives, which are struck."""
        ids = np.asarray(self.ids[start:stop], np.int64)
        query = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        place = np.searchsorted(ids, self.positives)
        inside = place < len(ids)
        inside[inside] = ids[place[inside]] == self.positives[inside]
        query, place = query[inside], place[inside].astype(np.int64)
        weight = np.ones(len(place), np.float32)
        if positive_weight is not None:
            weight = positive_weight[ids[place]].astype(np.float32)
        return Candidates(
            ids=ids,
            pair_query=query,
            pair_label=place,
            pair_positive=np.ones(len(place), bool),
            pair_weight=weight,
            pool_weight=np.ones(len(ids), np.float32),
            struck_query=query,
            struck_pool=place,
        )


class LabelEncoderHead:
    """Queries and labels through one encoder, or one each, and a loss over the labels of all ranks.

    With `negatives.pool = "all"` every step scores every label. Otherwise the pool is what the batch brings: positives
    of all its queries, and `negatives.hard` a query drawn from its row of the table, B(1 + m) labels at most.
    """

    def __init__(
        self,
        recipe: Recipe,
        encoder: Encoder,
        texts: LabelTexts,
        label_encoder: Encoder | None = None,
        positive_weight: np.ndarray | None = None,
        group: Group = ALONE,
    ) -> None:
        self._recipe, self._texts, self._group = recipe, texts, group
        self._encoder, self._label_encoder = encoder, label_encoder or encoder
        self._loss = build_loss(recipe.loss)
        self._positive_weight = positive_weight

    @property
    def encoders(self) -> list[Encoder]:
        """That of the queries, and that of the labels where it is another."""
        return [self._encoder] if self._label_encoder is self._encoder else [self._encoder, self._label_encoder]

    def step(self, batch: Batch, factor: float) -> tuple[float, torch.Tensor]:
        """One optimizer step on the ranks' batch: (the mean loss over its queries, x [b, D] of this rank's own)."""
        loss, x = self.backward(batch)
        for encoder in self.encoders:
            encoder.reduce(self._group)
            encoder.update(factor)
        return loss, x

    def backward(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """As `step`, up to the encoders' own gradients, which are still to be summed over ranks."""
        head, group, key = self._recipe.head, self._group, (batch.epoch, batch.step)
        pool = self._pool(batch)
        start, stop = label_range(len(pool.ids), group.rank, group.ranks)
        candidates = pool.candidates(start, stop, self._positive_weight)
        first = group.before(len(batch))
        queries = CachedEmbeddings(self._encoder, batch.inputs.slice, len(batch), head.query_batch, key, QUERIES, first)
        labels = CachedEmbeddings(
            self._label_encoder,
            lambda low, high: self._texts.take(candidates.ids[low:high]),
            stop - start,
            head.label_batch,
            key,
            LABELS,
            start,
        )
        own, z = queries.embed(), labels.embed()
        x = group.gather(own.detach()).requires_grad_()
        part = self._loss(x, z, candidates, group) / len(x)
        part.backward()
        assert x.grad is not None
        assert z.grad is not None
        queries.backward(group.sum(x.grad)[first : first + len(batch)])
        labels.backward(z.grad)
        return float(group.sum(part.detach())), own.detach()

    @torch.no_grad()
    def vectors(self, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """z of labels [start, stop), in their order and without dropout, some rows [n, D] at a time."""
        encoder, stop = self._label_encoder, len(self._texts) if stop is None else stop
        size = self._recipe.head.label_batch
        for low in range(start, stop, size):
            inputs = self._texts.take(np.arange(low, min(low + size, stop)))
            yield encoder.encode(encoder.prepare(inputs))

    def _pool(self, batch: Batch) -> Pool:
        options = self._recipe.negatives
        hard = np.empty(0, np.int64)
        if batch.hard is not None and options.hard and options.pool != "all":
            at = {"seed": self._recipe.train.seed, "epoch": batch.epoch, "step": batch.step}
            hard = np.unique(draw_hard(batch.hard, options.hard, **at)).astype(np.int64)
        positives, counts, hard = self._group.gather_arrays(
            batch.positives.astype(np.int64), np.diff(batch.positive_offsets), hard
        )
        offsets = np.concatenate([[0], np.cumsum(counts)])
        if options.pool == "all":
            return Pool(range(len(self._texts)), positives, offsets)
        ids = np.unique(np.concatenate([positives, hard]))
        return Pool(ids[ids != PAD], positives, offsets)
