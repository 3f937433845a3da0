"""XC forms, where a label is its 0-based line: raw JSON, files aligned row by row, the old single file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from schemas.errors import InputError
from schemas.ragged import SparseRows
from schemas.shard_files import parquet
from schemas.storage import join


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
    """Form whose parts have files of `roles`: LABELS and FEATURES (matrices), and TEXT or JSON (lines).

    A matrix is text (first line `rows columns`, then fields `index:value`) or an .npz file of SciPy. Every split has a
    file of the `required` role.
    """

    name: str
    expects: str
    roles: tuple[str, ...] = ()
    required: str = ""

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        if self.required == JSON:
            return any(xc_files.is_any(names, table, JSON) for table in ("train", LABELS))
        here = [role for role in (FEATURES, TEXT) if xc_files.is_any(names, "train", role)]
        return here[:1] == [self.required]  # with features it is XC_SPARSE

    def find(self, source: str) -> Inputs:
        return xc_files.find_parts(source, self.name, self.expects, self.roles, self.required)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with the columns of each file: lines, or rows of an npz matrix; sizes are in the metadata."""
        return xc_files.read_part(part, block_rows)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        points = part.table != LABELS
        rows = Rows(raw, first_row, part)
        keys, texts, *labels = rows.records(text)
        if points and LABELS in part.files:
            labels = [*rows.labels(LABELS, rows.matrix(LABELS))]
        features = sparse.feature_columns(rows.matrix(FEATURES)) if FEATURES in part.files else []
        schema = points_schema("label_ids", bool(features)) if points else labels_schema(bool(features))
        return rows.parsed([rows.numbers, keys, texts, *features, *labels], schema)


# Records, whose labels are in `target_ind`.
XC_RAW = Aligned(
    name="xc",
    expects="trn.json.gz, lbl.json.gz, and where there are any tst.json.gz, val.json.gz (older: trn.raw.json.gz)",
    roles=(JSON,),
    required=JSON,
)
# `trn_X_Y.txt`, `trn_X_Xf.txt`, and where there are any those of `tst` and `val`, `lbl_X_Xf.txt`, and texts: lines
# (`trn_X.txt`) or the records of the raw form (`trn.json.gz`), whose `target_ind` serves where `trn_X_Y` is missing.
XC_SPARSE = Aligned(
    name="xc-sparse",
    expects="trn_X_Xf.txt, trn_X_Y.txt, and where there are any lbl_X_Xf.txt, tst_X_Xf.txt, tst_X_Y.txt, texts",
    roles=(LABELS, FEATURES, TEXT, JSON),
    required=FEATURES,
)
# `trn_X.txt`, `trn_X_Y.txt`, `Y.txt` (one text a line, one label a line), and where there are any those of `tst` and
# `val`; texts may be called `trn.raw.txt`, `lbl.raw.txt`, or `raw_data/train.raw.txt`, `raw_data/label.raw.txt`, and
# lie under `raw/`; the label matrix may be `trn_X_Y.npz` or `Y.trn.npz`.
XC_TEXT = Aligned(
    name="xc-text",
    expects="trn_X.txt (or trn.raw.txt), trn_X_Y.txt (or Y.trn.npz), Y.txt (or lbl.raw.txt), and those of tst",
    roles=(LABELS, TEXT),
    required=TEXT,
)


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

    def records(self, text: Text) -> tuple[pa.Array, ...]:
        """Return keys and texts [B]: of the JSON records, or of the lines, known by their rows as `#17`.

        A record has `title`, and where there is any `uid` (else its row) and `content`. With label_ids and merged
        behind them, where the records of points alone name labels: lines of the labels' file, in `target_ind`.
        """
        part, count = self._part, self.raw.num_rows
        if JSON not in part.files:
            keys = [f"#{row}" for row in range(self.first_row, self.first_row + count)]
            return pa.array(keys, pa.string()), self._texts()
        named = part.table != LABELS and LABELS not in part.files

        def read(record: Record, row: int) -> tuple[Any, ...]:
            key, body = _key(record, row), _text(record, text)
            return (key, body, *_targets(record, key)) if named else (key, body)

        rows, good, rejects = records.each(self.raw[JSON].to_pylist(), self.first_row, part.name, read)
        for bad in rejects:
            self.reject_in(JSON, bad.line - 1 - self.first_row, bad.reason, bad.detail)
        schema = points_schema("label_ids", features=False) if named else labels_schema(features=False)
        values: dict[int, tuple[Any, ...]] = dict(zip(rows, good, strict=True))
        absent = (None,) * (len(schema) - 1)
        filled = [values.get(row, absent) for row in range(self.first_row, self.first_row + count)]
        return tuple(map(pa.array, zip(*filled, strict=True), schema.types[1:]))

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


def _ragged(raw: pa.RecordBatch, role: str) -> SparseRows:
    indices, values = raw[f"{role}.indices"], raw[f"{role}.values"]
    offsets = indices.offsets.to_numpy().astype(np.int64)
    named = indices.values.to_numpy()[offsets[0] : offsets[-1]]
    starts = values.offsets.to_numpy()
    return SparseRows(named, values.values.to_numpy()[starts[0] : starts[-1]], offsets - offsets[0])


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
        sizes = [xc_files.read_header(part.files[BOTH], BOTH) for part in parts]
        features, labels = max(size[1] for size in sizes), max(size[2] for size in sizes)
        xc_files.check_features(features, source)
        parts.append(xc_files.labels_by_number(labels, sum(size[0] for size in sizes), parts[0].files[BOTH]))
        return Inputs(self.name, tuple(parts), False, filters_at(source, names), labels, features)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        if part.table == LABELS:
            return super().parse(raw, first_row, part, text)
        rows = Rows(raw, first_row, part)
        keys, texts = rows.records(text)
        of_labels, of_features = sparse.cut_at_space(raw[BOTH])
        features = sparse.feature_columns(rows.checked(FEATURES, BOTH, *sparse.parse_pairs(of_features)))
        labels, merged = rows.labels(BOTH, rows.checked(LABELS, BOTH, *sparse.parse_indices(of_labels)))
        return rows.parsed([rows.numbers, keys, texts, *features, labels, merged], points_schema("label_ids", True))


def _matching(split: str, names: Sequence[str]) -> list[str]:
    """List the names that the file of `split` may have: alone, or after the data set's name."""
    return [name for name in names if re.fullmatch(rf"(?!filter_labels)(.+_)?{split}\.txt{lines.CODEC}", name)]
