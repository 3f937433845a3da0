"""Model: encoder and head, built from a recipe and DATA, saved to and loaded from a checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch
from torch.nn.functional import normalize

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest
from schemas.table import Table
from schemas.text_model import DENSE
from schemas.version import open_data, parts_since
from trainer.checkpoints.checkpoint import Checkpoint, open_step
from trainer.config.load import load_config, validate
from trainer.device import CPU
from trainer.encoders.base import Encoder
from trainer.group import ALONE, Group
from trainer.heads.base import Head
from trainer.heads.classifier import Classifier
from trainer.heads.label_encoder import LabelEncoderHead, open_label_texts
from trainer.input_kinds import InputKind, input_names
from trainer.inputs import Inputs, columns_of, require_inputs
from trainer.methods.recipe import ClassifierRecipe, Recipe


@dataclass
class Model:
    """Parameters of a run: an encoder of queries and a head."""

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
        """Device of the parameters and of embeddings."""
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
        """Names of the columns to read from a table of queries or labels."""
        return columns_of(self.inputs)

    def embed(self, inputs: Inputs, labels: bool = False) -> torch.Tensor:
        """Embed B queries as x [B, D] (D + 1 with a bias), which can be scored against vectors, without gradients.

        `labels`: embed labels, with their own encoder if `head.shared` is false.
        """
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
        """Load the parameters of a checkpoint; with `optimizer`, also all state that is needed to continue training.

        An optimizer that the checkpoint has no state of starts without state. Raises TableError.
        """
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
    """Yield (l, embeddings [n, D] of labels [l, l + n)) for all of [start, stop), one row group at a time.

    Raises InputError if the labels lack columns that the encoder reads. Raises TableError.
    """
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
    """Open the recipe of a run that was trained on DATA, and its checkpoint of `step`, as in `open_step`.

    With `earlier`, the run may have used an earlier version of DATA. Raises InputError if there is no run or no
    checkpoint, or if the run used different data; TableError if a table is unfinished or damaged.
    """
    config = load_config(run.config)
    require_same_data(config, Table.open(data.root, "data").manifest, data.root, run.root, earlier)
    checkpoint = open_step(run, step)
    if checkpoint is None:
        raise InputError(
            f"{run.root}: this run has no checkpoint yet. Wait for the first checkpoint, or resume the run with "
            "--resume."
        )
    return validate(config["recipe"], run.config), checkpoint


def find_earlier(
    data: DataLayout, run: RunLayout, step: int | str | None = None
) -> tuple[Recipe, Checkpoint, list[str]]:
    """Open the recipe and checkpoint of a run on DATA or an earlier version; also return the parts added since.

    Raises InputError if there is no run or no checkpoint, or if the run used different data; TableError.
    """
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

    With `earlier`, the run may have used an earlier version of DATA: vectors of labels from `trained_labels` on are
    initial vectors. Raises the errors of `find_checkpoint`.
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
    """Load a checkpoint's model for embedding only, without the rows of labels, so that memory does not grow with L.

    Raises the errors of `find_checkpoint`.
    """
    recipe, checkpoint = find_checkpoint(data, run, step)
    sizes = DataSizes.of(data)
    model = Model.build(recipe, sizes.vocabulary, 0, sizes.features, device=device, dense=sizes.dense)
    model.load_encoders(checkpoint)
    return model


def open_texts(data: DataLayout, recipe: Recipe) -> Inputs | None:
    """Open the label inputs of the recipe's head; None for a classifier. Raises InputError, TableError."""
    return open_label_texts(data, recipe.encoder.inputs) if recipe.encodes_labels else None


def has_bias(recipe: Recipe) -> bool:
    """Return whether the vectors have a bias, in a last column for which x has a constant 1."""
    return isinstance(recipe, ClassifierRecipe) and recipe.classifier.bias


def trained_digest(config: dict) -> str | None:
    """Return the digest of the data that a run was trained on, as recorded in the run's configuration."""
    return config.get("data", {}).get("digest")  # type: ignore[no-any-return]


def require_same_data(config: dict, manifest: Manifest, data: str, run: str, earlier: bool = False) -> None:
    """Refuse a run that was trained on different data; with `earlier`, earlier versions of this data are accepted.

    Raises InputError with both digests.
    """
    trained = trained_digest(config)
    if trained != manifest.digest and not (earlier and parts_since(manifest, str(trained)) is not None):
        raise InputError(
            f"{run}: this run was trained on different data (digest {str(trained)[:12]}…), not on {data} (digest "
            f"{manifest.digest[:12]}…){' or its earlier versions' if earlier else ''}. Give the data that the run was "
            "trained on, or choose another RUN."
        )
