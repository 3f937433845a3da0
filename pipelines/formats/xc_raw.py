"""XC raw form: gzip of one JSON object a line; a label's id is its line in the labels' file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.formats import lines, records
from pipelines.formats.aligned_files import JSON
from pipelines.formats.base import LABELS, SPLITS, Inputs, Parsed, Part, Text, labels_schema, points_schema
from pipelines.formats.names import filters_at, one_of
from pipelines.formats.records import Bad, Record
from pipelines.formats.rejects import Reason
from pipelines.formats.xc_files import is_any, usual
from schemas import storage
from schemas.storage import join


@dataclass(frozen=True)
class XcRaw:
    """`trn.json.gz`, `lbl.json.gz`, and where there are any `tst.json.gz`, `val.json.gz` and filter files.

    A point has `title`, `target_ind` (label lines), and may have `uid` (else it is known as `#row`) and `content`.
    """

    name: str = "xc"
    expects: str = "trn.json.gz, lbl.json.gz, and where there are any tst.json.gz, val.json.gz (older: trn.raw.json.gz)"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return any(is_any(names, table, JSON) for table in ("train", LABELS))

    def find(self, source: str) -> Inputs:
        names = storage.list_names(source)
        files = {
            table: one_of(source, names, usual(table, JSON), self.expects, required=table in ("train", LABELS))
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
