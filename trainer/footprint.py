"""Bytes of a model that is not built: as a checkpoint holds them, and memory does."""

from collections.abc import Mapping

import torch

from trainer.config import Encoder as EncoderConfig
from trainer.config import Recipe
from trainer.encoders import build_encoder
from trainer.rows.matrix import RowMatrix, RowOptimizer


def parameter_bytes(recipe: Recipe, vocabulary: int, labels: int) -> tuple[int, int]:
    """(parameters, their optimizer's state) of encoder and classifier. Raises InputError: a model that is not there."""
    weight, state = label_bytes(recipe)
    encoder, encoder_state = encoder_bytes(recipe.encoder, vocabulary)
    if not recipe.head.shared:
        encoder, encoder_state = 2 * encoder, 2 * encoder_state
    return weight * labels + encoder, state * labels + encoder_state


def label_bytes(recipe: Recipe) -> tuple[int, int]:
    """(parameters, their optimizer's state) of one label."""
    if recipe.head.kind == "label-encoder":
        return 0, 0
    options = recipe.classifier
    columns = recipe.encoder.dimension + int(options.bias)
    return _row_bytes(columns, RowOptimizer(options.optimizer, options.momentum))


def encoder_bytes(config: EncoderConfig, vocabulary: int) -> tuple[int, int]:
    """(parameters, optimizer state) of the encoder. Raises InputError: a model that is not there."""
    if config.kind != "bag":
        size = _bytes_of(build_encoder(config, vocabulary, 0).tensors())
        return size, 2 * size
    # A bag is linear in its features: built with few of them, and a row for each of the others.
    buckets = config.buckets if config.ngrams > 1 else 0
    small = build_encoder(config.model_copy(update={"buckets": min(buckets, 1)}), 1, 0)
    weight, state = _row_bytes(config.dimension, RowOptimizer(config.optimizer))
    a_feature = weight + 4  # its vector, and its weight in the bag
    dense = _bytes_of(small.tensors()) - (1 + min(buckets, 1)) * a_feature
    features = vocabulary + buckets
    return dense + features * a_feature, 2 * dense + features * state


def _row_bytes(columns: int, optimizer: RowOptimizer) -> tuple[int, int]:
    """Of a row of a matrix, and of its optimizer's state."""
    one = RowMatrix(torch.zeros(1, columns), optimizer)
    return _bytes_of({"weight": one.weight}), _bytes_of(one.state)


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
