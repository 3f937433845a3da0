"""The files of AttentionXML and LightXML: one text per line, and beside them the labels of each line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import numpy as np
import pyarrow as pa

from pipelines.formats import from_columns, lines
from pipelines.formats.base import LABELS, SPLITS, Inputs, Parsed, Part, RowContents, Text
from pipelines.formats.keyed import labels_of
from pipelines.formats.names import Fields, Shape, list_files, one_of
from schemas.errors import InputError
from schemas.ragged import offsets_of
from schemas.storage import join

TEXT = "text"


@dataclass(frozen=True)
class AttentionXml:
    """Reads texts, and labels that are separated by blanks. Points without keys have a hash of the text as key."""

    name: str = "attentionxml"
    expects: str = "train_raw_texts.txt (or train_texts.txt), train_labels.txt, and optionally the same files of test"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return any(name.startswith(("train_raw_texts.txt", "train_texts.txt")) for name in names)

    def find(self, source: str) -> Inputs:
        source, names = list_files(source)
        parts = list[Part]()
        for split in SPLITS:
            raw, plain, named = (
                [f"{split}_{stem}.txt{codec}" for codec in lines.SUFFIXES] for stem in ("raw_texts", "texts", LABELS)
            )
            if split != "train" and not {*raw, *plain, *named} & {*names}:
                continue
            texts = one_of(source, names, raw, self.expects)
            texts = texts or one_of(source, names, plain, self.expects, required=True)
            labels = one_of(source, names, named, self.expects, required=True)
            files, contents = {TEXT: join(source, str(texts)), LABELS: join(source, str(labels))}, RowContents()
            parts.append(Part(split, str(texts), files, contents=contents))
            parts.append(Part(LABELS, str(texts), files, contents=replace(contents, derived=True)))
        return Inputs(self.name, tuple(parts), keyed=True)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with the columns TEXT and LABELS. Raises InputError if the files have different lengths."""
        readers = (lines.LineBlocks(part.files[role], block_rows) for role in (TEXT, LABELS))
        for texts, labels in zip_longest(*readers):
            if not texts or not labels or len(texts) != len(labels):
                places = " and ".join(part.files.values())
                raise InputError(f"{places}: expected the same number of lines. Do the files belong to the same split?")
            yield pa.record_batch({TEXT: texts["line"], LABELS: labels["line"]})

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        named = [line.split() for line in raw[LABELS].to_pylist()]
        offsets = pa.array(offsets_of(np.array([len(keys) for keys in named])), pa.int32())
        keys = pa.array(chain.from_iterable(named), pa.binary()).view(pa.string())  # checked when it is parsed
        columns = {TEXT: raw[TEXT].view(pa.large_string()), LABELS: pa.ListArray.from_arrays(offsets, keys)}
        shape = Shape(Fields(), text, features=False, labels=True, keyless=True)
        parsed = from_columns.parse_points(pa.record_batch(columns), first_row, part.name, shape)
        return labels_of(parsed) if part.contents.derived else parsed
