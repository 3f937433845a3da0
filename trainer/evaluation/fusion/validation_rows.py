"""Queries that a fusion is fitted on: the first of a split that the run was not trained on."""

from collections.abc import Iterator

import pyarrow as pa

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.config.data import Data
from trainer.evaluation.held_out import open_split
from trainer.inputs import scored_columns
from trainer.model import Model
from trainer.stream import Table
from trainer.stream.part import Part, iterate_part


def open_validation(data: DataLayout, split: str, trained: Data) -> tuple[Table, Part]:
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


def first_rows(table: Table, part: Part, model: Model, queries: int) -> Iterator[pa.Table]:
    """Yield the first `queries` rows of a part of a table, a row group at a time."""
    left = queries
    for group in iterate_part(table.url, table.manifest, part, scored_columns(table.manifest, model.columns)):
        yield group.slice(0, left)
        left -= group.num_rows
        if left <= 0:
            return
