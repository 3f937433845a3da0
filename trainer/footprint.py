"""Size of a model in a checkpoint and in memory, without building the model, and refusal of models that do not fit."""

import contextlib
import os
import tempfile
from pathlib import Path

import torch

from schemas.errors import InputError
from schemas.sizes import require_room, say_bytes
from trainer.encoders.base import Size, tensor_bytes
from trainer.methods.rae import Rae
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.model import DataSizes
from trainer.rows.matrix import DTYPES, IN_MEMORY, ON_HOST, RowMatrix, RowOptimizer

_CGROUP = Path("/sys/fs/cgroup")


def parameter_bytes(recipe: Recipe, vocabulary: int, labels: int, dense: int = 0) -> Size:
    """Return the size in bytes of the encoder and the classifier.

    Raises InputError if the encoder's model does not exist.
    """
    label = label_bytes(recipe)
    encoder: Size = recipe.encoder.implementation.size(recipe.encoder, vocabulary, dense)
    encoders = recipe.encoders
    return Size(*(part * labels + encoders * whole for part, whole in zip(label, encoder, strict=True)))


def label_bytes(recipe: Recipe) -> Size:
    """Return the number of bytes per label."""
    if not isinstance(recipe, ClassifierRecipe):
        return Size(0, 0)
    options = recipe.classifier
    columns = recipe.encoder.dimension + int(options.bias)
    row = RowMatrix(
        torch.zeros(1, columns, dtype=DTYPES[options.dtype]), RowOptimizer(options.optimizer, options.momentum)
    )
    return Size(tensor_bytes([row.weight]), tensor_bytes(row.state.values()))


def require_memory(recipe: Recipe, sizes: DataSizes, ranks: int) -> None:
    """Refuse a model whose parameters do not fit into free memory; with a GPU, only parameters on the host are counted.

    Raises InputError, which names the required and the free memory.
    """
    free, has_gpu = free_memory(), torch.cuda.is_available()
    storage = recipe.classifier.storage if isinstance(recipe, ClassifierRecipe) else IN_MEMORY
    if free is None or (has_gpu and storage != ON_HOST):
        return
    encoder = 0 if has_gpu else encoder_bytes(recipe, sizes)
    vectors = -(-sizes.labels * label_bytes(recipe).parameters // ranks)
    if storage not in (IN_MEMORY, ON_HOST):
        vectors = 0
    draws = 8 * recipe.negatives.draws(recipe.order.batch)
    if encoder + vectors + draws <= free:
        return
    raise InputError(
        f"this model needs at least {say_bytes(encoder + vectors + draws)} of memory ({say_bytes(encoder)} encoder, "
        f"{say_bytes(vectors)} label vectors, {say_bytes(draws)} drawn negatives), and {say_bytes(free)} are free. "
        f"Lower encoder.dimension (now {recipe.encoder.dimension:,}), the number of rows of the encoder's table, or "
        "negatives.random; or keep the vectors in a mapped file (classifier.storage)."
    )


def require_scratch(recipe: Recipe, rows: int, labels: int, ranks: int, dense: int = 0) -> None:
    """Refuse a run on `rows` training rows if the scratch files of all ranks on this machine do not fit into TMPDIR.

    `dense`: length of a row's dense vector. Raises InputError.
    """
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
    if isinstance(recipe, Rae):
        needs["a memory of training points"] = rows * here * (a_row + 8)  # with the labels
    if recipe.train.freeze_encoder:
        needs["embeddings of a frozen encoder"] = rows * here * a_row
    if recipe.encodes_labels:
        needs["texts of labels"] = (8 + 2 * dense) * labels * here  # with the tokens
    require_room(tempfile.gettempdir(), needs, "Set TMPDIR to a folder with more room, or lower encoder.dimension.")


def encoder_bytes(recipe: Recipe, sizes: DataSizes) -> int:
    """Return a lower bound on the size in bytes of a recipe's encoder parameters."""
    least: int = recipe.encoder.implementation.least_bytes(
        recipe.encoder, sizes.vocabulary, sizes.features, sizes.dense
    )
    return least * recipe.encoders


def free_memory() -> int | None:
    """Return the bytes of memory that are available to this process in its container; None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        stat = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = int(next(line for line in stat if line.startswith("inactive_file ")).split()[1])
        limit, used = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        limits.append(int(limit) - int(used) + cached)
    return min(limits, default=None)
