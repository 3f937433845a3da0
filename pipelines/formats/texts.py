"""Read batches of texts to embed or to predict labels for, from lines of text, JSON lines, CSV or Parquet."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipelines.formats import lines
from pipelines.formats.base import Part, RowContents, decode_column
from pipelines.formats.column_files import ARROW, CSV, PARQUET, check_columns
from pipelines.formats.keyed import JSONL, ROWS, Keyed, features_in, field_names, require_named_columns, vector_length
from pipelines.formats.names import OF_TEXTS, Fields, in_use, is_pattern, list_files, notes_on, say_names
from schemas import storage
from schemas.errors import InputError
from schemas.storage import join

STANDARD = "-"  # standard input
_NAMES = {"text": "input.txt", "jsonl": "input.jsonl", "csv": "input.csv"}  # names of a copy of standard input
_ENDS = {
    "text": r"\.(?:txt|text)(?:\.gz|\.bz2|\.xz|\.zst)?$",
    "jsonl": rf"\.{JSONL}$",
    "parquet": rf"\.{PARQUET}$",
    "csv": rf"\.{CSV}$",
    "arrow": rf"\.{ARROW}$",
}


@dataclass(frozen=True)
class Texts:
    """Rows from files in format `form` (None: from the file name). `title_only`: like `extremis shard --text title`.

    `fields`: names of the fields; None: those of `made_with` if a file has such texts, else the usual names.
    """

    source: str
    form: str | None = None
    fields: Fields | None = None
    title_only: bool = False
    made_with: Fields = field(default_factory=Fields)

    def batches(self, rows: int, features: bool, dense: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield up to `rows` rows at a time: `key`, `text` and, with `features`, `feature_ids` and `feature_values`.

        dense: length of the vectors in an additional column; 0: no vectors.

        Raises InputError at the first invalid row, if there are no rows, and if a file changes while it is read;
        StorageError.
        """
        if self.source == STANDARD:
            with tempfile.TemporaryDirectory(prefix="extremis-input-") as folder:
                yield from replace(self, source=_copy_of_standard_input(folder, self.form or "text")).batches(
                    rows, features, dense
                )
            return
        with lines.unchanged(self.places()):
            yield from self._read(rows, features, dense)

    def _read(self, rows: int, features: bool, dense: int) -> Iterator[pa.RecordBatch]:
        seen = 0
        for url, form in self.files():
            if form == "text" and (features or dense):
                read = "sparse features" if features else "vectors"
                raise InputError(
                    f"{url}: these are lines of text, but this encoder reads {read}. Give JSON lines or Parquet."
                )
            names = () if form == "text" else field_names(url)
            fields = self.fields or self.made_with.within(names)
            if form != "text" and self.fields:
                require_named_columns(url, fields, OF_TEXTS, Fields())
            keyless = fields.key not in names
            contents = RowContents(features, keys=not keyless, labels=False, dense=dense)
            blocks = self._read_lines(url, rows) if form == "text" else self._read_records(url, rows, contents, fields)
            for batch in blocks:
                if keyless:  # row numbers identify rows
                    numbers = pa.array(np.arange(seen, seen + batch.num_rows)).cast(pa.string())
                    batch = batch.set_column(0, "key", numbers)
                seen += batch.num_rows
                if batch.num_rows:
                    yield batch
        if not seen:
            raise InputError(f"{self.source}: the input has no rows.")

    def notes(self) -> Iterator[str]:
        """Yield lines to print about the files. Raises InputError like `files`."""
        yield from () if self.source == STANDARD else notes_on(self.source, self.places())

    def places(self) -> list[str]:
        """List the URLs of all files; for standard input, its file descriptor. Raises InputError like `files`."""
        return ["/dev/stdin"] if self.source == STANDARD else [url for url, _ in self.files()]

    def files(self) -> list[tuple[str, str]]:
        """List (URL, form) of all files by name. Raises InputError if there are no files or a format is unknown."""
        if storage.exists(self.source):
            return [(self.source, self._form_of(self.source))]
        root, names = list_files(self.source)
        wild = is_pattern(self.source)
        names = [name for name in names if not name.endswith("/")]
        kept = [name for name in names if wild or self.form or any(re.search(end, name) for end in _ENDS.values())]
        if not kept:
            raise InputError(
                f"{self.source}: no input here; found: {say_names(names)}. Expected a file, a folder or a pattern: "
                "text lines (.txt), JSON lines (.jsonl), CSV (.csv, .tsv), all of these also compressed, Parquet "
                "(.parquet) or Arrow (.arrow)."
            )
        urls = [join(root, name) for name in kept]
        return [(url, self._form_of(url)) for url in urls]

    def _form_of(self, url: str) -> str:
        form = self.form or next((form for form, end in _ENDS.items() if re.search(end, url)), None)
        if form is None:
            raise InputError(f"{url}: unknown file extension. Give the format with --form {'|'.join(_ENDS)}.")
        return form

    def _read_lines(self, url: str, rows: int) -> Iterator[pa.RecordBatch]:
        first = 0

        def refuse(row: int, byte: int) -> None:
            raise InputError(f"{url}, line {first + row + 1:,}: byte {byte} is not UTF-8. Save the file as UTF-8.")

        for block in lines.LineBlocks(url, rows):
            text = decode_column(block["line"], refuse)
            yield pa.record_batch({"key": pa.nulls(len(block), pa.string()), "text": text})
            first += len(block)

    def _read_records(self, url: str, rows: int, contents: RowContents, fields: Fields) -> Iterator[pa.RecordBatch]:
        keyed = Keyed(fields)
        if not (contents.features or contents.dense):
            check_columns(url, in_use(*fields.texts))
        is_present = {fields.feature_ids: not contents.features or features_in([url], fields)}
        is_present[fields.vector] = not contents.dense or vector_length([url], fields) > 0
        for name in (name for name, present in is_present.items() if not present):
            raise InputError(
                f"{url}: no column {name}, which this encoder needs. Add the column, or give its name with --fields."
            )
        # As for a point with labels in pairs, only key, text, features and vector are read.
        part = Part("test", url, {ROWS: url}, contents=contents)
        first = 0
        for raw in keyed.read(part, rows):
            parsed = keyed.parse(raw, first, part, "title" if self.title_only else "title+content")
            if parsed.rejects:
                reject = parsed.rejects[0]
                raise InputError(f"{reject.file}, line {reject.line}: {reject.detail}. Fix the row, or leave it out.")
            first += raw.num_rows
            kept = ("key", "text", "feature_ids", "feature_values", "dense")
            yield parsed.batch.select([name for name in kept if name in parsed.batch.schema.names])


def _copy_of_standard_input(folder: str, form: str) -> str:
    """Copy standard input to a file in `folder`, named after its format. Raises InputError for Parquet."""
    if form not in _NAMES:
        raise InputError(
            f"--form {form}: the format of standard input must be one of {', '.join(_NAMES)}. Give a file instead."
        )
    if sys.stdin is None:
        raise InputError("standard input is closed. Open it, or give a file.")
    path = Path(folder) / _NAMES[form]
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return str(path)
