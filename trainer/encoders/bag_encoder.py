"""A bag of embeddings over tokens, n-grams and sparse features, plus a dense vector; trains on a CPU in minutes."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from schemas.layout import DataLayout
from schemas.ragged import SparseRows
from schemas.randomness import InitialWeights, Purpose, generator
from trainer.device import torch_generator
from trainer.encoders.bag import BagFeatures, BagSection
from trainer.encoders.base import Before, Encoder, Size, clip_gradients
from trainer.encoders.embedding_bag import BagGradients, BagInputs
from trainer.encoders.features import inverse_document_frequency
from trainer.encoders.token_vectors import fit_columns, read_token_vectors
from trainer.group import ALONE, Group
from trainer.input_kinds import INPUT_NAMES, input_names
from trainer.inputs import Inputs
from trainer.rows.matrix import RowMatrix, RowOptimizer


class BagEncoder(Encoder):
    """x = dropout(r(sum_f weight_f E_f + P d)), where r is the identity, a residual layer or relu.

    A step updates only the rows of E for features in the batch. The first rows of E are for tokens, the next rows for
    hashed n-grams, the last rows for the data's sparse features; E has no rows for kinds of features that `inputs` does
    not include. If `inputs` includes dense vectors, d is the dense vector of a row, scaled to length `dense_weight`,
    and P is [D, d].
    """

    section = BagSection
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
            return BagInputs.table_negatives(rows, self.device, dense)
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
        self._gradients.reduce(group)
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
