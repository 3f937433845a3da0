"""The model of a run: an encoder of queries and a head, built from a recipe, loaded from a run, or begun from texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize, pad

from schemas.arrow import DENSE
from schemas.errors import InputError, option
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from schemas.versions import open_data, parts_since
from schemas.waits import Say
from trainer.checkpoints import Checkpoint, open_step
from trainer.device import CPU
from trainer.encoders.base import Encoder
from trainer.group import ALONE, Group
from trainer.heads import Classifier, Head, LabelEncoderHead, open_label_texts
from trainer.input_kinds import InputKind, input_names
from trainer.inputs import Inputs, columns_of, require_inputs
from trainer.methods.dexml import DualEncoder
from trainer.methods.recipe import ClassifierRecipe, NegativesSection, Recipe
from trainer.recipe_files import load_config, validate
from trainer.stream import open_queries

_BATCH = 1024  # queries embedded at a time
_FITTED = 1 << 14  # number of labels to fit c on; the first labels are as mixed as all labels


@dataclass
class Model:
    """An encoder of queries, and a head with or without a row per label."""

    encoder: Encoder
    head: Head
    inputs: InputKind = "tokens"

    @classmethod
    def build(
        cls,
        recipe: Recipe,
        vocabulary: int,
        labels: int,
        features: int = 0,
        group: Group = ALONE,
        texts: Inputs | None = None,
        device: torch.device = CPU,
        bounds: Sequence[int] | None = None,
        dense: int = 0,
    ) -> "Model":
        """Build a model with the recipe's seed: the encoder, and the vectors of a rank's labels. Raises InputError.

        A head that encodes labels reads `texts`; without `texts` the head can only embed given inputs.
        """

        def encoder_of(seed: int) -> Encoder:
            read = {"dense": dense} if "dense" in input_names(recipe.encoder.inputs) else {}
            encoder: Encoder = recipe.encoder.build(vocabulary, seed, features, **read)
            encoder.move(device)
            return encoder

        seed = recipe.train.seed
        encoder = encoder_of(seed)
        head: Head
        if isinstance(recipe, ClassifierRecipe):
            loss = recipe.loss.build()
            head = Classifier(recipe.classifier, labels, encoder.dimension, seed, loss, group, device, bounds)
        else:
            of_labels = encoder if recipe.encoders == 1 else encoder_of(seed + 1)
            head = LabelEncoderHead(recipe, of_labels, labels, texts, group)
        return cls(encoder, head, recipe.encoder.inputs)

    @property
    def device(self) -> torch.device:
        """Device of the parameters and embeddings."""
        return self.encoder.device

    @property
    def encoders(self) -> dict[str, Encoder]:
        """Encoders, keyed by the name of their part of a checkpoint."""
        return {"encoder": self.encoder, **self.head.encoders()}

    @property
    def width(self) -> int:
        """Number of columns in x and in the vectors: D, or D + 1 with a bias."""
        return self.encoder.dimension + int(self.head.bias)

    @property
    def columns(self) -> list[str]:
        """Columns to read from a table of queries or labels."""
        return columns_of(self.inputs)

    def embed(self, inputs: Inputs, labels: bool = False) -> torch.Tensor:
        """Embed B queries, or `labels`, as x [B, D] (D + 1 with a bias) to score against vectors, without gradients."""
        encoder = self.encoders.get("label-encoder", self.encoder) if labels else self.encoder
        return self.head.extend(encoder.encode(encoder.prepare(inputs)))

    def embed_table(self, rows: pa.Table, batch: int = 1024, labels: bool = False) -> torch.Tensor:
        """Embed the rows of a table of queries, or of `labels`, in slices of `batch` rows."""
        rows = rows.select(self.columns)
        parts = [self.embed(Inputs.of(rows.slice(start, batch)), labels) for start in range(0, rows.num_rows, batch)]
        return torch.cat(parts) if parts else torch.empty(0, self.width, device=self.device)

    def checkpoint_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of each file of a checkpoint, except the rows of labels."""
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name, encoder in self.encoders.items():
            tensors |= {name: encoder.tensors(), f"{name}-optimizer": encoder.optimizer_tensors()}
        return tensors

    def load(self, checkpoint: Checkpoint, optimizer: bool = False) -> None:
        """Load a checkpoint's parameters; `optimizer`: also the state of optimizers. Raises TableError."""
        self.load_encoders(checkpoint, optimizer)
        checkpoint.read_rows(self.head.rows(optimizer), self.head.start)

    def load_encoders(self, checkpoint: Checkpoint, optimizer: bool = False) -> None:
        """Load only the encoders' parameters; `optimizer`: also their optimizers' state. Raises TableError."""
        for name, encoder in self.encoders.items():
            encoder.load_tensors(checkpoint.tensors(name))
            if optimizer:
                encoder.load_optimizer_tensors(checkpoint.tensors(f"{name}-optimizer"))
        self.head.drop_cached_vectors()


@torch.no_grad()
def embed_labels(model: Model, data: DataLayout, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (l, embeddings [n, D] of labels [l, l + n)) for [start, stop). Raises InputError, TableError."""
    table = Table.open(data.labels, "labels")
    require_inputs(table, model.inputs)
    first = start
    for rows in table.batches(model.columns, start, stop):
        yield first, model.embed_table(rows, labels=True)
        first += rows.num_rows


def embed_texts(model: Model, data: DataLayout, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the output of `embed_labels`, scaled to length 1: float32 [n, D], without a bias column."""
    for first, z in embed_labels(model, data, start, stop):
        yield first, normalize(z[:, : model.encoder.dimension].float())


@dataclass(frozen=True)
class DataSizes:
    """DATA's manifest, and the numbers of labels, vocabulary tokens, sparse features and dense features; 0: none."""

    manifest: Manifest
    labels: int
    vocabulary: int
    features: int
    dense: int = 0

    @classmethod
    def of(cls, data: DataLayout) -> "DataSizes":
        """Read DATA's manifests. Raises TableError if DATA is unfinished, or if a part does not match the manifest."""
        table, parts = open_data(data.root)
        manifest = table.manifest
        labels = parts.get("labels") or Table.open(data.labels, "labels")
        vocabulary = parts["tokenizer"].parameters["vocabulary"] if "tokenizer" in parts else 0
        features, dense = (int(manifest.parameters.get(name) or 0) for name in ("features", DENSE))
        return cls(manifest, labels.rows, vocabulary, features, dense)


def find_checkpoint(
    data: DataLayout, run: RunLayout, step: int | str | None = None, earlier: bool = False
) -> tuple[Recipe, Checkpoint]:
    """Open the recipe of a run on DATA, or an `earlier` version of it, and its checkpoint of `step`, as in `open_step`.

    Raises InputError if there is no run or no checkpoint, or if the run used different data; TableError.
    """
    config = load_config(run.config)
    require_same_data(config, Table.open(data.root, "data").manifest, data.root, run.root, earlier)
    checkpoint = open_step(run, step)
    if checkpoint is None:
        raise InputError(
            f"{run.root}: this run has no checkpoint yet. Wait for the first checkpoint, or resume the run with "
            f"{option('resume', True)}."
        )
    return recipe_of_run(config["recipe"], run.config), checkpoint


def recipe_of_run(body: dict, source: str) -> Recipe:
    """Read the recipe of a trained run, without the modules of a method or a loss from outside. Raises InputError.

    A method from outside is read as its base, and keeps only sections that describe the model and its data.
    """
    if ":" in body["method"]:
        base = ClassifierRecipe if "classifier" in body else DualEncoder
        kept = base.model_fields.keys() - {"negatives", "order", "loss"}
        return base(**{key: value for key, value in body.items() if key in kept}, negatives=NegativesSection())
    return validate({k: v for k, v in body.items() if k != "loss"} if ":" in body["loss"]["kind"] else body, source)


def find_earlier(
    data: DataLayout, run: RunLayout, step: int | str | None = None
) -> tuple[Recipe, Checkpoint, list[str]]:
    """Return what `find_checkpoint` does for this or an earlier version of DATA, and the parts added since."""
    recipe, checkpoint = find_checkpoint(data, run, step, earlier=True)
    trained = str(trained_digest(load_config(run.config)))
    return recipe, checkpoint, parts_since(Table.open(data.root, "data").manifest, trained) or []


def load_model(
    data: DataLayout,
    run: RunLayout,
    step: int | str | None = None,
    group: Group = ALONE,
    device: torch.device = CPU,
    earlier: bool = False,
) -> tuple[Recipe, Model, Checkpoint]:
    """Load the recipe, the checkpoint, and the model onto `device`; each rank loads the vectors of its labels.

    With `earlier`, as in `find_checkpoint`, labels from `trained_labels` on have initial vectors. Raises its errors.
    """
    recipe, checkpoint = group.decide(lambda: find_checkpoint(data, run, step, earlier))
    sizes = DataSizes.of(data)
    texts = open_texts(data, recipe)
    model = Model.build(recipe, sizes.vocabulary, sizes.labels, sizes.features, group, texts, device, dense=sizes.dense)
    model.load(checkpoint)
    return recipe, model, checkpoint


def trained_labels(model: Model, checkpoint: Checkpoint) -> int | None:
    """Return the number of labels with a trained vector; None if all labels can be scored, e.g. by their texts."""
    return checkpoint.labels if model.head.has_rows and checkpoint.labels < model.head.labels else None


def load_encoder(data: DataLayout, run: RunLayout, step: int | str | None = None, device: torch.device = CPU) -> Model:
    """Load a checkpoint's model for embedding only, without rows of labels. Raises the errors of `find_checkpoint`."""
    recipe, checkpoint = find_checkpoint(data, run, step)
    sizes = DataSizes.of(data)
    model = Model.build(recipe, sizes.vocabulary, 0, sizes.features, device=device, dense=sizes.dense)
    model.load_encoders(checkpoint)
    return model


def open_texts(data: DataLayout, recipe: Recipe) -> Inputs | None:
    """Open the label inputs that the recipe's head encodes, if any. Raises InputError, TableError."""
    return open_label_texts(data, recipe.encoder.inputs) if recipe.encodes_labels else None


def has_bias(recipe: Recipe) -> bool:
    """Return whether the vectors have a bias, in a last column for which x has a constant 1."""
    return isinstance(recipe, ClassifierRecipe) and recipe.classifier.bias


def trained_digest(config: dict) -> str | None:
    """Return the digest of the data that a run was trained on, as recorded in the run's configuration."""
    return config.get("data", {}).get("digest")  # type: ignore[no-any-return]


def require_same_data(config: dict, manifest: Manifest, data: str, run: str, earlier: bool = False) -> None:
    """Refuse a run on other data, or, if not `earlier`, on an earlier version. Raises InputError with both digests."""
    trained = trained_digest(config)
    if trained != manifest.digest and not (earlier and parts_since(manifest, str(trained)) is not None):
        raise InputError(
            f"{run}: this run was trained on different data (digest {str(trained)[:12]}…), not on {data} (digest "
            f"{manifest.digest[:12]}…){' or its earlier versions' if earlier else ''}. Give the data that the run was "
            "trained on, or choose another RUN."
        )


def load_encoder_of_run(model: Model, data: DataLayout, recipe: Recipe) -> bool:
    """Load the encoder of the run `train.encoder_from`; return False if the recipe names no run.

    Raises InputError if the encoder is frozen but untrained, or if the run does not fit; TableError.
    """
    url = recipe.train.encoder_from
    if not url:
        if recipe.train.freeze_encoder:
            raise InputError(
                f"train.freeze_encoder needs a trained encoder: give {option('set', {'train.encoder_from': 'RUN'})}. "
                "RUN is a run of `ngame`, or of another recipe with the same encoder."
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

    `train.new_labels` determines the vectors of new labels. Raises InputError if the run does not fit; TableError.
    """
    url = recipe.train.start_from
    if not url:
        return False
    trained, checkpoint, parts = find_earlier(data, RunLayout(url))
    differing = recipe.encoder.differences(trained.encoder)
    if recipe.encodes_labels != trained.encodes_labels:
        differing.append(f"method was {trained.method!r}, now {recipe.method!r}")
    if isinstance(recipe, ClassifierRecipe) and isinstance(trained, ClassifierRecipe):
        before, after = trained.classifier.bias, recipe.classifier.bias
        if before != after:
            differing.append(f"classifier.bias was {before!r}, now {after!r}")
    if differing:
        raise InputError(f"{url}: the model of this run differs: {'; '.join(differing)}. Use the same settings.")
    model.load(checkpoint, recipe.train.start_optimizer)
    queries = open_queries(data, recipe.data.split)
    texts = [Table.open(data.labels, "labels")] if recipe.data.label_texts or recipe.encodes_labels else []
    for encoder in model.encoders.values():
        new = (rows for table in (queries, *texts) for rows in _rows_of(table, parts, model.columns))
        encoder.admit((Inputs.of(rows.select(model.columns)) for rows in new), queries.rows)
    say(f"starts from {url} at step {checkpoint.step}, with {checkpoint.labels:,} of {model.head.labels:,} labels")
    if model.head.has_rows:
        initialise_new_labels(model, data, recipe, checkpoint, parts)
    return True


def _rows_of(table: Table, parts: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of the existing `parts` of a table, one row group at a time."""
    some = [part for part in table.parts if part.name in parts]
    yield from table.of_parts(some).batches(columns) if some else ()


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

    `train.new_labels` chooses between the mean of a label's points in `parts` and the label's text, which also serves a
    label without points. If no earlier label can be used for the fit, vectors do not change. Raises TableError.
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
        trained = pad(trained, (0, 1))
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
        vectors = normalize(vectors, dim=1)
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
