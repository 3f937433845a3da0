"""Splits to score: those of DATA, and the rows of its training split that a run left out."""

from collections.abc import Sequence

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.table import Table
from trainer.methods.sections import Data
from trainer.stream import open_queries
from trainer.stream.sources import ALL_ROWS, RowShare

HOLDOUT = "holdout"


def open_split(data: DataLayout, split: str, trained: Data, window: str | Sequence[str] = "") -> tuple[Table, RowShare]:
    """Open the queries of `split`, and the part of them to score; `trained`: the rows that the run trains on.

    `window`: parts of a version, to score these alone.
    Raises InputError: no such split, or nothing was left out; TableError.
    """
    if split != HOLDOUT:
        table = open_queries(data, split)
        return table.of_parts(table.choose_parts(window)) if window else table, ALL_ROWS
    if not trained.holdout:
        raise InputError(
            f"split {HOLDOUT!r}: this run trains on all rows of {trained.split}. Name a split of {data.root}, or train "
            "with --set data.holdout=0.02."
        )
    return open_queries(data, trained.split), trained.held_out
