"""XC forms whose files stand beside each other, row by row: label matrix, feature matrix, texts.

`xc_sparse` and `xc_text` say which names their files have; reading and parsing are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.formats import sparse
from pipelines.formats.aligned_files import FEATURES, JSON, TEXT, first_line_of_rows, read_nothing, read_part
from pipelines.formats.base import LABELS, Context, Parsed, Part, RawRows, labels_schema, points_schema
from pipelines.formats.rejects import Reason
from pipelines.formats.xc_raw import XcRaw
from schemas.errors import InputError
from schemas.ragged import SparseRows
from schemas.shard_files import parquet

_JSON = XcRaw()


@dataclass(frozen=True)
class Aligned:
    """Reader and parser of parts whose `files` are LABELS and FEATURES (matrices), and TEXT or JSON (lines)."""

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with the columns of each file: lines, or rows of an npz matrix; sizes are in the metadata."""
        return read_nothing(part.rows, block_rows) if part.rows is not None else read_part(part, block_rows)

    def parse_points(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        if JSON in part.files and LABELS not in part.files:
            parsed = _JSON.parse_points(raw.select([JSON]).rename_columns(["line"]), first_row, part, context)
            return _with_features(parsed, raw, first_row, part)
        rows = Rows(raw, first_row, part)
        keys, texts = rows.names(context)
        labels, merged = rows.labels(LABELS, rows.matrix(LABELS))
        features = sparse.feature_columns(rows.matrix(FEATURES)) if FEATURES in part.files else []
        return rows.parsed(
            [rows.numbers, keys, texts, *features, labels, merged], points_schema("label_ids", bool(features))
        )

    def parse_labels(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        rows = Rows(raw, first_row, part)
        keys, texts = rows.names(context)
        features = sparse.feature_columns(rows.matrix(FEATURES)) if FEATURES in part.files else []
        return rows.parsed([rows.numbers, keys, texts, *features], labels_schema(bool(features)))

    def parse_pairs(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        raise NotImplementedError("this form has no pairs file")


class Rows(RawRows):
    """Rows of the files of a part."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, part: Part) -> None:
        super().__init__(raw, first_row)
        self._part = part

    def reject_in(self, role: str, row: int, reason: Reason, detail: str) -> None:
        """Leave out the 0-based `row` of the block, for what is in the file of `role`."""
        url = self._part.files[role]
        self.reject(row, url.rsplit("/", 1)[-1], self.first_row + row + first_line_of_rows(role, url), reason, detail)

    def names(self, context: Context) -> tuple[pa.Array, pa.Array]:
        """Return (keys, texts) [B]: those of the JSON records, or the lines known by their rows as `#17`."""
        part, count = self._part, self.raw.num_rows
        keys = [f"#{row}" for row in range(self.first_row, self.first_row + count)]
        if JSON not in part.files:
            return pa.array(keys, pa.string()), self._texts()
        parsed = _JSON.parse_labels(self.raw.select([JSON]).rename_columns(["line"]), self.first_row, part, context)
        texts = [""] * count
        for row, key, text in zip(*(parsed.batch[name].to_pylist() for name in ("row", "key", "text")), strict=True):
            keys[row - self.first_row], texts[row - self.first_row] = key, text
        for bad in parsed.rejects:
            self.reject_in(JSON, bad.line - 1 - self.first_row, bad.reason, bad.detail)
        return pa.array(keys, pa.string()), pa.array(texts, pa.string())

    def _texts(self) -> pa.Array:
        if TEXT not in self._part.files:
            return pa.array([""] * self.raw.num_rows, pa.string())
        column = self.raw[TEXT]
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            texts = []
            for row, line in enumerate(column.to_pylist()):
                try:
                    texts.append(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    texts.append("")
                    self.reject_in(TEXT, row, Reason.NOT_UNICODE, f"byte {error.start} is not UTF-8")
            return pa.array(texts, pa.string())

    def matrix(self, role: str) -> SparseRows:
        """Read the rows of the matrix in the file of `role`. Raises InputError: an index is not below the columns."""
        if f"{role}.indices" in self.raw.schema.names:
            return self.checked(role, role, *sparse.only_finite(_ragged(self.raw, role)))
        return self.checked(role, role, *sparse.parse_pairs(self.raw[role]))

    def checked(self, kind: str, role: str, ragged: SparseRows, faults: Mapping[int, str]) -> SparseRows:
        """Reject faulty rows of `ragged`, of the file of `role`, and compare indices with the header's `kind`."""
        for row, detail in faults.items():
            self.reject_in(role, row, Reason.MALFORMED, detail)
        columns = int((self.raw.schema.metadata or {})[kind.encode()])
        url = self._part.files[role]
        beyond = np.flatnonzero(ragged.ids >= columns)
        if len(beyond):
            line = self.first_row + first_line_of_rows(role, url) + int(ragged.row_of()[beyond[0]])
            raise InputError(
                f"{url}, line {line}: index {ragged.ids[beyond[0]]} is beyond the {columns} {kind} that the header "
                "states (indices start at 0). Fix the line; or the header, which may state more than are used, but "
                "not fewer."
            )
        return ragged

    def labels(self, role: str, ragged: SparseRows) -> tuple[pa.Array, pa.Array]:
        """Return the columns label_ids and merged [B]; a point without labels is rejected."""
        kept, merged = sparse.merge_labels(ragged)
        for row in np.flatnonzero(np.diff(kept.offsets) == 0).tolist():
            self.reject_in(role, row, Reason.NO_LABELS, "the point has no labels")
        return parquet.list_array(kept.ids, kept.offsets, pa.int64()), pa.array(merged)


def _with_features(parsed: Parsed, raw: pa.RecordBatch, first_row: int, part: Part) -> Parsed:
    """Return points of JSON records with the features of their rows; a row whose features are malformed is rejected."""
    rows = Rows(raw, first_row, part)
    for reject in parsed.rejects:
        rows.reject_in(JSON, reject.line - 1 - first_row, reject.reason, reject.detail)
    features = sparse.feature_columns(rows.matrix(FEATURES))
    names, schema = ["feature_ids", "feature_values"], points_schema("label_ids", features=True)
    beside = rows.parsed([rows.numbers, *features], pa.schema([schema.field(name) for name in ["row", *names]]))
    batch = parsed.batch.filter(pa.array(np.isin(parsed.batch["row"].to_numpy(), beside.batch["row"].to_numpy())))
    for name in names:
        batch = batch.append_column(name, beside.batch[name])
    return Parsed(batch.select(schema.names), beside.rejects)


def _ragged(raw: pa.RecordBatch, role: str) -> SparseRows:
    indices, values = raw[f"{role}.indices"], raw[f"{role}.values"]
    offsets = indices.offsets.to_numpy().astype(np.int64)
    named = indices.values.to_numpy()[offsets[0] : offsets[-1]]
    starts = values.offsets.to_numpy()
    return SparseRows(named, values.values.to_numpy()[starts[0] : starts[-1]], offsets - offsets[0])
