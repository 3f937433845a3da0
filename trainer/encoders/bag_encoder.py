"""The bag in training: sums of table rows with their gradients, pretrained token vectors, and layers above."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import embedding_bag

from schemas.errors import InputError
from schemas.layout import DataLayout, find_tokenizer
from schemas.ragged import SparseRows, offsets_of
from schemas.randomness import InitialWeights, Purpose, generator
from schemas.sizes import batch_by_size
from schemas.table import Table
from trainer.device import CPU, send, torch_generator
from trainer.encoders.bag import BagFeatures, inverse_document_frequency
from trainer.encoders.base import Before, Encoder, Size, clip_gradients
from trainer.encoders.texts import STATIC_TENSORS, find_folder, reading_model, static_rows
from trainer.group import ALONE, Group
from trainer.input_kinds import INPUT_NAMES, input_names
from trainer.inputs import Inputs
from trainer.methods.kinds import BagSection
from trainer.rows.matrix import RowMatrix, RowOptimizer
from trainer.rows.numba_kernels import by_row
from trainer.rows.torch_kernels import SPAN, sparse_product, split_rows, sum_entries

PIECE = 1 << 14  # number of bags that a rank sends at a time
_NO_BAGS = SparseRows(np.empty(0, np.int64), np.empty(0, np.float32), np.zeros(1, np.int64))


class ByFeature(NamedTuple):
    """Entries of bags, sorted by feature, for `sum_entries`: `bag` and `weight` [n], and `starts` [U + 1] of features.

    `pieces` splits the entries of features that occur in many bags.
    """

    bag: Any
    weight: Any
    starts: Any
    pieces: tuple[Any, Any] | None

    @classmethod
    def of(cls, column: np.ndarray, rows: SparseRows, features: int) -> "ByFeature":
        """Sort the entries of `rows` by feature number, `column` [n]; padding is assigned to bag 0 with weight 0."""
        bag, weight, starts = by_row(column, np.where(rows.values, rows.row_of(), 0), rows.values, features)
        most = np.diff(starts).max(initial=0)
        pieces = split_rows(torch.from_numpy(starts), len(column)) if most > SPAN else None
        return cls(bag, weight, starts, pieces)


@dataclass(frozen=True)
class BagInputs:
    """Distinct features `ids` [U], and the sparse [B, U] matrix (`column`, `weight`, `offsets`) of a batch.

    `bags`: the source rows. `dense`: the rows' vectors [B, d]. `kept` [B, D] bool: the elements of x that dropout
    keeps. On a CPU `places` equals `ids`, and `by_feature` is None. On a device `places` is a tensor, and the
    other tensors are on the device too.
    """

    ids: np.ndarray
    places: np.ndarray | torch.Tensor
    column: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    bags: SparseRows
    dense: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    by_feature: ByFeature | None = None

    @classmethod
    def of(
        cls,
        rows: SparseRows,
        device: torch.device = CPU,
        dense: np.ndarray | None = None,
        kept: torch.Tensor | None = None,
    ) -> "BagInputs":
        """Number the distinct features of B rows."""
        ids, column = np.unique(rows.ids, return_inverse=True)
        sorted_by = None if device == CPU else ByFeature.of(column, rows, len(ids))
        arrays = ids, column, rows.values, rows.offsets, dense, kept, sorted_by
        places, columns, weight, offsets, vectors, kept, sorted_by = send(arrays, device)
        places = ids if device == CPU else places
        return cls(ids, places, columns, weight, offsets, rows, vectors, kept, sorted_by)

    @classmethod
    def over_whole_table(
        cls, rows: SparseRows, device: torch.device = CPU, dense: np.ndarray | None = None
    ) -> "BagInputs":
        """Use the feature ids of B rows unchanged; valid only for `sums` over the whole table, without gradients."""
        columns, weight, offsets, vectors = send((rows.ids, rows.values, rows.offsets, dense), device)
        return cls(rows.ids, rows.ids, columns, weight, offsets, rows, vectors)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum weight * rows[column] over the entries of each row: rows [U, D] -> [B, D]."""
        return embedding_bag(
            self.column, rows, self.offsets, mode="sum", per_sample_weights=self.weight, include_last_offset=True
        )

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient on the rows `ids`, [U, D], from the gradient on the sums [B, D]."""
        if self.by_feature is not None:
            return sum_entries(*self.by_feature[:3], grad.contiguous(), self.by_feature.pieces)
        row = torch.repeat_interleave(self.offsets.diff(), output_size=len(self.column))
        return sparse_product(self.column, row, self.weight, len(self.places), grad.contiguous())


@dataclass
class _PendingBags:
    """A batch and, once known, the gradient on its sums [B, D]; `rows`: gathered rows, only if there is one batch."""

    inputs: BagInputs
    rows: torch.Tensor
    grad: torch.Tensor | None = None

    def take_gradient(self, sums: torch.Tensor) -> None:
        """Store the gradient of the leaf `sums`, so that the leaf can be freed."""
        self.grad = sums.grad


class BagGradients:
    """Gradients on the rows of `table`, computed from the gradients on the bags of any number of batches.

    Ranks store and send bags and the gradients on bags, not gradients on rows, because a batch has many more features
    than bags. A single batch on a single rank is neither copied nor sent. More than PIECE bags are sent in pieces, one
    after another, so a rank holds only its own bags and one piece of every rank's bags in memory.
    """

    def __init__(self, table: RowMatrix) -> None:
        self._table = table
        self._pending: list[_PendingBags] = []
        self._summed: tuple[np.ndarray | torch.Tensor, torch.Tensor] | None = None

    def add(self, inputs: BagInputs, rows: torch.Tensor, sums: torch.Tensor) -> None:
        """Add a batch: `rows` from `RowMatrix.gather`, and the `sums`, a leaf [B, D] that later gets a gradient."""
        none = rows.new_empty(0, rows.shape[1])
        for batch in self._pending:
            batch.rows = none
        self._pending.append(_PendingBags(inputs, none if self._pending else rows))
        sums.register_post_accumulate_grad_hook(self._pending[-1].take_gradient)

    def take(self) -> tuple[np.ndarray | torch.Tensor, torch.Tensor] | None:
        """Return (ids, gathered rows with their gradient) for `RowMatrix.update`; None if there is no gradient."""
        batches = [(batch, batch.grad) for batch in self._pending if batch.grad is not None]
        if len(batches) > 1:
            self.sum_over(ALONE)
        summed, self._summed, self._pending = self._summed, None, []
        if summed is not None:
            places, gradient = summed
            rows = self._table.gather(places)
        elif batches:
            ((batch, grad),) = batches
            places, gradient = batch.inputs.places, batch.inputs.gradient(grad)
            rows = batch.rows if len(batch.rows) == len(batch.inputs.places) else self._table.gather(places)
        else:
            return None
        rows.grad = gradient
        return places, rows

    def sum_over(self, group: Group) -> None:
        """Sum the gradients on rows over all ranks, piece by piece; the result is bitwise the same on every rank."""
        batches = (batch for batch in self._pending if batch.grad is not None)
        pieces = list(batch_by_size(batches, lambda batch: batch.inputs.bags.rows, PIECE))
        inputs, grad, count = self._gather_piece(group, pieces, 0)
        if count > 1:
            own = [np.empty(0, np.int64), *(batch.inputs.ids for piece in pieces for batch in piece)]
            (gathered,) = group.all_gather_arrays(np.unique(np.concatenate(own)).astype(np.int32))
            ids = np.unique(gathered.astype(np.int64))
            total = grad.new_zeros(len(ids), grad.shape[1])
            for number in range(count):
                if number:
                    inputs, grad, _ = self._gather_piece(group, pieces, number)
                total.index_add_(0, send(np.searchsorted(ids, inputs.ids), total.device), inputs.gradient(grad))
            self._summed = ids, total
        elif len(grad):
            self._summed = inputs.places, inputs.gradient(grad)
        self._pending = []

    def _gather_piece(
        self, group: Group, pieces: list[list[_PendingBags]], number: int
    ) -> tuple[BagInputs, torch.Tensor, int]:
        """Return the bags and gradients of piece `number` of all ranks, and the largest number of pieces on a rank."""
        batches = pieces[number] if number < len(pieces) else []
        bags = SparseRows.join([_NO_BAGS, *(batch.inputs.bags for batch in batches)])
        none = torch.empty(0, self._table.shape[1], device=self._table.device)
        grad = torch.cat([none, *(batch.grad for batch in batches if batch.grad is not None)])
        # Ids fit in 32 bits if the table fits in memory.
        ids, weights, counts, numbers = group.all_gather_arrays(
            bags.ids.astype(np.int32),
            bags.values,
            np.diff(bags.offsets).astype(np.int32),
            np.array([len(pieces)], np.int32),
        )
        gathered = SparseRows(ids.astype(np.int64), weights, offsets_of(counts))
        inputs = BagInputs.of(gathered, self._table.device)
        return inputs, group.all_gather(grad), int(numbers.max())


_TRANSFORMER_TENSORS = tuple(
    f"{name}.weight" for name in ("word_embeddings", "embed_tokens", "tok_embeddings", "wte", "shared")
)


def read_token_vectors(name: str, data: DataLayout) -> torch.Tensor:
    """Return the vectors, float32 [V, d], of DATA's tokens in model `name`; zero for tokens that the model lacks.

    Raises the same errors as `find_token_vectors`, and InputError if the model has no token vectors.
    """
    folder, tokens = find_token_vectors(name, data)
    with reading_model(_of(name)):
        rows = _widest(folder)
    if not rows.any():
        raise InputError(
            f"{_of(name)}: no token vectors found. Expected *.safetensors with {' or '.join(STATIC_TENSORS)} "
            "(Model2Vec, sentence-transformers, WordLlama), or with the input embeddings of a transformer."
        )
    if not rows.isfinite().all():
        raise InputError(f"{_of(name)}: a vector contains NaN or infinity. Use another model.")
    return torch.nn.functional.pad(rows[:tokens], (0, 0, 0, max(0, tokens - len(rows))))


def find_token_vectors(name: str, data: DataLayout) -> tuple[Path, int]:
    """Return the folder of a model with the same token ids as DATA, and the number of tokens V.

    Raises InputError if the directory or hub name does not exist, or if the model has a different tokenizer. Raises
    TableError.
    """
    folder, table = find_folder(name), Table.find(data.tokenizer, "tokenizer")
    if table is None:
        raise InputError(f"{_of(name)}: {data.root} contains no tokens. Shard data with texts.")
    data_vocabulary = Tokenizer.from_str(table.read_files()["tokenizer.json"].decode()).get_vocab()
    model_vocabulary = _vocabulary(name, folder)
    same = sum(model_vocabulary.get(token) == number for token, number in data_vocabulary.items())
    if same < len(data_vocabulary):
        raise InputError(
            f"{_of(name)}: only {same:,} of the {len(data_vocabulary):,} tokens of {data.root} have the same id in the "
            f"model, so the tokenizers differ. Shard with the model's tokenizer: extremis shard INPUT DATA "
            f"--tokenizer {name}"
        )
    return folder, int(table.parameters["vocabulary"])


def _of(name: str) -> str:
    return f"encoder.pretrained = {name!r}"


def _widest(folder: Path) -> torch.Tensor:
    """Return the widest token vectors in a model's files; a [0, 0] tensor if there are no token vectors."""
    found = []  # columns, file and name of each table of token vectors
    for place in sorted(folder.rglob("*.safetensors")):
        with safe_open(place, "pt") as tensors:
            names = [name for name in tensors.keys() if name in STATIC_TENSORS or name.endswith(_TRANSFORMER_TENSORS)]  # noqa: SIM118
            shapes = ((tensors.get_slice(name).get_shape(), name) for name in names)
            found += [(shape[1], place, name) for shape, name in shapes if len(shape) == 2]
    if not found:
        return torch.empty(0, 0)
    _, place, widest = max(found)
    with safe_open(place, "pt") as file:
        if widest in STATIC_TENSORS:
            return static_rows({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        rows: torch.Tensor = file.get_tensor(widest).float()
        return rows


def _vocabulary(name: str, folder: Path) -> dict[str, int]:
    try:
        if place := find_tokenizer(folder):
            return Tokenizer.from_file(str(place)).get_vocab()
        from transformers import AutoTokenizer  # for models without this file

        return dict(AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab())
    except Exception as error:
        raise InputError(f"{_of(name)}: cannot load the tokenizer ({str(error).splitlines()[0]}).") from None


def fit_columns(rows: torch.Tensor, dimension: int, scale: float, seed: int) -> torch.Tensor:
    """Return `rows` [V, d] as [V, D]: centred, rotated, and scaled to a root mean square length of `scale`.

    If D < d, the columns are the D principal components; otherwise, a random orthonormal map turns d columns into D.
    Zero rows stay zero.
    """
    known, width = rows.any(1), rows.shape[1]
    centred = torch.where(known[:, None], rows - rows[known].mean(0), 0)
    if dimension < width:
        _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
        turn = directions[:, -dimension:]
    else:
        draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.PRETRAINED)
        turn = torch.linalg.qr(torch.randn(dimension, width, generator=draw)).Q.T
    turned = centred @ turn
    return turned * (scale / turned[known].square().sum(1).mean().sqrt().clamp(min=1e-12))


class BagEncoder(Encoder):
    """x = dropout(r(sum_f weight_f E_f + P d)), where r is the identity, a residual layer or relu.

    A step updates only the rows of E for features in the batch. The first rows of E are for tokens, the next rows for
    hashed n-grams, the last rows for the data's sparse features; E has no rows for kinds of features that `inputs` does
    not include. If `inputs` includes dense vectors, d is the dense vector of a row, scaled to length `dense_weight`,
    and P is [D, d].
    """

    _config: BagSection

    def __init__(self, config: BagSection, vocabulary: int, seed: int, features: int = 0, dense: int = 0) -> None:
        self._read = BagFeatures(config, vocabulary, features, dense)
        self._vocabulary, self._sparse_from = self._read.vocabulary, self._read.sparse_from
        self._features, self._dense = self._read.features, self._read.dense
        super().__init__(config, Layers(config, self._dense, seed), seed, config.dense_lr)
        weight = torch.empty(self._features, config.dimension)
        spread = config.initial_scale / math.sqrt(config.dimension)
        weight.normal_(0, spread, generator=torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.EMBEDDING))
        self._table = RowMatrix(weight, RowOptimizer(config.optimizer, weight_decay=config.weight_decay))
        self.matrices = (self._table,)
        self._weights = self._given_weights()
        self._known = torch.zeros(self._features, dtype=torch.bool)
        self._gradients = BagGradients(self._table)

    @classmethod
    def size(cls, config: BagSection, vocabulary: int, dense: int = 0) -> Size:
        """Return the size of a bag in bytes, extrapolated linearly from bags with one and two features."""
        changes = {"inputs": "tokens", "ngrams": 1}
        projection = 4 * config.dimension * dense * ("dense" in input_names(config.inputs))
        first, second = (cls(config.model_copy(update=changes), tokens, 0)._measure() for tokens in (1, 2))
        row, row_state = second.parameters - first.parameters, second.state - first.state
        layers = first.parameters - row + projection
        features = vocabulary + (config.buckets if config.ngrams > 1 else 0)
        return Size(layers + features * row, 2 * layers + features * row_state)

    @classmethod
    def least_bytes(cls, config: BagSection, vocabulary: int, features: int, dense: int = 0) -> int:
        """Return the bytes of the embedding table, of the residual layer's weights and of the projection."""
        tokens = vocabulary + (config.buckets if config.ngrams > 1 else 0)
        sizes = zip(INPUT_NAMES, (tokens, features, dense), strict=True)
        rows = sum(size for part, size in sizes if part in input_names(config.inputs))
        layer = (2 * config.hidden or config.dimension) * config.residual
        return 4 * config.dimension * (rows + layer)

    def begin(self, data: DataLayout) -> None:
        """Set token vectors from `encoder.pretrained`, and n-gram vectors to zero, since random vectors would dominate.

        A token that occurs in no training row then still contributes to x if the pretrained model has a vector for the
        token. Raises InputError, TableError.
        """
        config = self._config
        if not config.pretrained:
            return
        known = read_token_vectors(config.pretrained, data)
        vectors = fit_columns(known, config.dimension, config.initial_scale, self._seed)
        self._known[: self._vocabulary] = vectors.any(1)
        self._table.weight[: self._vocabulary] = vectors.to(self._table.weight)
        self._table.weight[self._vocabulary : self._sparse_from] = 0

    def fit(self, rows: Iterable[Inputs], group: Group = ALONE) -> None:
        """Set IDF weights from document frequencies over at most `idf_rows` rows."""
        config = self._config
        if not self._features or (not config.idf and "features" not in input_names(config.inputs)):
            return
        frequency = np.zeros(self._features, np.int64)
        documents = 0
        for inputs in rows:
            features = self._read.count(inputs)
            frequency += np.bincount(features.ids, minlength=self._features)
            documents += sum(group.sizes(features.rows))
            if documents >= self._config.idf_rows:
                break
        group.sum(torch.from_numpy(frequency))
        weights = self._weights_by(frequency, documents)
        if documents < self._config.idf_rows:
            # A feature in no training row has a random vector, which would add noise with the highest IDF at test time.
            weights[(frequency == 0) & ~self._known.numpy()] = 0
        self._weights *= torch.from_numpy(weights)

    def admit(self, rows: Iterable[Inputs], documents: int) -> None:
        """Add weights for features that first occur in `rows`, with zero vectors, so no text's embedding changes."""
        unseen = (self._weights == 0).numpy()
        if not unseen.any():
            return
        frequency = np.zeros(self._features, np.int64)
        for inputs in rows:
            frequency += np.bincount(self._read.count(inputs).ids, minlength=self._features)
        admitted = torch.from_numpy(np.flatnonzero(unseen & (frequency > 0)))
        weights = torch.from_numpy(self._weights_by(frequency, documents))
        self._weights[admitted] = (self._given_weights() * weights)[admitted]
        self._table.weight[admitted.to(self._table.device)] = 0

    def _weights_by(self, frequency: np.ndarray, documents: int) -> np.ndarray:
        """Return each feature's IDF, given its `frequency` in `documents` documents; 1 without IDF."""
        weights = inverse_document_frequency(frequency, documents)
        if not self._config.idf:
            weights[: self._sparse_from] = 1
        if not self._config.feature_idf:
            weights[self._sparse_from :] = 1
        return weights

    def _given_weights(self) -> torch.Tensor:
        """Return the configured factor of each feature, before IDF."""
        weights = torch.ones(self._features)
        weights[self._vocabulary : self._sparse_from] = self._config.ngram_weight
        weights[self._sparse_from :] = self._config.feature_weight
        return weights

    def prepare(
        self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None, before: Before = ALONE.before
    ) -> BagInputs:
        rows = self._read.weigh(inputs, self._weights.numpy())  # weights stay on the host
        dense = self._read.dense_of(inputs)
        if dropout_key is None:
            return BagInputs.over_whole_table(rows, self.device, dense)
        first = before(rows.rows)
        kept = self._draw_kept(rows.rows, dropout_key, first)
        return BagInputs.of(self._drop_features(rows, dropout_key, before), self.device, dense, kept)

    def encode(self, inputs: BagInputs, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        rows = self._table.weight if dropout_key is None else self._table.gather(inputs.places)
        d = inputs.dense
        with torch.no_grad():
            v = inputs.sums(rows)
            if d is not None:
                d = nn.functional.normalize(d.to(v.dtype), dim=1) * self._config.dense_weight
            if dropout_key is None:
                return self._finish(self._modules(v, d))
        if torch.is_grad_enabled():
            self._gradients.add(inputs, rows, v.requires_grad_())
        return self._finish(self._modules(v, d), inputs.kept)

    def move(self, device: torch.device) -> None:
        super().move(device)
        self._table.move(device)

    def reduce(self, group: Group) -> None:
        if group.ranks > 1:
            self._gradients.sum_over(group)
        super().reduce(group)

    def update(self, factor: float, clip: float = 0.0) -> None:
        touched = self._gradients.take()
        dense = (parameter.grad for parameter in self._modules.parameters())
        clip_gradients([None if touched is None else touched[1].grad, *dense], clip)
        if touched is not None:
            self._table.update(*touched, self._config.lr * factor)
        super().update(factor)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"embedding": self._table.weight, "feature_weights": self._weights, **super().tensors()}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        named = {f"embedding.{name}": value for name, value in self._table.state.items()}
        return named | super().optimizer_tensors()

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self._table.weight.copy_(tensors["embedding"])
        self._weights = tensors["feature_weights"].clone()
        super().load_tensors(tensors)

    def load_optimizer_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in self._table.state.items():
            value.copy_(tensors.get(f"embedding.{name}", value))
        super().load_optimizer_tensors(tensors)

    def _drop_features(self, rows: SparseRows, dropout_key: tuple[int, ...], before: Before) -> SparseRows:
        share = self._config.feature_dropout
        if not share:
            return rows
        first = before(len(rows.ids))
        drawn = generator(self._seed, Purpose.FEATURE_DROPOUT, *dropout_key).random(first + len(rows.ids))
        rows = rows.keep(drawn[first:] >= share)
        return rows._replace(values=rows.values / np.float32(1 - share))


class Layers(nn.Module):
    """[B, D] -> [B, D]: r(v + P d), with d [B, d] if there is a `projection` P; `dense` is r."""

    def __init__(self, config: BagSection, dense: int, seed: int) -> None:
        super().__init__()
        draw, projection = (
            torch_generator(seed, Purpose.INITIAL_WEIGHTS, part)
            for part in (InitialWeights.DENSE, InitialWeights.PROJECTION)
        )
        self.dense: nn.Module = Rectified(config.dimension) if config.relu else nn.Identity()
        if config.residual:
            self.dense = Residual(config.dimension, config.hidden, draw)
        self.projection = nn.Linear(dense, config.dimension, bias=False) if dense else None
        if self.projection is not None:  # rows are orthonormal if D < d, else columns are
            nn.init.orthogonal_(self.projection.weight, config.initial_scale, projection)

    def forward(self, v: torch.Tensor, d: torch.Tensor | None = None) -> torch.Tensor:
        if self.projection is not None:
            assert d is not None, "these rows were read without dense vectors"
            v = v + self.projection(d)
        x: torch.Tensor = self.dense(v)
        return x


class Rectified(nn.Module):
    """[B, D] -> [B, D]: relu(v + b), where b is initially 0."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dimension))

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        return torch.relu(v + self.bias)


class Residual(nn.Module):
    """[B, D] -> [B, D]: v + relu(Linear(v)), or with `hidden` units v + Linear(relu(Linear(v))); initially near v."""

    def __init__(self, dimension: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = nn.Linear(dimension, hidden or dimension)
        self.outer = nn.Linear(hidden, dimension) if hidden else None
        near_zero = 0.01
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            if self.outer is None:
                self.inner.weight.normal_(0, near_zero, generator=generator)
            else:
                self.inner.weight.normal_(0, 1 / math.sqrt(dimension), generator=generator)
                self.outer.weight.normal_(0, near_zero, generator=generator)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        within = torch.relu(self.inner(v))
        return v + (within if self.outer is None else self.outer(within))
