"""Going on from a run on an earlier version of the data: its encoder, and its vectors by label id."""

from collections.abc import Callable

import numpy as np
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, open_manifest
from schemas.shard_files.parquet import list_column
from schemas.shard_files.shards import iterate_shard
from schemas.versions.version import parts_of
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.config import Recipe
from trainer.evaluation.label_embeddings import embed_texts
from trainer.evaluation.retired import retired_labels
from trainer.inputs import Inputs
from trainer.model import Model, find_earlier
from trainer.stream import open_queries

_BATCH = 1024  # queries embedded at a time


def begin_with_run(model: Model, data: DataLayout, recipe: Recipe, say: Callable[[str], None]) -> bool:
    """Take the parameters of the run `train.start_from`, by label id; whether there is one to take.

    Vectors of labels that its data had not begin as `train.new_labels` says, those of retired ones at zero. Raises
    InputError: no such run, on other data, or of another make; TableError.
    """
    url = recipe.train.start_from
    if not url:
        return False
    trained, checkpoint, parts = find_earlier(data, RunLayout(url))
    _require_same_make(recipe, trained, url)
    model.load_encoders(checkpoint)
    optimizer = recipe.train.start_optimizer
    if optimizer:
        for name, encoder in model.encoders.items():
            encoder.load_optimizer_tensors(checkpoint.tensors(f"{name}-optimizer"))
    say(f"begins with {url} at step {checkpoint.step}: {checkpoint.labels:,} of {model.head.labels:,} labels")
    if model.head.has_rows:
        checkpoint.read_rows(model.head.rows(optimizer), model.head.start)
        _begin_new_labels(model, data, recipe, checkpoint, parts)
        retired = retired_labels(data)
        if retired is not None:
            model.head.vectors[torch.from_numpy(retired[model.head.start : model.head.stop])] = 0
    return True


def _require_same_make(recipe: Recipe, trained: Recipe, url: str) -> None:
    """Raise InputError where the model of RUN1 has another shape."""
    differing = recipe.encoder.differences(trained.encoder)
    for section, names in (("head", ("kind",)), ("classifier", ("bias",))):
        for name in names:
            before, after = (getattr(getattr(each, section), name) for each in (trained, recipe))
            if before != after:
                differing.append(f"{section}.{name} was {before!r}, now {after!r}")
    if recipe.train.start_optimizer and recipe.classifier.optimizer != trained.classifier.optimizer:
        differing.append(f"classifier.optimizer was {trained.classifier.optimizer!r}")
    if differing:
        raise InputError(f"{url}: its model is of another make: {'; '.join(differing)}. Set them alike.")


@torch.no_grad()
def _begin_new_labels(model: Model, data: DataLayout, recipe: Recipe, checkpoint: Checkpoint, parts: list[str]) -> None:
    """Give this rank's labels from the checkpoint's L on their first vectors: a direction, as long as others are."""
    head, start = model.head, max(model.head.start, checkpoint.labels)
    if recipe.train.new_labels == "initial" or start >= head.stop:
        return
    width = model.encoder.dimension
    trained = head.vectors[: max(0, min(head.stop, checkpoint.labels) - head.start)].float()
    length = float(trained[:, :width].norm(dim=1).median()) if len(trained) else recipe.classifier.initial_scale
    directions = torch.zeros(head.stop - start, width, device=model.device)
    has_texts = set(model.columns) <= set(_columns(data))
    if has_texts:
        for first, z in embed_texts(model, data, start, head.stop):
            directions[first - start :][: len(z)] = z
    if recipe.train.new_labels == "points":
        means = mean_points(model, data, recipe.data.split, parts, (start, head.stop))
        directions = torch.where(means.norm(dim=1, keepdim=True) > 0, means, directions)
    directions = torch.nn.functional.normalize(directions, dim=1)
    rows = head.vectors[start - head.start :]
    rows[:, :width] = (directions * length).to(rows.dtype)
    if head.bias and len(trained):
        rows[:, width] = trained[:, width].median().to(rows.dtype)


def mean_points(model: Model, data: DataLayout, split: str, parts: list[str], labels: tuple[int, int]) -> torch.Tensor:
    """Return the mean embedding of the points of labels [start, stop) in the `parts` of a split, [stop - start, D].

    It is zero for labels without any.
    """
    start, stop = labels
    total = torch.zeros(stop - start, model.encoder.dimension, device=model.device)
    count = torch.zeros(stop - start, 1, device=model.device)
    table = open_queries(data, split)
    for shard in _shards_of(table.manifest, parts):
        for rows in iterate_shard(table.url, table.manifest.shards[shard], [*model.columns, "label_ids"]):
            positives = list_column(rows, "label_ids")
            positives = positives.keep((positives.values >= start) & (positives.values < stop))
            some = np.flatnonzero(positives.counts)
            for begin in range(0, len(some), _BATCH):
                picked = some[begin : begin + _BATCH]
                x = model.embed(Inputs.of(rows.select(model.columns).take(picked)))[:, : total.shape[1]]
                of_some = positives.take(picked)
                ids = torch.from_numpy(of_some.values.astype(np.int64) - start).to(model.device)
                total.index_add_(0, ids, x[torch.from_numpy(of_some.row_of()).to(model.device)].float())
                count.index_add_(0, ids, torch.ones(len(ids), 1, device=model.device))
    return total / count.clamp(min=1)


def _shards_of(table: Manifest, parts: list[str]) -> list[int]:
    """Return the shards of a table that are of `parts`."""
    return [shard for part in parts_of(table) if part.name in parts for shard in range(part.first, part.stop)]


def _columns(data: DataLayout) -> list[str]:
    return [column.name for column in open_manifest(data.labels, "labels").columns]
