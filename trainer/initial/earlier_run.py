"""Going on from a run on an earlier version of the data: its encoder, and its vectors by label id."""

from collections.abc import Callable, Iterator, Sequence

import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from trainer.config import ClassifierRecipe, Recipe
from trainer.evaluation.split import retired_labels
from trainer.initial.new_labels import begin_new_labels
from trainer.inputs import Inputs
from trainer.model import Model, find_earlier
from trainer.stream import open_queries


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
    for encoder in model.encoders.values():
        encoder.admit(new_inputs(model, data, recipe, parts), open_queries(data, recipe.data.split).manifest.rows)
    say(f"begins with {url} at step {checkpoint.step}: {checkpoint.labels:,} of {model.head.labels:,} labels")
    if model.head.has_rows:
        checkpoint.read_rows(model.head.rows(optimizer), model.head.start)
        begin_new_labels(model, data, recipe, checkpoint, parts)
        retired = retired_labels(data)
        if retired is not None:
            model.head.vectors[torch.from_numpy(retired[model.head.start : model.head.stop])] = 0
    return True


def new_inputs(model: Model, data: DataLayout, recipe: Recipe, parts: Sequence[str]) -> Iterator[Inputs]:
    """Yield the training rows of `parts`, texts of labels where they are such, a row group at a time."""
    tables = [open_queries(data, recipe.data.split)]
    if recipe.data.label_texts or recipe.encodes_labels:
        tables.append(Table.open(data.labels, "labels"))
    for table in tables:
        for part in table.parts:
            if part.name in parts:
                for rows in table.of_parts([part]).batches(model.columns):
                    yield Inputs.of(rows.select(model.columns))


def _require_same_make(recipe: Recipe, trained: Recipe, url: str) -> None:
    """Raise InputError where the model of RUN1 has another shape."""
    differing = recipe.encoder.differences(trained.encoder)
    if recipe.encodes_labels != trained.encodes_labels:
        differing.append(f"method was {trained.method!r}, now {recipe.method!r}")
    if isinstance(recipe, ClassifierRecipe) and isinstance(trained, ClassifierRecipe):
        options = ("bias", "optimizer") if recipe.train.start_optimizer else ("bias",)
        for name in options:
            before, after = getattr(trained.classifier, name), getattr(recipe.classifier, name)
            if before != after:
                differing.append(f"classifier.{name} was {before!r}, now {after!r}")
    if differing:
        raise InputError(f"{url}: its model is of another make: {'; '.join(differing)}. Set them alike.")
