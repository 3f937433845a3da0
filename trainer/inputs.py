"""Inputs of an encoder: token ids, sparse features with values, or both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from schemas.errors import InputError
from schemas.ragged import Ragged, SparseRows
from schemas.shard_files.parquet import list_column
from schemas.table import Table

Kind = Literal["tokens", "features", "both", "none"]
_TOKENS = ("input_ids",)
_FEATURES = ("feature_ids", "feature_values")


@dataclass(frozen=True)
class Inputs:
    """B rows of token ids, and of int32 feature ids, sorted and unique within a row; what is not read is None."""

    tokens: Ragged | None = None
    features: SparseRows | None = None

    @classmethod
    def of(cls, rows: pa.Table) -> "Inputs":
        """Read the columns that are inputs."""
        names = (name for name in (*_TOKENS, *_FEATURES) if name in rows.column_names)
        return cls.from_columns({name: list_column(rows, name) for name in names})

    @classmethod
    def from_columns(cls, columns: Mapping[str, Ragged]) -> "Inputs":
        """Pick the inputs out of `columns` by their names."""
        tokens, ids = columns.get("input_ids"), columns.get("feature_ids")
        return cls(tokens, SparseRows(ids.values, columns["feature_values"].values, ids.offsets) if ids else None)

    def slice(self, start: int, stop: int) -> "Inputs":
        """Return rows [start, stop); values are views."""
        return Inputs(
            self.tokens and self.tokens.slice(start, stop), self.features and self.features.slice(start, stop)
        )

    def take(self, rows: np.ndarray) -> "Inputs":
        """Return rows `rows` [B'] in that order."""
        return Inputs(self.tokens and self.tokens.take(rows), self.features and self.features.take(rows))


def columns_of(kind: Kind) -> list[str]:
    """Return the columns that `encoder.inputs` reads; `none` is of streams without an encoder."""
    return [*(_TOKENS if kind in ("tokens", "both") else ()), *(_FEATURES if kind in ("features", "both") else ())]


def scored_columns(queries: Table, columns: list[str]) -> list[str]:
    """Return the columns of `queries` to score: an encoder's `columns`, the positives, and a filter."""
    return [*columns, "label_ids", *({"filter_label_ids"} & {*queries.columns})]


def require_inputs(table: Table, kind: Kind) -> None:
    """Refuse a table without the columns that `kind` reads. Raises InputError that says what it has."""
    missing = [name for name in columns_of(kind) if name not in table.columns]
    if not missing:
        return
    if missing[0] in _TOKENS:
        remedy = "set encoder.inputs = 'features' and encoder.kind = 'bag' (a transformer reads token ids only)"
    else:
        remedy = "set encoder.inputs = 'tokens', or shard data that has features for these rows too"
    raise InputError(f"{table.url}: no column {', '.join(missing)}, which encoder.inputs = {kind!r} reads: {remedy}.")
