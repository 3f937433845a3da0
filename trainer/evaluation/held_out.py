"""Splits to score: those of DATA, and the rows of its training split that a run left out."""

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.config.data import Data
from trainer.stream import Table, open_queries
from trainer.stream.part import WHOLE, Part

HOLDOUT = "holdout"


def open_split(data: DataLayout, split: str, trained: Data) -> tuple[Table, Part]:
    """Open the queries of `split`, and the part of them to score; `trained`: the rows that the run trains on.

    Raises InputError: no such split, or nothing was left out; TableError.
    """
    if split != HOLDOUT:
        return open_queries(data, split), WHOLE
    if not trained.holdout:
        raise InputError(
            f"split {HOLDOUT!r}: this run trains on all rows of {trained.split}. Name a split of {data.root}, or train "
            "with --set data.holdout=0.02."
        )
    return open_queries(data, trained.split), trained.held_out
