"""Initial values of a model: encoder and vectors from another run, or vectors from label texts.

A trained vector is about c (v - m). Here v is the mean embedding of some of the label's points, or the embedding of the
label's text, and m is the mean over all points or texts. A new label gets a vector of the same form. Least squares over
the labels of the earlier run determines c. The bias is chosen so that a mean query scores new labels like the earlier
labels. Without subtracting m, a vector of the same length would outscore the earlier labels on every query.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from schemas.waits import Say
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.inputs import Inputs
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.model import Model, embed_texts, find_checkpoint, find_earlier
from trainer.stream import open_queries

_BATCH = 1024  # queries embedded at a time
_FITTED = 1 << 14  # number of labels to fit c on; the first labels are as mixed as all labels


def load_encoder_of_run(model: Model, data: DataLayout, recipe: Recipe) -> bool:
    """Load the encoder of the run `train.encoder_from`; return False if the recipe names no run.

    Raises InputError if the encoder is frozen but untrained, if the run or its checkpoint does not exist, or if the run
    used different data or a different encoder; TableError.
    """
    url = recipe.train.encoder_from
    if not url:
        if recipe.train.freeze_encoder:
            raise InputError(
                "train.freeze_encoder needs a trained encoder: give --set train.encoder_from=RUN. RUN is a run of "
                "`ngame`, or of another recipe with the same encoder."
            )
        return False
    trained, checkpoint = find_checkpoint(data, RunLayout(url))
    differing = recipe.encoder.differences(trained.encoder)
    if differing:
        raise InputError(f"{url}: the encoder of this run differs: {'; '.join(differing)}. Use the same settings.")
    model.encoder.load_tensors(checkpoint.tensors("encoder"))
    return True


@torch.no_grad()
def initialise_from_texts(model: Model, data: DataLayout, norm: float) -> None:
    """Set the vectors of this rank's labels to embeddings of the labels' texts, with length `norm`; keep the biases.

    NGAME initialises classifiers in this way (appendix C, module M2), with a trained encoder. Raises InputError if
    labels lack the encoder's inputs or the head has no vectors; TableError.
    """
    head = model.head
    if not head.has_rows:
        raise InputError(
            "classifier.initial = 'labels' has no effect with this method, which encodes labels and has no label "
            "vectors. Leave this key out."
        )
    for first, z in embed_texts(model, data, head.start, head.stop):
        start = first - head.start
        head.vectors[start : start + len(z), : z.shape[1]] = z * norm


def initialise_from_run(model: Model, data: DataLayout, recipe: Recipe, say: Say) -> bool:
    """Load the parameters of the run `train.start_from`, by label id; return False if the recipe names no run.

    `train.new_labels` determines the vectors of new labels. Raises InputError if the run does not exist, used different
    data, or has a different model; TableError.
    """
    url = recipe.train.start_from
    if not url:
        return False
    trained, checkpoint, parts = find_earlier(data, RunLayout(url))
    _require_same_shape(recipe, trained, url)
    model.load(checkpoint, recipe.train.start_optimizer)
    for encoder in model.encoders.values():
        encoder.admit(new_inputs(model, data, recipe, parts), open_queries(data, recipe.data.split).manifest.rows)
    say(f"starts from {url} at step {checkpoint.step}, with {checkpoint.labels:,} of {model.head.labels:,} labels")
    if model.head.has_rows:
        initialise_new_labels(model, data, recipe, checkpoint, parts)
    return True


def new_inputs(model: Model, data: DataLayout, recipe: Recipe, parts: Sequence[str]) -> Iterator[Inputs]:
    """Yield training rows of `parts`, and label texts if texts are training points, one row group at a time."""
    tables = [open_queries(data, recipe.data.split)]
    if recipe.data.label_texts or recipe.encodes_labels:
        tables.append(Table.open(data.labels, "labels"))
    for table in tables:
        for rows in _rows_of(table, parts, model.columns):
            yield Inputs.of(rows.select(model.columns))


def _rows_of(table: Table, parts: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of the existing `parts` of a table, one row group at a time."""
    some = [part for part in table.parts if part.name in parts]
    yield from table.of_parts(some).batches(columns) if some else ()


def _require_same_shape(recipe: Recipe, trained: Recipe, url: str) -> None:
    """Raise InputError if the model of the earlier run has a different shape."""
    differing = recipe.encoder.differences(trained.encoder)
    if recipe.encodes_labels != trained.encodes_labels:
        differing.append(f"method was {trained.method!r}, now {recipe.method!r}")
    if isinstance(recipe, ClassifierRecipe) and isinstance(trained, ClassifierRecipe):
        before, after = trained.classifier.bias, recipe.classifier.bias
        if before != after:
            differing.append(f"classifier.bias was {before!r}, now {after!r}")
    if differing:
        raise InputError(f"{url}: the model of this run differs: {'; '.join(differing)}. Use the same settings.")


def fit_vectors(
    v: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, query: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    """Fit trained vectors w [S, D + 1] (bias last) to v - `mean`, with v [S, D]; return vectors for `new` [n, D].

    The mean `query` [D] gives each returned vector the same score, which is the median score of the vectors w.
    """
    centred, width = v - mean, v.shape[1]
    slope = max(float((centred * w[:, :width]).sum() / (centred * centred).sum().clamp(min=1e-12)), 0.0)
    level = float((w[:, :width] @ query + w[:, width]).median())
    rows = slope * (new - mean)
    return torch.cat([rows, (level - rows @ query)[:, None]], 1)


# Embeddings [n, D] to estimate labels' vectors, a mask [n] of the existing embeddings, and a mean embedding [D].
Estimate = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.no_grad()
def initialise_new_labels(
    model: Model, data: DataLayout, recipe: Recipe, checkpoint: Checkpoint, parts: Sequence[str]
) -> None:
    """Initialise this rank's new labels (ids from the checkpoint's L on); the number of ranks has no effect.

    `train.new_labels` chooses between the mean of a label's points in `parts` and the label's text. A label without
    points starts from the embedding of its text. If no earlier label can be used for the fit, vectors do not change.
    Raises TableError.
    """
    head, stop = model.head, checkpoint.labels
    new = range(max(head.start, stop), head.stop)
    fitted = range(min(_FITTED, stop))
    if recipe.train.new_labels == "initial" or not new or not fitted:
        return
    points = mean_point_embeddings(model, data, recipe.data.split, parts, np.array([*fitted, *new]))
    *_, query = points
    trained = checkpoint.vectors("weight", 0, len(fitted)).float().to(model.device)
    if not head.bias:
        trained = torch.nn.functional.pad(trained, (0, 1))
    vectors = torch.zeros(len(new), trained.shape[1], device=model.device)
    is_initialised = torch.zeros(len(new), dtype=torch.bool, device=model.device)
    estimates = [points] if recipe.train.new_labels == "points" else []
    if {*model.columns} <= {*Table.open(data.labels, "labels").columns}:
        estimates.append(label_text_embeddings(model, data, fitted, new))
    for v, has_embedding, mean in estimates:
        has_fit, is_new = has_embedding[: len(fitted)], has_embedding[len(fitted) :] & ~is_initialised
        if has_fit.any() and is_new.any():
            known, others = v[: len(fitted)][has_fit], v[len(fitted) :][is_new]
            vectors[is_new] = fit_vectors(known, trained[has_fit], mean, query, others)
            is_initialised |= is_new
    if isinstance(recipe, ClassifierRecipe) and recipe.classifier.normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    rows = head.vectors[new.start - head.start :]
    rows[is_initialised.to(rows.device)] = vectors[is_initialised, : rows.shape[1]].to(rows)


def mean_point_embeddings(
    model: Model, data: DataLayout, split: str, parts: Sequence[str], labels: np.ndarray
) -> Estimate:
    """Return the mean embedding of each label's points in `parts` of a split; `labels` [n] are ascending."""
    total = torch.zeros(len(labels), model.encoder.dimension, device=model.device)
    counts = torch.zeros(len(labels), 1, device=model.device)
    total_x, rows_seen = torch.zeros(model.encoder.dimension, device=model.device), 0
    for rows in _rows_of(open_queries(data, split), parts, [*model.columns, "label_ids"]):
        for batch in (rows.slice(begin, _BATCH) for begin in range(0, rows.num_rows, _BATCH)):
            positives, x = list_column(batch, "label_ids"), model.embed_table(batch)[:, : total.shape[1]].float()
            total_x, rows_seen = total_x + x.sum(0), rows_seen + len(x)
            place = np.minimum(np.searchsorted(labels, positives.entries), len(labels) - 1)
            wanted = np.flatnonzero(labels[place] == positives.entries)
            ids = torch.from_numpy(place[wanted]).to(model.device)
            total.index_add_(0, ids, x[torch.from_numpy(positives.row_of()[wanted]).to(model.device)])
            counts.index_add_(0, ids, torch.ones(len(ids), 1, device=model.device))
    return total / counts.clamp(min=1), counts[:, 0] > 0, total_x / max(1, rows_seen)


def label_text_embeddings(model: Model, data: DataLayout, *ranges: range) -> Estimate:
    """Return the embeddings of the texts of the labels in all `ranges`, concatenated."""
    parts = [torch.zeros(0, model.encoder.dimension, device=model.device)]
    parts += [z for labels in ranges for _, z in embed_texts(model, data, labels.start, labels.stop)]
    z = torch.cat(parts)
    return z, z.norm(dim=1) > 0, z.mean(0)
