"""The XC forms whose files stand beside each other, row by row: label matrix, feature matrix, texts.

`xc_sparse` and `xc_text` say which names their files have; reading and parsing are the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.formats import sparse
from pipelines.formats.aligned_files import FEATURES, JSON, TEXT, first_line_of_rows, read_nothing, read_part
from pipelines.formats.base import LABELS, Context, Parsed, Part, labels_schema, points_schema
from pipelines.formats.rejects import Reason, Reject
from pipelines.formats.xc_raw import XcRaw
from schemas.errors import InputError
from schemas.ragged import SparseRows
from schemas.shard_files import parquet

_JSON = XcRaw()


@dataclass(frozen=True)
class Aligned:
    """Reading and parsing of parts whose `files` are LABELS and FEATURES (matrices), and TEXT or JSON (lines)."""

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Blocks with the columns of each file: lines, or of an npz matrix its rows; sizes are in the metadata."""
        return read_nothing(part.rows, block_rows) if part.rows is not None else read_part(part, block_rows)

    def parse_points(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        if JSON in part.files and LABELS not in part.files:
            parsed = _JSON.parse_points(raw.select([JSON]).rename_columns(["line"]), first_row, part, context)
            return _with_features(parsed, raw, first_row, part)
        rows = Rows(raw, first_row, part)
        keys, texts = rows.names(context)
        labels, merged = rows.labels(LABELS, rows.matrix(LABELS))
        features = rows.features(rows.matrix(FEATURES)) if FEATURES in part.files else []
        return rows.parsed(
            [rows.numbers, keys, texts, *features, labels, merged], points_schema("label_ids", bool(features))
        )

    def parse_labels(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        rows = Rows(raw, first_row, part)
        keys, texts = rows.names(context)
        features = rows.features(rows.matrix(FEATURES)) if FEATURES in part.files else []
        return rows.parsed([rows.numbers, keys, texts, *features], labels_schema(bool(features)))

    def parse_pairs(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        raise NotImplementedError("this form has no pairs file")


class Rows:
    """A raw block on its way to columns; `reject` notes the rows that are left out, each with its first reason."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, part: Part) -> None:
        self._raw, self._first, self._part = raw, first_row, part
        self._rejects: dict[int, Reject] = {}
        self.numbers = pa.array(np.arange(first_row, first_row + raw.num_rows))

    def reject(self, role: str, row: int, reason: Reason, detail: str) -> None:
        """Leave out the 0-based `row` of the block, for what is in the file of `role`."""
        url = self._part.files[role]
        self._rejects.setdefault(
            row, Reject(_name(url), self._first + row + first_line_of_rows(role, url), reason, detail)
        )

    def parsed(self, columns: Sequence[pa.Array], schema: pa.Schema) -> Parsed:
        batch = pa.record_batch(list(columns), schema=schema)
        if self._rejects:
            good = np.ones(self._raw.num_rows, bool)
            good[list(self._rejects)] = False
            batch = batch.filter(pa.array(good))
        return Parsed(batch, [self._rejects[row] for row in sorted(self._rejects)])

    def names(self, context: Context) -> tuple[pa.Array, pa.Array]:
        """(keys, texts) [B]: those of the JSON records, or the lines known by their rows as `#17`."""
        part, count = self._part, self._raw.num_rows
        keys = [f"#{row}" for row in range(self._first, self._first + count)]
        if JSON not in part.files:
            return pa.array(keys, pa.string()), self._texts()
        found = _JSON.parse_labels(self._raw.select([JSON]).rename_columns(["line"]), self._first, part, context)
        texts = [""] * count
        for row, key, text in zip(*(found.batch[name].to_pylist() for name in ("row", "key", "text")), strict=True):
            keys[row - self._first], texts[row - self._first] = key, text
        for one in found.rejects:
            self.reject(JSON, one.line - 1 - self._first, one.reason, one.detail)
        return pa.array(keys, pa.string()), pa.array(texts, pa.string())

    def _texts(self) -> pa.Array:
        if TEXT not in self._part.files:
            return pa.array([""] * self._raw.num_rows, pa.string())
        column = self._raw[TEXT]
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            texts = []
            for row, line in enumerate(column.to_pylist()):
                try:
                    texts.append(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    texts.append("")
                    self.reject(TEXT, row, Reason.NOT_UNICODE, f"byte {error.start} is not UTF-8")
            return pa.array(texts, pa.string())

    def matrix(self, role: str) -> SparseRows:
        """The rows of the matrix in the file of `role`. Raises InputError: an index is not below the columns."""
        if f"{role}.indices" in self._raw.schema.names:
            found, wrong = sparse.only_finite(_ragged(self._raw, role))
        else:
            found, wrong = sparse.parse_pairs(self._raw[role])
        return self.checked(role, role, found, wrong)

    def checked(self, what: str, role: str, found: SparseRows, wrong: Mapping[int, str]) -> SparseRows:
        """`found`, of the file of `role`; its `wrong` rows are rejected, indices compared with the header's `what`."""
        for row, detail in wrong.items():
            self.reject(role, row, Reason.MALFORMED, detail)
        columns = int((self._raw.schema.metadata or {})[what.encode()])
        url = self._part.files[role]
        beyond = np.flatnonzero(found.ids >= columns)
        if len(beyond):
            line = self._first + first_line_of_rows(role, url) + int(found.row_of()[beyond[0]])
            raise InputError(
                f"{url}, line {line}: index {found.ids[beyond[0]]} is beyond the {columns} {what} that the header "
                "states (indices start at 0). Mend the line; or the header, which may state more than are used, but "
                "not fewer."
            )
        return found

    def labels(self, role: str, found: SparseRows) -> tuple[pa.Array, pa.Array]:
        """The columns label_ids and merged [B]; a point without labels is rejected."""
        kept, merged = sparse.merge_labels(found)
        for row in np.flatnonzero(np.diff(kept.offsets) == 0).tolist():
            self.reject(role, row, Reason.NO_LABELS, "the point has no labels")
        return parquet.list_array(kept.ids, kept.offsets, pa.int64()), pa.array(merged)

    def features(self, found: SparseRows) -> list[pa.Array]:
        """The columns feature_ids and feature_values [B]."""
        kept = sparse.merge_features(found)
        return [
            parquet.list_array(kept.ids.astype(np.int32), kept.offsets, pa.int32()),
            parquet.list_array(kept.values, kept.offsets, pa.float32()),
        ]


def _name(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def _with_features(parsed: Parsed, raw: pa.RecordBatch, first_row: int, part: Part) -> Parsed:
    """Points of JSON records with the features of their rows; a row whose features are malformed is rejected."""
    rows = Rows(raw, first_row, part)
    for reject in parsed.rejects:
        rows.reject(JSON, reject.line - 1 - first_row, reject.reason, reject.detail)
    beside = rows.parsed(
        [rows.numbers, *rows.features(rows.matrix(FEATURES))], pa.schema([("row", pa.int64()), *_feature_fields()])
    )
    good = beside.batch["row"]
    mask = pa.array(np.isin(parsed.batch["row"].to_numpy(), good.to_numpy()))
    batch = parsed.batch.filter(mask)
    schema = points_schema("label_ids", features=True)
    columns = {
        **dict(zip(batch.schema.names, batch.columns, strict=True)),
        **dict(zip(beside.batch.schema.names, beside.batch.columns, strict=True)),
    }
    return Parsed(pa.record_batch([columns[name] for name in schema.names], schema=schema), beside.rejects)


def _feature_fields() -> list[pa.Field]:
    return [field for field in labels_schema(features=True) if field.name.startswith("feature_")]


def _ragged(raw: pa.RecordBatch, role: str) -> SparseRows:
    indices, values = raw[f"{role}.indices"], raw[f"{role}.values"]
    offsets = indices.offsets.to_numpy().astype(np.int64)
    named = indices.values.to_numpy()[offsets[0] : offsets[-1]]
    starts = values.offsets.to_numpy()
    return SparseRows(named, values.values.to_numpy()[starts[0] : starts[-1]], offsets - offsets[0])
