"""Heads: embed a batch with cached gradients; label vectors that are a classifier's rows, or that an encoder gives."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from schemas.arrow import DENSE
from schemas.layout import DataLayout
from schemas.mapped import ScratchFile, ScratchRows
from schemas.randomness import InitialWeights, Purpose
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from trainer.device import CPU, AsyncCopy, send, torch_generator
from trainer.encoders.base import Encoder
from trainer.group import ALONE, Group, label_range
from trainer.input_kinds import InputKind
from trainer.inputs import Inputs, columns_of, require_inputs
from trainer.losses import Loss
from trainer.methods.dexml import DualEncoder
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.methods.sections import Classifier as ClassifierConfig
from trainer.negatives.base import Sampled
from trainer.negatives.merge import LabelLists
from trainer.negatives.planner import Planner, candidates_for_every_query, distinct_labels, without_filtered
from trainer.one_vs_all import Merged, binary_cross_entropy, binary_step, merge_ahead
from trainer.rows.matrix import DTYPES, IN_MEMORY, HostMatrix, RowMatrix, RowOptimizer, zeros
from trainer.stream import Source
from trainer.stream.batch import Batch, Candidates

# Called before rows of candidates (counted from the rank's first label) change. For labels that a device merged, the
# second argument is the ids [n], including padding.
BeforeChange = Callable[[Candidates, torch.Tensor | None], None]


@dataclass(frozen=True)
class HeadStep:
    """Input of a head's step: the global `batch`, its query embeddings x [B, D], and the negatives found with x.

    `number`: index of the step in the run, from 0. `factor` scales every rate. `before_change` is called
    before rows change.
    """

    batch: Batch
    x: torch.Tensor
    sampled: list[Sampled]
    planner: Planner
    number: int
    factor: float
    before_change: BeforeChange


class Head(ABC):
    """This rank's labels [start, stop), out of all labels [0, labels), and the vectors that x is scored against."""

    labels: int
    start: int
    stop: int
    bias = False  # True: vectors have a last column, which is multiplied by a constant 1 in x
    matrices: tuple[Any, ...] = ()  # each RowMatrix or HostMatrix that `learn` steps on
    has_rows = True  # False: labels are encoded, so no label has a row

    @property
    @abstractmethod
    def vectors(self) -> torch.Tensor:
        """Vectors [stop - start, D] (D + 1 with a bias), for dumps, indexes and searches."""

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return a float32 copy of the vectors `rows` [C], counted from `start`, without a gradient."""
        vectors = self.vectors
        return vectors.index_select(0, torch.from_numpy(rows).to(vectors.device)).float().cpu().numpy()

    @abstractmethod
    def learn(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the loss, a scalar, and its gradient on x [B, D]; update the head's rows.

        Never waits for the device.
        """

    def backward(self) -> None:  # noqa: B027
        """Add the gradients of the last call of `learn` to the encoders."""

    def encoders(self) -> dict[str, Encoder]:
        """Return all encoders except the query encoder, keyed by the name of their part of a checkpoint."""
        return {}

    def drop_cached_vectors(self) -> None:  # noqa: B027
        """Drop results that were cached before the encoders changed."""

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, D], with a last column of ones appended if the vectors have a bias."""
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.bias else x

    def label_inputs(self) -> Iterator[Inputs]:
        """If labels are encoded, yield the texts of this rank's labels, in the same number of pieces on every rank."""
        return iter(())

    def rows(self, optimizer: bool = True) -> dict[str, torch.Tensor]:
        """Return all rows [n, ...] of this rank's labels by name; with `optimizer`, also the optimizer's state."""
        return {}


QUERY_DROPOUT, LABEL_DROPOUT = 0, 1  # two kinds of dropout key
_MAX_IN_FLIGHT = 2  # maximum number of batches that a GPU is sending


def dropout_key(batch: Batch, kind: int, first: int, start: int) -> tuple[int, int, int]:
    """Return the dropout key of a sub-batch that starts at row `first + start` over all ranks.

    `kind`: QUERY_DROPOUT or LABEL_DROPOUT. A row's dropout does not depend on the number of ranks if sub-batches begin
    at the same rows.
    """
    return batch.epoch, batch.step, 2 * (first + start) + kind


class CachedEmbeddings:
    """Embeddings x [n, D] of training rows, computed `size` at a time without a graph; `backward` computes x again.

    `inputs(start, stop)` returns rows [start, stop) of the n rows, and `key(start)` returns their dropout key. If there
    is a single sub-batch, its graph is kept, so nothing is computed twice.
    """

    def __init__(
        self,
        encoder: Encoder,
        inputs: Callable[[int, int], Inputs],
        count: int,
        size: int,
        key: Callable[[int], tuple[int, ...]],
    ) -> None:
        self._encoder, self._inputs, self._count = encoder, inputs, count
        self._size = size or max(1, count)
        self._key = key
        self._graph: torch.Tensor | None = None

    def embed(self) -> torch.Tensor:
        """Return x [n, D], a leaf that requires a gradient."""
        if 0 < self._count <= self._size:
            self._graph = self._encode(0, self._count)
            return self._graph.detach().requires_grad_()
        x = torch.empty(self._count, self._encoder.dimension, device=self._encoder.device)
        with torch.no_grad():
            for start, stop in self._parts():
                x[start:stop] = self._encode(start, stop)
        return x.requires_grad_()

    def backward(self, grad: torch.Tensor) -> None:
        """Add to the encoder's gradients; `grad` [n, D] is the loss's gradient on the result of `embed`."""
        if self._graph is not None:
            self._graph.backward(grad)
            self._graph = None
            return
        for start, stop in self._parts():
            self._encode(start, stop).backward(grad[start:stop])

    def _parts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._count, self._size):
            yield start, min(start + self._size, self._count)

    def _encode(self, start: int, stop: int) -> torch.Tensor:
        key = self._key(start)
        return self._encoder.encode(self._encoder.prepare(self._inputs(start, stop), key), key)


class QueryEmbeddings(ABC):
    """Embeds batches one after another; call `backward` for each batch before embedding the next batch."""

    trains = True  # False: the encoder does not change, and needs no gradient

    def begin(self, sources: Sequence[Source]) -> None:  # noqa: B027
        """Begin an epoch over `sources`."""

    def preparing(self) -> Callable[[Batch], Any] | None:
        """Return a function that prepares a whole batch ahead, in any thread; None if no batch is prepared ahead."""
        return None

    @abstractmethod
    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        """Return x [b, D] of a rank's part of a batch, without a graph; the part starts at row `first` of the batch."""

    @abstractmethod
    def backward(self, gradient: torch.Tensor) -> None:
        """Add to the encoder's gradients; `gradient` [b, D] is the loss's gradient on the last x."""


class WholeBatch(QueryEmbeddings):
    """Encodes all queries at once, with the graph in memory; `lap` is called when the queries are prepared."""

    def __init__(self, encoder: Encoder, group: Group, lap: Callable[[str], None]) -> None:
        self._encoder, self._group, self._lap = encoder, group, lap
        self._x: torch.Tensor | None = None

    def preparing(self) -> Callable[[Batch], Any] | None:
        # With several ranks, each rank sends its number of rows within a step.
        return self._prepare if self._encoder.device != CPU and self._group.ranks == 1 else None

    def _prepare(self, batch: Batch) -> Any:
        return self._encoder.prepare(batch.inputs, (batch.epoch, batch.step), self._group.before)

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        inputs = self._prepare(batch) if batch.prepared is None else batch.prepared
        self._lap("prepare")
        self._x = self._encoder.encode(inputs, (batch.epoch, batch.step))
        return self._x.detach()

    def backward(self, gradient: torch.Tensor) -> None:
        # The graph ends here: nodes shared with the next graph would run on the stream of this step.
        x, self._x = self._x, None
        assert x is not None, "`backward` needs an earlier call of `embed`"
        with self._encoder.exchanging(self._group):
            x.backward(gradient)


class SubBatches(QueryEmbeddings):
    """Encodes queries in `parts` sub-batches, with one graph at a time."""

    def __init__(self, encoder: Encoder, parts: int) -> None:
        self._encoder, self._parts = encoder, parts

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        size = -(-len(batch) // self._parts)
        key = partial(dropout_key, batch, QUERY_DROPOUT, first)
        self._cached = CachedEmbeddings(self._encoder, batch.inputs.slice, len(batch), size, key)
        return self._cached.embed().detach()

    def backward(self, gradient: torch.Tensor) -> None:
        self._cached.backward(gradient)


class FrozenQueries(QueryEmbeddings):
    """Encodes queries with a frozen encoder, each query once (NGAME, appendix C, module M2), without dropout.

    A float16 scratch file [N, D] contains x of each training row, indexed by row id. Every x is rounded to float16, so
    a resumed run that encodes the rows again gets the same x. Row ids refer to the tables of an epoch, so all rows are
    encoded again if the tables change.
    """

    trains = False

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tables: list[str] = []
        self._arriving: deque[tuple[np.ndarray, AsyncCopy]] = deque()

    def begin(self, sources: Sequence[Source]) -> None:
        """Begin an epoch over `sources`: drop the rows of other sources."""
        self._fetch(0)
        tables = [source.table.manifest.digest for source in sources]
        if tables == self._tables:
            return
        self._tables = tables
        rows = sum(source.rows for source in sources)
        shape = (max(1, rows), self._encoder.dimension)
        scratch = ScratchFile("the embeddings of a frozen encoder").reserve(2 * shape[0] * shape[1])
        self._x = np.ndarray(shape, np.float16, scratch)
        self._encoded = np.zeros(rows, bool)

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        on_host = self._encoder.device == CPU
        self._fetch(_MAX_IN_FLIGHT)
        new = np.flatnonzero(~self._encoded[batch.rows])
        encoded = None
        if len(new):
            encoded = self._encoder.encode(self._encoder.prepare(batch.inputs.take(new))).half()
            self._arriving.append((batch.rows[new], AsyncCopy(encoded)))
            self._fetch(0 if on_host else _MAX_IN_FLIGHT)
        x: torch.Tensor = send(self._x[batch.rows].astype(np.float32), self._encoder.device)
        if encoded is not None and not on_host:
            x[send(new, x.device)] = encoded.float()  # not in the file yet
        return x

    def _fetch(self, left: int) -> None:
        """Write the batches that have arrived from the device to the file, except the last `left` batches."""
        while len(self._arriving) > left:
            rows, x = self._arriving.popleft()
            self._x[rows] = x.take()
            self._encoded[rows] = True

    def backward(self, gradient: torch.Tensor) -> None:
        raise AssertionError("a frozen encoder has no gradient")


_FILLED = 1 << 16  # number of labels with initial vectors drawn at a time


class Classifier(Head):
    """A vector w_l in R^D for each label l in [0, L), with an optional bias in the last column, where x contains a 1.

    Each rank of `group` has the labels [start, stop). `bounds` [G + 1] gives the ranges of all ranks; None means ranges
    of equal size. Row ids are relative to `start`. Raises InputError if the rows do not fit into `config.storage` or on
    the `device`.
    """

    def __init__(
        self,
        config: ClassifierConfig,
        labels: int,
        dimension: int,
        seed: int,
        loss: Loss = binary_cross_entropy,
        group: Group = ALONE,
        device: torch.device = CPU,
        bounds: Sequence[int] | None = None,
    ) -> None:
        self.labels = labels
        rank, ranks = group.rank, group.ranks
        self.start, self.stop = bounds[rank : rank + 2] if bounds else label_range(labels, rank, ranks)
        self.bias = config.bias
        self._lr, self._loss, self._group = config.lr, loss, group
        self._normalize, self._narrow = config.normalize, config.products == "bfloat16"
        shape = self.stop - self.start, dimension + int(config.bias)
        on_host = device != CPU and config.storage != IN_MEMORY
        weight = zeros(shape, DTYPES[config.dtype], config.storage, CPU if on_host else device)
        _initialise(weight, config, labels, self.start, seed)
        optimizer = RowOptimizer(config.optimizer, config.momentum, config.weight_decay)
        rows = RowMatrix(weight, optimizer, first=self.start, seed=seed, storage=config.storage)
        self.matrix = HostMatrix(rows, device) if on_host else rows
        self.matrices = (self.matrix,)

    @property
    def vectors(self) -> torch.Tensor:
        return self.matrix.weight

    def learn(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        total, on_x, scale = None, None, 1 / len(step.batch)
        for candidates in step.planner.chunks(step.batch, step.sampled):
            merged = merge_ahead(candidates, self.matrix.device)
            step.before_change(candidates, None if merged is None else merged[0])
            loss, gradient = self.descend(step.x, candidates, step.factor, step.number, scale, merged)
            total = loss if total is None else total + loss
            on_x = gradient if on_x is None else on_x.add_(gradient)
        if total is None or on_x is None:
            return step.x.new_zeros((), dtype=torch.float64), torch.zeros_like(step.x)
        return torch.as_tensor(total, dtype=torch.float64), on_x

    def descend(
        self,
        x: torch.Tensor,
        candidates: Candidates,
        factor: float,
        number: int = 0,
        scale: float = 1.0,
        merged: Merged | None = None,
    ) -> tuple[float | torch.Tensor, torch.Tensor]:
        """Update all rows of `candidates`; return `scale` times the loss of x [B, D], and the gradient on x.

        The method gathers rows, computes the loss and gradients, and updates the rows. Binary cross-entropy does all
        this in a single pass over the rows. `merged`: the result of `merge_ahead`, if the device has merged the
        candidates already.
        """
        lr = self._lr * factor
        value: float | torch.Tensor
        if self._loss.options == binary_cross_entropy.options:
            merged = merged or merge_ahead(candidates, self.matrix.device)
            value, on_x = binary_step(x, self.matrix, candidates, lr, number, scale, merged, self._narrow)
        else:
            assert candidates.drawn is None, "a device merges labels only for binary cross-entropy"
            ids = self.matrix.prepare(candidates.ids)
            leaf, w = x.detach().requires_grad_(), self.matrix.gather(ids)
            loss = self._loss(leaf, w, candidates, self._group) * scale
            loss.backward()
            self.matrix.update(ids, w, lr, number)
            assert leaf.grad is not None
            value, on_x = loss.detach().double(), leaf.grad
        if self._normalize:
            if merged is not None:
                assert isinstance(self.matrix, RowMatrix), "labels of rows on the host are merged on the host"
                self.matrix.normalize(merged[0])
            else:
                self.matrix.normalize(candidates.ids)
        return value, on_x

    def rows(self, optimizer: bool = True) -> dict[str, torch.Tensor]:
        return {"weight": self.matrix.weight, **(self.matrix.state if optimizer else {})}


def merges_on(device: torch.device, recipe: Recipe) -> bool:
    """Return whether `device` merges the labels of own pools; needs binary cross-entropy and rows on the device."""
    on_device = device != CPU and isinstance(recipe, ClassifierRecipe) and recipe.classifier.storage == IN_MEMORY
    return on_device and recipe.loss == binary_cross_entropy.options


def _initialise(weight: torch.Tensor, config: ClassifierConfig, labels: int, first: int, seed: int) -> None:
    """Fill `weight`, which is zero, with rows [first, ...) of the L random initial vectors, and with the initial bias.

    Random numbers are keyed by blocks of labels, so a rank draws only the blocks that contain its rows.
    """
    stop, drawn = first + len(weight), config.initial == "random" and config.initial_scale
    for block in range(first // _FILLED, -(-stop // _FILLED) if drawn else 0):
        start = block * _FILLED
        rows = torch.empty(min(_FILLED, labels - start), weight.shape[1])
        draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.CLASSIFIER, block)
        rows.normal_(0, config.initial_scale, generator=draw)
        if config.normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
        low, high = max(start, first), min(start + len(rows), stop)
        weight[low - first : high - first] = rows[low - start : high - start]
    if config.bias and config.initial_bias:
        weight[:, -1] = config.initial_bias


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
