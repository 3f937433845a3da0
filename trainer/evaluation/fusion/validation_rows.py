"""Queries that a fusion is fitted on: the first of a split that the run was not trained on."""

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.config.data import Data
from trainer.evaluation.held_out import HOLDOUT, open_split
from trainer.stream import Table
from trainer.stream.part import Part


def default_split(trained: Data) -> str:
    """Return the split that a run was not trained on: what it held out, or else `val`."""
    return HOLDOUT if trained.holdout else "val"


def open_validation(data: DataLayout, split: str, trained: Data) -> tuple[Table, Part]:
    """Open the queries of `split`, and the part of them to fit on. Raises InputError, TableError."""
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
