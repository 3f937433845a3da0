"""Encoder and classifier as one thing: built from a recipe and DATA, saved to a checkpoint, loaded from one."""

from dataclasses import dataclass

import pyarrow as pa
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, open_manifest
from trainer.checkpoint import Checkpoint, latest_checkpoint
from trainer.classifier import Classifier
from trainer.config import Recipe, load_config, validate
from trainer.encoders import Encoder, build_encoder
from trainer.group import ALONE, Group, label_range
from trainer.inputs import Inputs, Kind, columns_of


@dataclass
class Model:
    """The parameters of a run."""

    encoder: Encoder
    classifier: Classifier
    inputs: Kind = "tokens"

    @classmethod
    def build(cls, recipe: Recipe, vocabulary: int, labels: int, features: int = 0, group: Group = ALONE) -> "Model":
        """Freshly initialised from the recipe's seed: the encoder, and the vectors of a rank's labels. InputError."""
        encoder = build_encoder(recipe.encoder, vocabulary, recipe.train.seed, features)
        part = label_range(labels, group.rank, group.ranks)
        classifier = Classifier(recipe.classifier, labels, encoder.dimension, recipe.train.seed, part)
        return cls(encoder, classifier, recipe.encoder.inputs)

    @property
    def columns(self) -> list[str]:
        """The columns of queries or labels that are read."""
        return columns_of(self.inputs)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        """x [B, D] (D + 1 with a bias) of B rows, without a graph, as the vectors are scored against it."""
        return self.classifier.extend(self.encoder.encode(self.encoder.prepare(inputs)))

    def embed_table(self, rows: pa.Table, batch: int = 1024) -> torch.Tensor:
        """x of a table's `columns`, in slices of `batch` rows."""
        rows = rows.select(self.columns)
        parts = [self.embed(Inputs.of(rows.slice(start, batch))) for start in range(0, rows.num_rows, batch)]
        return torch.cat(parts) if parts else torch.empty(0, self.classifier.vectors.shape[1])

    def load(self, checkpoint: Checkpoint) -> None:
        """Take the parameters, and not the optimizer state, of a checkpoint. Raises TableError."""
        self.encoder.load_tensors(checkpoint.tensors("encoder"))
        checkpoint.read_rows({"weight": self.classifier.rows.weight}, self.classifier.start)


@dataclass(frozen=True)
class DataFacts:
    """DATA's manifest, its number of labels L, its vocabulary and number of sparse features (0 where it has none)."""

    manifest: Manifest
    labels: int
    vocabulary: int
    features: int

    @classmethod
    def of(cls, data: DataLayout) -> "DataFacts":
        """Raises TableError when DATA is not finished."""
        manifest = open_manifest(data.root, "data")
        labels = open_manifest(data.labels, "labels")
        vocabulary = 0
        if "tokenizer" in manifest.parents:
            vocabulary = int(open_manifest(data.tokenizer, "tokenizer").parameters["vocabulary"])
        return cls(manifest, labels.rows, vocabulary, int(manifest.parameters.get("features") or 0))


def find_checkpoint(data: DataLayout, run: RunLayout, step: int | None = None) -> tuple[Recipe, Checkpoint]:
    """The recipe and the newest (or the given) checkpoint of a run that was made from DATA.

    Raises InputError: no run, no checkpoint, other data; TableError: not finished, damaged.
    """
    config = load_config(run.config)
    require_same_data(config, open_manifest(data.root, "data"), data.root, run.root)
    checkpoint = latest_checkpoint(run) if step is None else Checkpoint.open(run.checkpoint(step))
    if checkpoint is None:
        raise InputError(f"{run.root}: this run has no checkpoint yet. Let it train on, or resume it with --resume.")
    return validate(config["recipe"], run.config), checkpoint


def load_model(
    data: DataLayout, run: RunLayout, step: int | None = None, group: Group = ALONE
) -> tuple[Recipe, Model, Checkpoint]:
    """The recipe, the model and the checkpoint it comes from, on each rank with the vectors of its labels.

    Raises as `find_checkpoint`.
    """
    recipe, checkpoint = group.decide(lambda: find_checkpoint(data, run, step))
    facts = DataFacts.of(data)
    model = Model.build(recipe, facts.vocabulary, facts.labels, facts.features, group)
    model.load(checkpoint)
    return recipe, model, checkpoint


def load_encoder(data: DataLayout, run: RunLayout, step: int | None = None) -> Model:
    """The model of a checkpoint for embedding alone: its classifier has no rows, so memory does not grow with L.

    Raises as `find_checkpoint`.
    """
    recipe, checkpoint = find_checkpoint(data, run, step)
    facts = DataFacts.of(data)
    model = Model.build(recipe, facts.vocabulary, 0, facts.features)
    model.encoder.load_tensors(checkpoint.tensors("encoder"))
    return model


def require_same_data(config: dict, manifest: Manifest, data: str, run: str) -> None:
    """Refuse a run that was trained on other data. Raises InputError that names both digests."""
    trained = config.get("data", {}).get("digest")
    if trained != manifest.digest:
        raise InputError(
            f"{run}: this run was made from other data (digest {str(trained)[:12]}…) than {data} "
            f"(digest {manifest.digest[:12]}…). Pass the data it was made from, or choose another RUN."
        )
