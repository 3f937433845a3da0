"""XC forms, where a label is its 0-based line: raw JSON, files aligned row by row, the old single file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.formats import lines, records, sparse, xc_files
from pipelines.formats.base import (
    LABELS,
    SPLITS,
    Inputs,
    Parsed,
    Part,
    RawRows,
    Reason,
    Text,
    decode_column,
    labels_schema,
    points_schema,
)
from pipelines.formats.names import filters_at, listing, one_of
from pipelines.formats.records import Bad, Record
from pipelines.formats.xc_files import BOTH, FEATURES, JSON, TEXT
from schemas import storage
from schemas.errors import InputError
from schemas.ragged import SparseRows
from schemas.shard_files import parquet
from schemas.storage import join


@dataclass(frozen=True)
class XcRaw:
    """`trn.json.gz`, `lbl.json.gz`, and where there are any `tst.json.gz`, `val.json.gz` and filter files.

    A point has `title`, `target_ind` (label lines), and may have `uid` (else it is known as `#row`) and `content`.
    """

    name: str = "xc"
    expects: str = "trn.json.gz, lbl.json.gz, and where there are any tst.json.gz, val.json.gz (older: trn.raw.json.gz)"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return any(xc_files.is_any(names, table, JSON) for table in ("train", LABELS))

    def find(self, source: str) -> Inputs:
        names = storage.list_names(source)
        files = {
            table: one_of(source, names, xc_files.usual(table, JSON), self.expects, required=table in ("train", LABELS))
            for table in (*SPLITS, LABELS)
        }
        parts = tuple(Part(table, name, {JSON: join(source, name)}) for table, name in files.items() if name)
        return Inputs(self.name, parts, keyed=False, filters=filters_at(source, names))

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        return lines.read_blocks(part.files[JSON], block_rows)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        points = part.table != LABELS

        def read(record: Record, row: int) -> tuple[Any, ...]:
            key, body = _key(record, row), _text(record, text)
            return (key, body, *_targets(record, key)) if points else (key, body)

        rows, good, rejects = records.each(raw["line"].to_pylist(), first_row, part.name, read)
        schema = points_schema("label_ids", features=False) if points else labels_schema(features=False)
        columns = [rows, *(zip(*good, strict=True) if good else [()] * (len(schema) - 1))]
        return Parsed(pa.record_batch(columns, schema=schema), rejects)


def _targets(record: Record, key: str) -> tuple[list[int], int]:
    """Return the label ids, sorted, once each, and how many were named again. Raises Bad."""
    target = records.whole_numbers(records.required(record, "target_ind"), "target_ind")
    if not target:
        raise Bad(Reason.NO_LABELS, f"the point {records.shown(key)} has no labels (target_ind is empty)")
    ids = sorted(set(target))
    if ids[0] < 0 or ids[-1] >= 1 << 63:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise Bad(Reason.LABEL_OUT_OF_RANGE, f"the label {records.shown(wrong)} does not exist")
    return ids, len(target) - len(ids)


def _key(record: Record, row: int) -> str:
    """Return the uid; a record without one is known by its row, as `#17`."""
    uid = record.get("uid")
    return f"#{row}" if uid is None else records.key(uid, "uid")


def _text(record: Record, text: str) -> str:
    title = records.string(records.required(record, "title"), "title")
    content = record.get("content")
    if content is None or text == "title":
        return title
    content = records.string(content, "content")
    return f"{title} {content}" if content else title


@dataclass(frozen=True)
class Aligned:
    """Reader and parser of parts whose `files` are LABELS and FEATURES (matrices), and TEXT or JSON (lines)."""

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with the columns of each file: lines, or rows of an npz matrix; sizes are in the metadata."""
        if part.rows is not None:
            return xc_files.read_nothing(part.rows, block_rows)
        return xc_files.read_part(part, block_rows)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        points = part.table != LABELS
        if points and LABELS not in part.files:
            return _with_features(_parse_json(raw, first_row, part, text), raw, first_row, part)
        rows = Rows(raw, first_row, part)
        keys, texts = rows.names(text)
        labels = rows.labels(LABELS, rows.matrix(LABELS)) if points else ()
        features = sparse.feature_columns(rows.matrix(FEATURES)) if FEATURES in part.files else []
        schema = points_schema("label_ids", bool(features)) if points else labels_schema(bool(features))
        return rows.parsed([rows.numbers, keys, texts, *features, *labels], schema)


@dataclass(frozen=True)
class XcSparse(Aligned):
    """`trn_X_Y.txt`, `trn_X_Xf.txt`, and where there are any those of `tst` and `val`, `lbl_X_Xf.txt`, and texts.

    A matrix is text (first line `rows columns`, then fields `index:value`) or an .npz file of SciPy. Texts are lines
    (`trn_X.txt`) or the records of the raw form (`trn.json.gz`), whose `target_ind` serves where `trn_X_Y` is missing.
    """

    name: str = "xc-sparse"
    expects: str = "trn_X_Xf.txt, trn_X_Y.txt, and where there are any lbl_X_Xf.txt, tst_X_Xf.txt, tst_X_Y.txt, texts"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return xc_files.is_any(names, "train", FEATURES)

    def find(self, source: str) -> Inputs:
        return xc_files.find_parts(source, self.name, self.expects, (LABELS, FEATURES, TEXT, JSON), FEATURES)


@dataclass(frozen=True)
class XcText(Aligned):
    """`trn_X.txt`, `trn_X_Y.txt`, `Y.txt` (one text a line, one label a line), and where there are any those of `tst`
    and `val`.

    Texts may be called `trn.raw.txt`, `lbl.raw.txt`, or `raw_data/train.raw.txt`, `raw_data/label.raw.txt`, and lie
    under `raw/`; the label matrix may be `trn_X_Y.npz` or `Y.trn.npz`.
    """

    name: str = "xc-text"
    expects: str = "trn_X.txt (or trn.raw.txt), trn_X_Y.txt (or Y.trn.npz), Y.txt (or lbl.raw.txt), and those of tst"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return xc_files.is_any(names, "train", TEXT) and not xc_files.is_any(names, "train", FEATURES)

    def find(self, source: str) -> Inputs:
        return xc_files.find_parts(source, self.name, self.expects, (LABELS, TEXT), TEXT)


class Rows(RawRows):
    """Rows of the files of a part."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, part: Part) -> None:
        super().__init__(raw, first_row)
        self._part = part

    def reject_in(self, role: str, row: int, reason: Reason, detail: str) -> None:
        """Leave out the 0-based `row` of the block, for what is in the file of `role`."""
        url = self._part.files[role]
        self.reject(
            row, url.rsplit("/", 1)[-1], self.first_row + row + xc_files.first_line_of_rows(role, url), reason, detail
        )

    def names(self, text: Text) -> tuple[pa.Array, pa.Array]:
        """Return (keys, texts) [B]: those of the JSON records, or the lines known by their rows as `#17`."""
        part, count = self._part, self.raw.num_rows
        keys = [f"#{row}" for row in range(self.first_row, self.first_row + count)]
        if JSON not in part.files:
            return pa.array(keys, pa.string()), self._texts()
        parsed = _parse_json(self.raw, self.first_row, replace(part, table=LABELS), text)
        texts = [""] * count
        for row, key, content in zip(*parsed.batch.to_pydict().values(), strict=True):
            keys[row - self.first_row], texts[row - self.first_row] = key, content
        for bad in parsed.rejects:
            self.reject_in(JSON, bad.line - 1 - self.first_row, bad.reason, bad.detail)
        return pa.array(keys, pa.string()), pa.array(texts, pa.string())

    def _texts(self) -> pa.Array:
        if TEXT not in self._part.files:
            return pa.array([""] * self.raw.num_rows, pa.string())
        return decode_column(
            self.raw[TEXT], lambda row, byte: self.reject_in(TEXT, row, Reason.NOT_UNICODE, f"byte {byte} is not UTF-8")
        )

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
            line = self.first_row + xc_files.first_line_of_rows(role, url) + int(ragged.row_of()[beyond[0]])
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


def _parse_json(raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
    return XcRaw().parse(raw.select([JSON]).rename_columns(["line"]), first_row, part, text)


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


_HEADER = ("points features labels", "three")


@dataclass(frozen=True)
class XcSingle(Aligned):
    """`train.txt`, and where there are any `test.txt`, `val.txt` (also as `eurlex_train.txt`).

    First line: numbers of points, features, labels. A line that starts with a space has no labels. Nothing is known of
    a label but its number.
    """

    name: str = "xc-single"
    expects: str = "train.txt with the header `points features labels`, and where there are any test.txt, val.txt"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return bool(_matching("train", names))

    def find(self, source: str) -> Inputs:
        source, names = listing(source)
        files = {
            split: one_of(
                source, names, _matching(split, names) or [f"{split}.txt"], self.expects, required=split == "train"
            )
            for split in SPLITS
        }
        parts = [Part(split, name, {BOTH: join(source, name)}) for split, name in files.items() if name]
        sizes = [xc_files.read_header(part.files[BOTH], *_HEADER) for part in parts]
        features, labels = max(size[1] for size in sizes), max(size[2] for size in sizes)
        xc_files.check_features(features, source)
        parts.append(xc_files.labels_by_number(labels, sum(size[0] for size in sizes), parts[0].files[BOTH]))
        return Inputs(self.name, tuple(parts), False, filters_at(source, names), labels, features)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        if part.rows is not None:
            yield from xc_files.read_nothing(part.rows, block_rows)
            return
        rows, features, labels = xc_files.read_header(part.files[BOTH], *_HEADER)
        sizes = {FEATURES: str(features).encode(), LABELS: str(labels).encode()}
        for block in xc_files.read_file(BOTH, part.files[BOTH], rows, block_rows):
            yield pa.record_batch(block).replace_schema_metadata(sizes)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        if part.table == LABELS:
            return super().parse(raw, first_row, part, text)
        rows = Rows(raw, first_row, part)
        keys, texts = rows.names(text)
        of_labels, of_features = sparse.cut_at_space(raw[BOTH])
        features = sparse.feature_columns(rows.checked(FEATURES, BOTH, *sparse.parse_pairs(of_features)))
        labels, merged = rows.labels(BOTH, rows.checked(LABELS, BOTH, *sparse.parse_indices(of_labels)))
        return rows.parsed([rows.numbers, keys, texts, *features, labels, merged], points_schema("label_ids", True))


def _matching(split: str, names: Sequence[str]) -> list[str]:
    """List the names that the file of `split` may have: alone, or after the data set's name."""
    return [name for name in names if re.fullmatch(rf"(?!filter_labels)(.+_)?{split}\.txt{lines.CODEC}", name)]
