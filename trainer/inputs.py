"""Inputs of an encoder: token ids, sparse features with values, a dense vector, or some of these."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.arrow import DENSE, TITLES
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.ragged import Ragged, SparseRows
from schemas.shard_files.parquet import list_column, matrix_column, number_column
from schemas.table import Table
from trainer.input_kinds import InputKind, InputName, input_names

_COLUMNS: Mapping[InputName, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "features": ("feature_ids", "feature_values"),
    "dense": (DENSE,),
}
_INPUT_COLUMNS = frozenset(name for columns in _COLUMNS.values() for name in columns)


@dataclass(frozen=True)
class Inputs:
    """B rows: token ids, int32 feature ids (sorted, unique in a row), `dense` [B, d] float16; None: not read."""

    tokens: Ragged | None = None
    features: SparseRows | None = None
    dense: np.ndarray | None = None
    titles: np.ndarray | None = None  # [B]: how many tokens of each row belong to its title; not read in training

    @classmethod
    def of(cls, rows: pa.Table, columns: Sequence[str] | None = None) -> "Inputs":
        """Read the inputs among `columns` (None: all columns) of a table, and the titles of token ids, if present."""
        names = _INPUT_COLUMNS & {*(rows.column_names if columns is None else columns)}
        lists = {name: list_column(rows, name) for name in names - {DENSE}}
        inputs = cls.from_columns(lists, matrix_column(rows, DENSE) if DENSE in names else None)
        titled = "input_ids" in names and TITLES in rows.column_names
        return replace(inputs, titles=number_column(rows, TITLES)) if titled else inputs

    @classmethod
    def from_columns(cls, columns: Mapping[str, Ragged], dense: np.ndarray | None = None) -> "Inputs":
        """Take the inputs from `columns` by name, with vectors `dense`."""
        ids = columns.get("feature_ids")
        features = SparseRows(ids.values, columns["feature_values"].values, ids.offsets) if ids else None
        return cls(columns.get("input_ids"), features, dense)

    @property
    def rows(self) -> int:
        """Number of rows B; 0 without inputs."""
        lists = self.tokens or self.features
        return len(self.dense) if lists is None and self.dense is not None else lists.rows if lists else 0

    def slice(self, start: int, stop: int) -> "Inputs":
        """Return rows [start, stop); values are views."""
        return self._select(lambda lists: lists.slice(start, stop), slice(start, stop))

    def take(self, rows: np.ndarray) -> "Inputs":
        """Return the rows with indices `rows` [B'], in the order of `rows`."""
        return self._select(lambda lists: lists.take(rows), rows)

    def _select(self, of_lists: Callable[[Any], Any], rows: Any) -> "Inputs":
        dense, titles = (None if numbers is None else numbers[rows] for numbers in (self.dense, self.titles))
        return Inputs(self.tokens and of_lists(self.tokens), self.features and of_lists(self.features), dense, titles)


def open_queries(data: DataLayout, split: str) -> Table:
    """Open the queries of `split`. Raises InputError if DATA lacks this split, TableError if it is unfinished."""
    prefix = "queries/"
    splits = [name.removeprefix(prefix) for name in Table.open(data.root, "data").parents if name.startswith(prefix)]
    if split not in splits:
        raise InputError(f"{data.root}: no split {split!r}; known splits: {', '.join(sorted(splits))}.")
    return Table.open(data.queries(split), "queries")


def columns_of(kind: InputKind) -> list[str]:
    """Return the columns that `encoder.inputs` reads."""
    return [name for part in input_names(kind) for name in _COLUMNS[part]]


def with_titles(table: Table, columns: Sequence[str]) -> list[str]:
    """Return `columns` of `table`, and TITLES if token ids are among them and `table` has titles."""
    return [*columns, *({TITLES} & {*table.columns} if "input_ids" in columns else ())]


def scored_columns(queries: Table, columns: Sequence[str]) -> list[str]:
    """Return the columns of `queries` that scoring needs: the encoder's `columns`, titles, positives, and filter."""
    return [*with_titles(queries, columns), "label_ids", *({"filter_label_ids"} & {*queries.columns})]


_REMEDIES: Mapping[InputName, str] = {
    "tokens": "set encoder.inputs = 'features' and encoder.kind = 'bag' (a transformer reads token ids only)",
    "features": "set encoder.inputs = 'tokens', or shard data that also has features for these rows",
    "dense": (
        "shard the data with the vectors of a text model (`extremis shard ... --embed MODEL`) or with your own "
        "vectors; or set encoder.inputs = 'tokens'"
    ),
}


def require_inputs(table: Table, kind: InputKind, remedy: str | None = None) -> None:
    """Refuse a table that lacks columns that `kind` reads. Raises InputError with the missing columns and a remedy."""
    missing = [name for name in columns_of(kind) if name not in table.columns]
    if not missing:
        return
    if not remedy and _INPUT_COLUMNS.isdisjoint(table.columns):
        remedy = "these rows have no inputs. Shard the texts of the rows; or, in your own loop, give inputs='none'"
    remedy = remedy or next(_REMEDIES[part] for part in input_names(kind) if missing[0] in _COLUMNS[part])
    raise InputError(f"{table.url}: no column {', '.join(missing)}, which encoder.inputs = {kind!r} needs: {remedy}.")
