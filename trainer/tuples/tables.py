"""A table of negatives with the DATA that it was mined from: texts and scores by row.

Columns are copied once to memory-mapped scratch files in TMPDIR, so that they may be larger than memory.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import is_published
from schemas.mapped import ScratchRows
from schemas.ragged import Ragged
from schemas.shard_files.parquet import matrix_column, string_bytes
from schemas.storage import join
from schemas.table import Table
from trainer.stream import Source
from trainer.tuples.options import TupleOptions


@dataclass(frozen=True)
class TupleTables:
    """Queries, their negatives and the labels of `data`; for mined arrays, `place` is the output folder."""

    place: str
    data: str
    queries: Table
    negatives: Table
    labels: Table
    mining: bool
    options: TupleOptions
    _held: dict[tuple[str, str], Any] = field(default_factory=dict, compare=False)  # columns by table and name

    @classmethod
    def open(cls, url: str, data: str | None, options: TupleOptions) -> "TupleTables":
        """Open a table with its DATA; `url` is a table, the output folder of mined arrays, or a RUN.

        Raises InputError if no DATA is given, DATA has no texts, more negatives are requested than the table has, or
        scores are missing; TableError if there is no such table, or the table was mined from other data.
        """
        place, mining = url, not is_published(url) and is_published(join(url, "data"))
        if mining:
            url, data = join(url, "queries"), data or join(url, "data")
        if data is None:
            Table.open(url, "negatives")  # a missing place has its own error message
            raise InputError(f"{url}: --data is missing: give the DATA that this table was mined from.")
        whole, layout, table = Table.open(data, "data"), DataLayout(data), Table.find(url, "negatives")
        splits = {digest: name[8:] for name, digest in whole.parents.items() if name.startswith("queries/")}
        split = "train" if table is None else splits.get(table.parents.get("queries", ""))
        if split is None:
            raise TableError(
                f"{url}: not mined from the queries of {data} ({', '.join(sorted(splits.values()))}). Give the "
                "DATA that this table was mined from with --data."
            )
        queries = Table.open(layout.queries(split), "queries")
        negatives = Source("queries", queries).with_negatives(url).negatives
        assert negatives is not None
        tables = cls(place, data, queries, negatives, Table.open(layout.labels, "labels"), mining, options)
        tables._require(options, negatives.width("label_ids"))
        return tables

    @property
    def source(self) -> Source:
        """The queries joined with their negatives."""
        return Source("queries", self.queries, self.negatives)

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the tables, by name."""
        return {"queries": self.queries.digest, "negatives": self.negatives.digest, "labels": self.labels.digest}

    @property
    def width(self) -> int:
        """The maximum number n of negatives per row."""
        return self.options.negatives or (1 if self.options.form == "triplets" else self.negatives.width("label_ids"))

    def texts(self, table: Table, rows: np.ndarray) -> pa.Array:
        """Return the texts, or keys, for `rows` of queries or labels. Raises InputError, TableError, StorageError."""
        return self.strings(table, "key" if self.options.keys else "text", rows)

    def strings(self, table: Table, column: str, rows: np.ndarray) -> pa.Array:
        """Return strings of a column for `rows` [n]. Raises InputError if all are empty; TableError, StorageError."""
        held = self._hold(table, column, _open_strings)
        if not held.buffers()[2].size and table.rows:
            raise InputError(f"{table.url}: the table has no {column}. Give --keys to write keys instead of texts.")
        return held.take(pa.array(rows)).cast(pa.string())

    def scores(self, column: str, rows: np.ndarray) -> np.ndarray:
        """Return a score column for the negatives of `rows` [B], float32 [B, K]. Raises TableError, StorageError."""
        return self._hold(self.negatives, column, _open_matrix)[rows].astype(np.float32)

    def positive_scores(self, rows: np.ndarray, positives: Ragged) -> np.ndarray:
        """Return scores of the positives of `rows` [B], float32, one per positive.

        A teacher does not score positives, so with `scores` = "teacher" the scores are NaN. Raises TableError,
        StorageError.
        """
        if self.options.scores == "teacher":
            return np.full(len(positives.entries), np.nan, np.float32)
        vectors = []
        sides = {"queries": ("embeddings", rows[positives.row_of()]), "labels": ("vectors", positives.entries)}
        for name, (parent, ids) in sides.items():
            table = Table.open(join(self.place, "embeddings", name))
            self.negatives.require_made_from(parent, table)
            vectors.append(self._hold(table, "vector", _open_matrix)[ids].astype(np.float32))
        return np.einsum("pd,pd->p", *vectors)

    def _hold(self, table: Table, column: str, read: Any) -> Any:
        place = table.url, column
        if place not in self._held:
            self._held[place] = read(table, column)
        return self._held[place]

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.place, self.data, self.queries, self.negatives, self.labels, self.mining, self.options
        return TupleTables, own  # without maps

    def _require(self, options: TupleOptions, width: int) -> None:
        if (options.negatives or 0) > width:
            raise InputError(
                f"--negatives {options.negatives}: {self.negatives.url} has {width} negatives per row. Ask for "
                f"fewer, or mine the table again with --width {options.negatives}."
            )
        if not options.keys and "text" not in self.queries.columns:
            raise InputError(
                f"{self.queries.url}: the queries of this DATA have no texts. Shard the data again with --keep-text, "
                "or give --keys to write keys instead of texts."
            )
        if options.scores == "search" and not self.mining:
            raise InputError(
                "--scores search: positives have scores only in the output of mining arrays. Give the output folder "
                "of mined arrays, or leave --scores out."
            )
        if options.scores == "teacher" and "teacher" not in self.negatives.columns:
            raise InputError(f"--scores teacher: no teacher has scored {self.negatives.url}. Leave --scores out.")


def _open_strings(table: Table, column: str) -> pa.LargeStringArray:
    """Return a column of strings [N]. Raises TableError, StorageError."""
    rows = ScratchRows("texts")
    for group in table.batches([column]):
        array = pa.concat_arrays([pa.array([], pa.large_string()), *group[column].cast(pa.large_string()).chunks])
        rows.add(string_bytes(array))
    values, offsets = rows.mapped()
    return pa.LargeStringArray.from_buffers(table.rows, pa.py_buffer(offsets), pa.py_buffer(values))


def _open_matrix(table: Table, column: str) -> np.ndarray:
    """Return a column of lists of K numbers, [N, K]. Raises TableError, StorageError."""
    rows = ScratchRows("scores and vectors")
    for group in table.batches([column]):
        rows.add(Ragged.from_matrix(matrix_column(group, column)))
    return rows.mapped().values.reshape(table.rows, table.width(column))
