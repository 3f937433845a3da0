"""Bytes of a model that is not built: as a checkpoint holds them, and memory does."""

import torch

from trainer.config import Recipe
from trainer.encoders.base import Size, tensor_bytes
from trainer.rows.matrix import RowMatrix, RowOptimizer


def parameter_bytes(recipe: Recipe, vocabulary: int, labels: int) -> Size:
    """Return the bytes of encoder and classifier. Raises InputError: a model that is not there."""
    label = label_bytes(recipe)
    encoder: Size = recipe.encoder.implementation.size(recipe.encoder, vocabulary)
    encoders = recipe.head.encoders
    return Size(*(part * labels + encoders * whole for part, whole in zip(label, encoder, strict=True)))


def label_bytes(recipe: Recipe) -> Size:
    """Return the bytes of one label."""
    if recipe.head.encodes_labels:
        return Size(0, 0)
    options = recipe.classifier
    columns = recipe.encoder.dimension + int(options.bias)
    row = RowMatrix(torch.zeros(1, columns), RowOptimizer(options.optimizer, options.momentum))
    return Size(tensor_bytes([row.weight]), tensor_bytes(row.state.values()))
