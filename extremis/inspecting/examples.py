"""Queries with text, positives, and the hard negatives that a run's table joins to them."""

from dataclasses import dataclass, field

import numpy as np

from extremis.inspecting.decode_text import TextDecoder, clean, input_columns
from extremis.inspecting.find_row import find_row
from extremis.inspecting.run_tables import run_tables
from schemas import PAD, storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table

LONGEST_QUERY = 600
LONGEST_LABEL = 160


@dataclass
class Example:
    """A query as text. Negatives and predictions are (label id, score), best first."""

    split: str
    row: int
    key: str
    text: str
    positives: list[int]
    negatives: list[tuple[int, float]] = field(default_factory=list)
    predictions: list[tuple[int, float]] = field(default_factory=list)

    @property
    def label_ids(self) -> list[int]:
        """Return every label that is named."""
        return [*self.positives, *(label for label, _ in self.negatives), *(label for label, _ in self.predictions)]


def splits_of(data: DataLayout, only: str | None = None) -> list[str]:
    """List the splits of DATA, train first, or the split `only`. Raises InputError where it has none, TableError."""
    parents = Table.open(data.root, "data").parents
    names = [name.removeprefix("queries/") for name in parents if name.startswith("queries/")]
    names.sort(key=lambda name: (name != "train", name))
    if only is not None and only not in names:
        raise InputError(f"{data.root}: no split {only!r}; this data set has {', '.join(names)}.")
    return names if only is None else [only]


def read_examples(
    data: DataLayout, split: str, rows: np.ndarray, decoder: TextDecoder, run: RunLayout | None
) -> list[Example]:
    """Read rows of a split, ascending, with the negatives of the newest aligned table of `run`. Raises TableError."""
    queries = Table.open(data.queries(split), "queries")
    batch = queries.rows_at(rows, ["query_id", "key", "label_ids", *input_columns(queries.columns)])
    columns = [batch.column(name).to_pylist() for name in ("query_id", "key", "label_ids")]
    texts = decoder.texts(batch, LONGEST_QUERY)
    examples = [
        Example(split, row, clean(key, LONGEST_LABEL), text, list(positives))
        for row, key, positives, text in zip(*columns, texts, strict=True)
    ]
    tables = (each.table for each in run_tables(run)) if run is not None else ()
    joined = next((t for t in tables if t.parents.get("queries") == queries.digest), None)
    if joined is not None:
        table = joined.rows_at(rows, ["label_ids", "scores"])
        labels, scores = matrix_column(table, "label_ids"), matrix_column(table, "scores")
        for example, row_labels, row_scores in zip(examples, labels.tolist(), scores.tolist(), strict=True):
            example.negatives = [pair for pair in zip(row_labels, row_scores, strict=True) if pair[0] != PAD]
    return examples


def find_query(data: DataLayout, key: str, split: str | None) -> tuple[str, np.ndarray]:
    """Find the query of this key in `split`, or in the first split that has it: split and row [1].

    Raises InputError, TableError.
    """
    splits = splits_of(data, split)
    for name in splits:
        row = find_row(Table.open(data.queries(name), "queries"), key)
        if row is not None:
            return name, np.asarray([row])
    raise InputError(
        f"{data.root}: no query with key {key!r} in {', '.join(splits)}. "
        "Keys are those of the input (uid, _id, or a line's number); rows that were rejected are in "
        f"{data.rejects}."
    )


def require_run(run: str) -> RunLayout:
    """Return the layout of the run at `run`. Raises TableError where there is none."""
    layout = RunLayout(run)
    if not storage.exists(layout.config):
        raise TableError(f"{run}: no run here (no config.toml). Is the path right?")
    return layout
