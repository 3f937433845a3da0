"""Bytes of a model, and the ranges of labels that ranks hold."""

import os
import tempfile
from collections.abc import Iterable

import numpy as np
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.process import free_memory
from schemas.sizes import say_bytes
from schemas.storage import require_room
from schemas.table import Table
from trainer.encoders.base import Size, tensor_bytes
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.model import DataSizes
from trainer.rows.matrix import DTYPES, IN_MEMORY, ON_HOST, RowMatrix, RowOptimizer
from trainer.second_loss import SecondLoss

MOST_LABELS = 1.25  # maximum number of a rank's labels, as a multiple of L/G; bounds the rank's memory
PROCESS_BYTES = 450 << 20  # a working process with PyTorch, beside its model
_EVEN = 1.05  # ranges have equal numbers of labels up to this ratio of the maximum work to the mean work
_STRIDE = 18  # log2 of the number of places with exact work, without frequent labels; work in between is interpolated
_FREQUENT = 14  # labels with more than 2 ** -_FREQUENT of the points are frequent


def label_bounds(data: DataLayout, recipe: Recipe, ranks: int) -> list[int] | None:
    """Return bounds [G + 1] of ranges with about equal work; None: equal numbers of labels. Raises TableError."""
    labels = Table.open(data.labels, "labels")
    points = labels.parameters.get("training_points")
    if ranks == 1 or not points or not isinstance(recipe, ClassifierRecipe) or recipe.negatives.all_labels:
        return None
    groups = (group.column("frequency").to_numpy() for group in labels.batches(["frequency"]))
    ends, sums = cumulated(groups, labels.rows)
    negatives, batch, positives = recipe.negatives, recipe.order.batch, sums[-1] / points
    drawn = negatives.pool_size(batch, positives, labels.rows) or negatives.draws(batch) / batch
    popular = positives + negatives.max_hard + negatives.by_frequency * drawn
    uniform = max((1 - negatives.by_frequency) * drawn, 1e-3 * popular)  # every label has some work
    return balanced_bounds(ends, popular * sums / max(1, sums[-1]) + uniform * ends / max(1, labels.rows), ranks)


def cumulated(groups: Iterable[np.ndarray], labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ascending label ends [K], including 0 and L, and the sum of frequencies [K] before each end.

    `groups` yields frequencies in label order. Ends are evenly spaced, with more ends around frequent labels.
    """
    stride, first, total = max(1, labels >> _STRIDE), 0, 0
    ends, sums = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    for group in groups:
        if not len(group):
            continue
        within = total + np.cumsum(group, dtype=np.int64)
        steps = np.flatnonzero(np.diff(within // max(1, within[-1] >> _FREQUENT)))
        chosen = np.unique(np.concatenate([[0, len(group) - 1], steps, steps + 1, np.arange(0, len(group), stride)]))
        ends.append(first + chosen + 1)
        sums.append(within[chosen])
        first, total = first + len(group), int(within[-1])
    return np.concatenate(ends), np.concatenate(sums)


def balanced_bounds(ends: np.ndarray, work: np.ndarray, ranks: int) -> list[int] | None:
    """Return bounds [G + 1] of ranges that minimise the maximum work, with at most MOST_LABELS * L/G labels each.

    `work` [K] is that of all labels before each of `ends` [K]. None: too few labels, or equal ranges are about as good.
    """
    labels = int(ends[-1])
    most_labels = -(-int(MOST_LABELS * labels) // ranks)
    equal = np.interp(np.arange(ranks + 1) * labels // ranks, ends, work)
    mean = work[-1] / ranks
    if labels < ranks or np.diff(equal).max() <= _EVEN * mean:
        return None

    def cut(most: float) -> list[int]:
        """Cut ranges with work `most` each, starting at the first label; the last range may end before L."""
        bounds = [0]
        for left in range(ranks - 1, -1, -1):
            low = bounds[-1]
            reached = int(np.interp(np.interp(low, ends, work) + most, work, ends) + 1e-6)
            bounds.append(min(max(reached, low + 1), low + most_labels, labels - left))
        return bounds

    low, high = mean, float(work[-1])
    while high - low > 1e-4 * mean:
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1] == labels else (middle, high)
    return cut(high)


def parameter_bytes(recipe: Recipe, vocabulary: int, labels: int, dense: int = 0) -> Size:
    """Return the bytes of the encoder and the classifier. Raises InputError if the encoder's model does not exist."""
    encoder: Size = recipe.encoder.implementation.size(recipe.encoder, vocabulary, dense)
    parts = zip(label_bytes(recipe), encoder, strict=True)
    return Size(*(label * labels + recipe.encoders * each for label, each in parts))


def label_bytes(recipe: Recipe) -> Size:
    if not isinstance(recipe, ClassifierRecipe):
        return Size(0, 0)
    options = recipe.classifier
    weight = torch.zeros(1, recipe.encoder.dimension + int(options.bias), dtype=DTYPES[options.dtype])
    row = RowMatrix(weight, RowOptimizer(options.optimizer, options.momentum))
    return Size(tensor_bytes([row.weight]), tensor_bytes(row.state.values()))


def planned_bytes(recipe: Recipe, sizes: DataSizes, ranks: int) -> int:
    """Estimate the main memory of the ranks on this machine: processes, parameters, optimizer state and draws."""
    encoder = 0 if torch.cuda.is_available() else sum(parameter_bytes(recipe, sizes.vocabulary, 0, sizes.dense))
    rank = PROCESS_BYTES + encoder + _labels_in_memory(recipe, sizes, ranks) * sum(label_bytes(recipe))
    draws = 8 * recipe.negatives.draws(recipe.order.batch)
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) * (rank + draws)


def _labels_in_memory(recipe: Recipe, sizes: DataSizes, ranks: int) -> int:
    """Return the number of a rank's labels with vectors in main memory."""
    storage = recipe.classifier.storage if isinstance(recipe, ClassifierRecipe) else IN_MEMORY
    here = storage == ON_HOST or (storage == IN_MEMORY and not torch.cuda.is_available())
    return -(-sizes.labels // ranks) if here else 0


def require_memory(recipe: Recipe, sizes: DataSizes, ranks: int) -> None:
    """Refuse a model whose parameters, beside a GPU those on the host, exceed the free memory. Raises InputError."""
    encoder = 0 if torch.cuda.is_available() else encoder_bytes(recipe, sizes)
    vectors = _labels_in_memory(recipe, sizes, ranks) * label_bytes(recipe).parameters
    draws = 8 * recipe.negatives.draws(recipe.order.batch)
    if (needed := encoder + vectors + draws) <= (free := free_memory()):
        return
    raise InputError(
        f"this model needs at least {say_bytes(needed)} of memory ({say_bytes(encoder)} encoder, "
        f"{say_bytes(vectors)} label vectors, {say_bytes(draws)} drawn negatives), and {say_bytes(free)} are free. "
        f"Lower encoder.dimension (now {recipe.encoder.dimension:,}), the number of rows of the encoder's table, or "
        "negatives.random; or keep the vectors in a mapped file (classifier.storage)."
    )


def require_scratch(
    recipe: Recipe, rows: int, labels: int, ranks: int, dense: int = 0, second_loss: SecondLoss | None = None
) -> None:
    """Refuse a run whose ranks' scratch files do not fit into TMPDIR. Raises InputError."""
    a_row, here = 2 * recipe.encoder.dimension, min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needs, dumps = {}, len(recipe.table_epochs())
    if dumps:
        # A dump is written while the next dump is collected, and all rows of labels may change meanwhile.
        at_once = min(2, dumps) if recipe.checkpoint.background else 1
        needs["embeddings for dumps"] = at_once * -(-rows // ranks) * here * a_row
        if recipe.checkpoint.background and isinstance(recipe, ClassifierRecipe) and not recipe.is_clustered:
            needs["rows of labels that change while a dump is written"] = (
                -(-labels // ranks) * here * (sum(label_bytes(recipe)) + 8)
            )
    if second_loss is not None:
        needs["the second loss"] = second_loss.scratch_bytes(rows) * here
    if recipe.train.freeze_encoder:
        needs["embeddings of a frozen encoder"] = rows * here * a_row
    if recipe.encodes_labels:
        needs["texts of labels"] = (8 + 2 * dense) * labels * here  # with the tokens
    require_room(tempfile.gettempdir(), needs, "Set TMPDIR to a folder with more room, or lower encoder.dimension.")


def encoder_bytes(recipe: Recipe, sizes: DataSizes) -> int:
    """Return a lower bound on the size in bytes of a recipe's encoder parameters."""
    counts = sizes.vocabulary, sizes.features, sizes.dense
    least: int = recipe.encoder.implementation.least_bytes(recipe.encoder, *counts)
    return least * recipe.encoders
