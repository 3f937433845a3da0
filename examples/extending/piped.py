"""Columns separated by |: train.psv (text, labels), labels.psv (key, text), and optionally test.psv, val.psv."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import orjson
import pyarrow as pa

from pipelines.formats import base, keyed
from pipelines.formats.base import LABELS, SPLITS, Inputs, Part, RowContents, one_of
from schemas import storage


@dataclass(frozen=True)
class Piped(keyed.Keyed):
    """Label keys are separated by `;`. Without a column `key`, the key of a point is its row, such as `train-17`."""

    name: str = "psv"
    expects: str = "train.psv (text, labels), labels.psv (key, text), and optionally test.psv, val.psv"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return "train.psv" in names

    def find(self, source: str) -> Inputs:
        names, parts = storage.list_names(source), []
        for table in (*SPLITS, LABELS):
            if file := one_of(source, names, [f"{table}.psv"], self.expects, required=table in ("train", LABELS)):
                contents = RowContents(labels=table != LABELS)
                parts.append(Part(table, file, {keyed.ROWS: storage.join(source, file)}, contents=contents))
        return Inputs(self.name, tuple(parts), keyed=True)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        with storage.open_read(part.files[keyed.ROWS]) as file:
            table = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig"), restkey="", restval="", delimiter="|")
            rows = enumerate({**row, "labels": row.get("labels", "").split(";")} for row in table)
            while block := [orjson.dumps({"key": f"{part.table}-{n}", **row}) for n, row in islice(rows, block_rows)]:
                yield pa.record_batch([pa.array(block, pa.large_binary())], schema=base.SCHEMA)


PIPED = Piped()
