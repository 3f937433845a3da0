"""Old XC form: one file a split, header `points features labels`, lines `l1,l2 f1:v1 f2:v2`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipelines.formats import lines, sparse
from pipelines.formats.aligned_files import (
    BOTH,
    FEATURES,
    check_features,
    labels_by_number,
    read_file,
    read_header,
    read_nothing,
)
from pipelines.formats.base import LABELS, SPLITS, Inputs, Parsed, Part, Text, points_schema
from pipelines.formats.names import filters_at, listing, one_of
from pipelines.formats.xc_aligned import Aligned, Rows
from schemas.storage import join

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
        sizes = [read_header(part.files[BOTH], *_HEADER) for part in parts]
        features, labels = max(size[1] for size in sizes), max(size[2] for size in sizes)
        check_features(features, source)
        parts.append(labels_by_number(labels, sum(size[0] for size in sizes), parts[0].files[BOTH]))
        return Inputs(self.name, tuple(parts), False, filters_at(source, names), labels, features)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        if part.rows is not None:
            yield from read_nothing(part.rows, block_rows)
            return
        rows, features, labels = read_header(part.files[BOTH], *_HEADER)
        sizes = {FEATURES: str(features).encode(), LABELS: str(labels).encode()}
        for block in read_file(BOTH, part.files[BOTH], rows, block_rows):
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
