"""A bag of embeddings over tokens, hashed n-grams and sparse features: trains from scratch on a CPU in minutes."""

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from schemas.errors import TableError
from schemas.ragged import SparseRows
from schemas.randomness import InitialWeights, Purpose, generator
from trainer.config.encoder import EncoderSection
from trainer.device import torch_generator
from trainer.encoders.base import (
    Before,
    Encoder,
    Size,
    clip_gradients,
    drop,
    finish,
    nothing_before,
    reduce_parameters,
)
from trainer.encoders.embedding_bag import BagGradients, BagInputs
from trainer.encoders.features import (
    count_ngrams,
    inverse_document_frequency,
    join_rows,
    normalize_rows,
    scale_features,
)
from trainer.encoders.residual import Residual
from trainer.group import ALONE, Group
from trainer.inputs import Inputs
from trainer.rows.matrix import RowMatrix, RowOptimizer


class BagSection(EncoderSection):
    """Options of a bag of embeddings."""

    FREE = EncoderSection.FREE | {"optimizer", "dense_lr", "initial_scale", "idf_rows", "feature_dropout"}

    kind: Literal["bag"] = "bag"
    optimizer: Literal["sgd", "adagrad", "adam"] = Field("adam", description="of the embedding rows, touched rows only")
    dense_lr: float = Field(0.001, gt=0, description="Adam's rate for the dense parameters of a bag")
    initial_scale: float = Field(1.0, gt=0, description="expected norm of a feature's initial vector")
    ngrams: int = Field(2, ge=1, le=5, description="hashed n-grams of tokens up to this length")
    buckets: int = Field(1 << 18, ge=0, description="hash buckets for n-grams of two and more tokens")
    ngram_weight: float = Field(1.0, gt=0, description="factor on the weights of n-grams of two and more tokens")
    idf: bool = Field(True, description="weight features by inverse document frequency")
    idf_rows: int = Field(1_000_000, ge=1, description="training rows that document frequencies are counted on")
    feature_idf: bool = Field(False, description="weight sparse features by inverse document frequency too")
    feature_weight: float = Field(1.0, gt=0, description="factor on the values of sparse features, beside tokens")
    unit_features: bool = Field(True, description="scale a row's feature weights to unit L2 norm")
    feature_dropout: float = Field(0.0, ge=0, lt=1, description="share of features dropped in training")
    residual: bool = Field(False, description="a residual layer on top: v + relu(Linear(v))")
    hidden: int = Field(0, ge=0, description="units within the residual layer: v + Linear(relu(Linear(v))); 0: without")

    @model_validator(mode="after")
    def _check(self) -> "BagSection":
        if self.hidden and not self.residual:
            raise ValueError("encoder.hidden is the width of the residual layer: set encoder.residual = true")
        if self.ngrams > 1 and self.buckets == 0:
            raise ValueError("encoder.ngrams > 1 needs encoder.buckets > 0")
        return self


class BagEncoder(Encoder):
    """x = dropout(r(sum_f weight_f E_f)), r the identity or a residual layer; E is trained on touched rows only.

    Rows of E are tokens, then hashed n-grams, then the data's sparse features; only those that `inputs` reads.
    """

    section = BagSection

    def __init__(self, config: BagSection, vocabulary: int, seed: int, features: int = 0) -> None:
        self.dimension = config.dimension
        self._config, self._seed = config, seed
        reads_tokens, reads_features = config.inputs != "features", config.inputs != "tokens"
        self._vocabulary = vocabulary if reads_tokens else 0
        self._sparse_from = self._vocabulary + (config.buckets if reads_tokens and config.ngrams > 1 else 0)
        self._features = self._sparse_from + (features if reads_features else 0)
        weight = torch.empty(self._features, config.dimension)
        spread = config.initial_scale / math.sqrt(config.dimension)
        weight.normal_(0, spread, generator=torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.EMBEDDING))
        self._table = RowMatrix(weight, RowOptimizer(config.optimizer))
        self._weights = torch.ones(self._features)
        self._weights[self._vocabulary : self._sparse_from] = config.ngram_weight
        self._weights[self._sparse_from :] = config.feature_weight
        draw_dense = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.DENSE)
        self._dense = Residual(config.dimension, config.hidden, draw_dense) if config.residual else None
        self._dense_optimizer = (
            None
            if self._dense is None
            else torch.optim.AdamW(self._dense.parameters(), lr=config.dense_lr, weight_decay=config.weight_decay)
        )
        self._gradients = BagGradients(self._table)

    @classmethod
    def size(cls, config: BagSection, vocabulary: int) -> Size:
        """Return the bytes of a bag, which is linear in its features, from those of bags with one and two of them."""
        changes = {"inputs": "tokens", "ngrams": 1}
        first, second = (cls(config.model_copy(update=changes), tokens, 0)._measure() for tokens in (1, 2))
        row, row_state = second.parameters - first.parameters, second.state - first.state
        dense = first.parameters - row
        features = vocabulary + (config.buckets if config.ngrams > 1 else 0)
        return Size(dense + features * row, 2 * dense + features * row_state)

    def fit(self, rows: Iterable[Inputs], group: Group = ALONE) -> None:
        """Set IDF weights from document frequencies over at most `idf_rows` rows."""
        config = self._config
        if not config.idf and config.inputs == "tokens":
            return
        frequency = np.zeros(self._features, np.int64)
        documents = 0
        for inputs in rows:
            features = self._features_of(inputs)
            frequency += np.bincount(features.ids, minlength=self._features)
            documents += sum(group.sizes(features.rows))
            if documents >= self._config.idf_rows:
                break
        group.sum(torch.from_numpy(frequency))
        weights = inverse_document_frequency(frequency, documents)
        if not config.idf:
            weights[: self._sparse_from] = 1
        if not config.feature_idf:
            weights[self._sparse_from :] = 1
        if documents < self._config.idf_rows:
            # A feature that no training row has keeps its random vector: at test it would be noise of the highest IDF.
            weights[frequency == 0] = 0
        self._weights *= torch.from_numpy(weights)

    def prepare(
        self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None, before: Before = nothing_before
    ) -> BagInputs:
        rows, first = scale_features(self._features_of(inputs), self._weights.numpy()), 0
        if self._config.unit_features:
            rows = normalize_rows(rows)
        if dropout_key is not None:
            first = before(rows.rows)
            rows = self._drop_features(rows, dropout_key, before)
        return BagInputs.of(rows, first)

    def encode(self, inputs: BagInputs, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        rows = self._table.gather(inputs.ids)
        with torch.no_grad():
            v = inputs.sums(rows)
            if dropout_key is None:
                return self._finish(v, None)
        if torch.is_grad_enabled():
            self._gradients.add(inputs, rows, v.requires_grad_())
        return self._finish(v, dropout_key, inputs.first)

    def reduce(self, group: Group) -> None:
        self._gradients.reduce(group)
        if self._dense is not None:
            reduce_parameters(self._dense.parameters(), group)

    def update(self, factor: float, clip: float = 0.0) -> None:
        touched = self._gradients.take()
        dense = () if self._dense is None else self._dense.parameters()
        clip_gradients([None if touched is None else touched[1].grad, *(each.grad for each in dense)], clip)
        if touched is not None:
            self._table.update(*touched, self._config.lr * factor)
        if self._dense_optimizer is not None:
            self._dense_optimizer.param_groups[0]["lr"] = self._config.dense_lr * factor
            self._dense_optimizer.step()
            self._dense_optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"embedding": self._table.weight, "feature_weights": self._weights}
        if self._dense is not None:
            named |= {f"dense.{name}": value.detach() for name, value in self._dense.named_parameters()}
        return named

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        named = {f"embedding.{name}": value for name, value in self._table.state.items()}
        if self._dense_optimizer is not None and self._dense is not None:
            for name, parameter in self._dense.named_parameters():
                for key, value in self._dense_optimizer.state.get(parameter, {}).items():
                    named[f"dense.{name}.{key}"] = torch.as_tensor(value)
        return named

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self._table.weight.copy_(tensors["embedding"])
        self._weights = tensors["feature_weights"].clone()
        if self._dense is not None:
            with torch.no_grad():
                for name, parameter in self._dense.named_parameters():
                    parameter.copy_(tensors[f"dense.{name}"])

    def load_optimizer_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in self._table.state.items():
            value.copy_(tensors[f"embedding.{name}"])
        if self._dense_optimizer is not None and self._dense is not None:
            for name, parameter in self._dense.named_parameters():
                prefix = f"dense.{name}."
                saved = {key[len(prefix) :]: value.clone() for key, value in tensors.items() if key.startswith(prefix)}
                if saved:
                    self._dense_optimizer.state[parameter] = saved

    def _drop_features(self, rows: SparseRows, dropout_key: tuple[int, ...], before: Before) -> SparseRows:
        share = self._config.feature_dropout
        if not share:
            return rows
        first = before(len(rows.ids))
        drawn = generator(self._seed, Purpose.FEATURE_DROPOUT, *dropout_key).random(first + len(rows.ids))
        rows = rows.keep(drawn[first:] >= share)
        return rows._replace(values=rows.values / np.float32(1 - share))

    def _features_of(self, inputs: Inputs) -> SparseRows:
        """Return the features of each row, with their weights before IDF."""
        if self._config.inputs == "features":
            return self._sparse_features(inputs)
        if self._config.inputs == "tokens":
            return self._ngrams(inputs)
        return join_rows(self._ngrams(inputs), self._sparse_features(inputs))

    def _sparse_features(self, inputs: Inputs) -> SparseRows:
        assert inputs.features is not None, "these rows were read without features"
        ids, values, offsets = inputs.features
        if ids.size and not 0 <= ids.min() <= ids.max() < self._features - self._sparse_from:
            raise TableError(
                f"a row has feature {ids.max() if ids.min() >= 0 else ids.min()}, but the data's manifest states "
                f"{self._features - self._sparse_from} features. Shard the data again."
            )
        return SparseRows(ids.astype(np.int64) + self._sparse_from, values, offsets)

    def _ngrams(self, inputs: Inputs) -> SparseRows:
        assert inputs.tokens is not None, "these rows were read without tokens"
        sizes = {"vocabulary": self._vocabulary, "buckets": self._config.buckets}
        return count_ngrams(inputs.tokens, ngrams=self._config.ngrams, **sizes)

    def _finish(self, x: torch.Tensor, dropout_key: tuple[int, ...] | None, first: int = 0) -> torch.Tensor:
        if self._dense is not None:
            x = self._dense(x)
        x = finish(x, normalize=self._config.normalize, scale=self._config.scale)
        if dropout_key is not None and self._config.dropout:
            x = drop(x, self._config.dropout, torch_generator(self._seed, Purpose.DROPOUT, *dropout_key), first)
        return x
