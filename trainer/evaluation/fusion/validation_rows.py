"""Queries that a fusion is fitted on, the first of a split that the run was not trained on, and the run's model."""

from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.config import Recipe
from trainer.device import open_device
from trainer.evaluation.fusion import QUERIES, SHORTLIST
from trainer.evaluation.held_out import HOLDOUT, open_split
from trainer.inputs import scored_columns
from trainer.methods.sections import Data
from trainer.model import Model, load_model
from trainer.stream.sources import RowShare


@dataclass(frozen=True)
class FitOptions:
    """Options of fitting a fusion: the checkpoint of `step` (None: the newest), and the first `queries` of `split`.

    `split`: None for what the run held out, or else `val`. `shortlist`: labels of a query that are ranked again.
    """

    split: str | None = None
    step: int | None = None
    shortlist: int = SHORTLIST
    queries: int = QUERIES
    device: str = "auto"


DEFAULT = FitOptions()


class Validation(NamedTuple):
    """A checkpoint, its recipe and model, and the `rows` of `split` to fit on, a table for each row group."""

    recipe: Recipe
    model: Model
    checkpoint: Checkpoint
    split: str
    rows: list[pa.Table]


def open_validation(data: str, run: str, options: FitOptions) -> Validation:
    """Read the queries to fit on, and the model to the device.

    Raises InputError: no such split or device; as `load_model`; TableError, StorageError.
    """
    layout = DataLayout(data)
    recipe, model, checkpoint = load_model(layout, RunLayout(run), options.step, device=open_device(options.device))
    split = options.split or (HOLDOUT if recipe.data.holdout else "val")
    table, part = _open_part(layout, split, recipe.data)
    columns = scored_columns(table, model.columns)
    rows = list(part.batches(table, columns, options.queries))
    return Validation(recipe, model, checkpoint, split, rows)


def _open_part(data: DataLayout, split: str, trained: Data) -> tuple[Table, RowShare]:
    try:
        table, part = open_split(data, split, trained)
    except InputError as error:
        raise InputError(
            f"{error} A fusion is fitted on queries that the run was not trained on: train with "
            "--set data.holdout=0.02, or let `extremis shard --validation 0.05` cut some out as split val; --split "
            "names another."
        ) from None
    if not part.rows(table.manifest.rows):
        raise InputError(f"{table.url}: has no queries to fit a fusion on. Name another split with --split.")
    return table, part
