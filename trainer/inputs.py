"""What an encoder reads of a row: token ids, sparse features with values, or both."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from schemas.errors import InputError
from schemas.manifest import Manifest
from schemas.ragged import taken
from schemas.shard_files.parquet import list_column

Kind = Literal["tokens", "features", "both"]
_TOKENS = ("input_ids",)
_FEATURES = ("feature_ids", "feature_values")


class Tokens(NamedTuple):
    """Token ids [V] of B rows, with `offsets` [B + 1]."""

    ids: np.ndarray
    offsets: np.ndarray

    def slice(self, start: int, stop: int) -> "Tokens":
        ids, offsets = cut(self.ids, self.offsets, start, stop)
        return Tokens(ids, offsets)

    def take(self, rows: np.ndarray) -> "Tokens":
        places, offsets = taken(self.offsets, rows)
        return Tokens(self.ids[places], offsets)


class Features(NamedTuple):
    """Sparse features of B rows: `ids` [V] int32, sorted and unique within a row, `values` [V] float32, `offsets`."""

    ids: np.ndarray
    values: np.ndarray
    offsets: np.ndarray

    def slice(self, start: int, stop: int) -> "Features":
        ids, offsets = cut(self.ids, self.offsets, start, stop)
        return Features(ids, self.values[self.offsets[start] : self.offsets[stop]], offsets)

    def take(self, rows: np.ndarray) -> "Features":
        places, offsets = taken(self.offsets, rows)
        return Features(self.ids[places], self.values[places], offsets)


@dataclass(frozen=True)
class Inputs:
    """B rows; what is not read is None."""

    tokens: Tokens | None = None
    features: Features | None = None

    @classmethod
    def of(cls, rows: pa.Table) -> "Inputs":
        """From the columns that are there."""
        return cls.read(rows.column_names, lambda name: list_column(rows, name))

    @classmethod
    def read(cls, names: Collection[str], column: Callable[[str], tuple[np.ndarray, np.ndarray]]) -> "Inputs":
        """Those of the columns `names` that are inputs; `column` gives the values and offsets of one."""
        tokens = Tokens(*column("input_ids")) if "input_ids" in names else None
        if "feature_ids" not in names:
            return cls(tokens)
        ids, offsets = column("feature_ids")
        return cls(tokens, Features(ids, column("feature_values")[0], offsets))

    def slice(self, start: int, stop: int) -> "Inputs":
        """Rows [start, stop); values are views, not copies."""
        return Inputs(
            None if self.tokens is None else self.tokens.slice(start, stop),
            None if self.features is None else self.features.slice(start, stop),
        )

    def take(self, rows: np.ndarray) -> "Inputs":
        """Rows `rows` [B'] in that order."""
        return Inputs(
            None if self.tokens is None else self.tokens.take(rows),
            None if self.features is None else self.features.take(rows),
        )


def cut(values: np.ndarray, offsets: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [start, stop) of a ragged column: views of its values, and their offsets."""
    return values[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start]


def columns_of(kind: Kind) -> list[str]:
    """The columns that `encoder.inputs` reads."""
    return [*(_TOKENS if kind != "features" else ()), *(_FEATURES if kind != "tokens" else ())]


def scored_columns(queries: Manifest, columns: list[str]) -> list[str]:
    """What scoring reads of `queries`: an encoder's `columns`, the positives, and the filter where there is one."""
    present = {column.name for column in queries.columns}
    return [*columns, "label_ids", *({"filter_label_ids"} & present)]


def require_inputs(url: str, manifest: Manifest, kind: Kind) -> None:
    """Refuse a table without the columns that `kind` reads. Raises InputError that says what it has."""
    names = [column.name for column in manifest.columns]
    missing = [name for name in columns_of(kind) if name not in names]
    if not missing:
        return
    if missing[0] in _TOKENS:
        remedy = "set encoder.inputs = 'features' and encoder.kind = 'bag' (a transformer reads token ids only)"
    else:
        remedy = "set encoder.inputs = 'tokens', or shard data that has features for these rows too"
    raise InputError(f"{url}: no column {', '.join(missing)}, which encoder.inputs = {kind!r} reads: {remedy}.")
