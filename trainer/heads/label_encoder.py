"""Label encoder as a head: labels are encoded from their texts and have no vectors of their own (DEXML)."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from schemas.layout import DataLayout
from schemas.mapped import ScratchRows
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from schemas.text_model import DENSE
from trainer.encoders.base import Encoder
from trainer.group import ALONE, Group, label_range
from trainer.heads.base import Head, HeadStep
from trainer.heads.queries import LABEL_DROPOUT, CachedEmbeddings, dropout_key
from trainer.input_kinds import InputKind
from trainer.inputs import Inputs, columns_of, require_inputs
from trainer.methods.dexml import DualEncoder
from trainer.methods.recipe import Recipe
from trainer.negatives.candidates import candidates_for_every_query, distinct_labels, without_filtered
from trainer.negatives.merge import LabelLists
from trainer.stream.batch import Batch


class LabelEncoderHead(Head):
    """Encodes queries and labels with one shared encoder or two encoders; the loss is over the labels of all ranks.

    With `negatives.pool = "all"` every step scores every label. With "batch" the pool consists of the positives of all
    queries in the batch and `negatives.hard` = m hard negatives per query, drawn from the query's row of the table.
    With one positive per query, the pool has at most B(1 + m) labels. `vectors` are the embeddings of the rank's labels
    [start, stop). Without `texts` the head can only embed given inputs. `encoder`: the encoder of labels.
    """

    has_rows = False

    def __init__(
        self, recipe: Recipe, encoder: Encoder, labels: int, texts: Inputs | None = None, group: Group = ALONE
    ) -> None:
        assert isinstance(recipe, DualEncoder)
        self._options, self._seed = recipe.head, recipe.train.seed
        self._all_labels = recipe.negatives.all_labels
        self._texts, self._group, self._label_encoder = texts, group, encoder
        self._loss = recipe.loss.build()
        self._vectors: torch.Tensor | None = None
        self._pending: tuple[CachedEmbeddings, torch.Tensor] | None = None
        self.labels = 0 if self._texts is None else labels
        self.start, self.stop = label_range(self.labels, self._group.rank, self._group.ranks)

    def encoders(self) -> dict[str, Encoder]:
        return {} if self._options.shared else {"label-encoder": self._label_encoder}

    @property
    def vectors(self) -> torch.Tensor:
        """Embeddings z [stop - start, D] of this rank's labels, without dropout; cached until the encoders change."""
        if self._vectors is None:
            encoder, size = self._label_encoder, self._options.label_batch
            z = torch.empty(self.stop - self.start, encoder.dimension, device=encoder.device)
            for low in range(self.start, self.stop, size):
                high = min(low + size, self.stop)
                inputs = self.texts.take(np.arange(low, high))
                z[low - self.start : high - self.start] = encoder.encode(encoder.prepare(inputs))
            self._vectors = z
        return self._vectors

    @property
    def texts(self) -> Inputs:
        assert self._texts is not None, "this model was loaded without label texts"
        return self._texts

    def label_inputs(self) -> Iterator[Inputs]:
        most = -(-self.labels // self._group.ranks)
        for piece in range(0, most, 1024):
            low, high = (min(self.start + piece + end, self.stop) for end in (0, 1024))
            yield self.texts.take(np.arange(low, high))

    def drop_cached_vectors(self) -> None:
        self._vectors = None

    def learn(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Score this rank's part of the labels in the step's pool; `backward` uses the gradient on these labels."""
        group, planner = self._group, step.planner
        batch = step.batch
        drawn = planner.drawn_positives(batch)
        ids = self.pool(batch, planner.table_negatives(batch), drawn)
        start, stop = label_range(len(ids), group.rank, group.ranks)
        share = np.asarray(ids[start:stop], np.int64)
        candidates = candidates_for_every_query(batch, share, planner.positive_weight, drawn)
        candidates = without_filtered(candidates, batch.filtered)
        labels = CachedEmbeddings(
            self._label_encoder,
            lambda low, high: self.texts.take(share[low:high]),
            stop - start,
            self._options.label_batch,
            partial(dropout_key, batch, LABEL_DROPOUT, start),
        )
        x, z = step.x.detach().requires_grad_(), labels.embed()
        part = self._loss(x, z, candidates, group) / len(x)
        part.backward()
        assert x.grad is not None
        assert z.grad is not None
        self._pending = labels, z.grad
        return part.detach(), x.grad

    def backward(self) -> None:
        assert self._pending is not None, "`backward` needs an earlier call of `learn`"
        labels, gradient = self._pending
        self._pending = None
        labels.backward(gradient)

    def pool(self, batch: Batch, hard: LabelLists = None, drawn: np.ndarray | None = None) -> np.ndarray | range:
        """Return the distinct labels of a step over all ranks, ascending; each rank encodes a part of the labels.

        The labels are the negatives `hard` [B, k] and the `drawn` positives [sum P], or all positives if `drawn` is
        None.
        """
        if self._all_labels:
            return range(self.labels)
        return distinct_labels(batch, hard, drawn)


def open_label_texts(data: DataLayout, kind: InputKind) -> Inputs:
    """Open the inputs that `kind` reads (tokens, features, vectors) for DATA's labels [0, L), and decode each once.

    The inputs are in mapped scratch files, which disappear when the process ends; the system caches as much as fits in
    memory. Raises InputError if the labels lack inputs that `kind` reads; TableError; StorageError.
    """
    labels = Table.open(data.labels, "labels")
    require_inputs(labels, kind)
    writers = {name: ScratchRows("the texts of labels") for name in columns_of(kind)}
    for group in labels.batches(list(writers)):
        for name, writer in writers.items():
            writer.add(list_column(group, name))
    columns = {name: writer.mapped() for name, writer in writers.items()}
    dense = columns.pop(DENSE, None)
    return Inputs.from_columns(columns, None if dense is None else dense.values.reshape(-1, labels.width(DENSE)))
