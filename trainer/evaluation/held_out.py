"""Splits to score: those of DATA, and the rows of its training split that a run left out."""

from collections.abc import Sequence

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.versions.parts import choose_parts, rows_of_parts
from trainer.methods.sections import Data
from trainer.stream import Table, open_queries
from trainer.stream.part import WHOLE, Part

HOLDOUT = "holdout"


def open_split(data: DataLayout, split: str, trained: Data, window: str | Sequence[str] = "") -> tuple[Table, Part]:
    """Open the queries of `split`, and the part of them to score; `trained`: the rows that the run trains on.

    `window`: parts of a version, to score these alone.
    Raises InputError: no such split, or nothing was left out; TableError.
    """
    if split != HOLDOUT:
        table = open_queries(data, split)
        if window:
            rows = rows_of_parts(table.manifest, choose_parts(table.url, table.manifest, window))
            return Table(table.url, rows), WHOLE
        return table, WHOLE
    if not trained.holdout:
        raise InputError(
            f"split {HOLDOUT!r}: this run trains on all rows of {trained.split}. Name a split of {data.root}, or train "
            "with --set data.holdout=0.02."
        )
    return open_queries(data, trained.split), trained.held_out
