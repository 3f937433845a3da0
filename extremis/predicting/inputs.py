"""Texts to predict labels for: lines of text, JSON lines or Parquet, in batches."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelines.formats import keyed_parquet, lines
from pipelines.formats.base import Part
from pipelines.formats.fields import Fields
from pipelines.formats.keyed import FEATURES, JSONL, PAIRED, PARQUET, PLAIN, Keyed, features_in
from pipelines.formats.names import listed, listing
from schemas import storage
from schemas.errors import InputError
from schemas.storage import join

_ENDS = {"text": r"\.(?:txt|text)(?:\.gz|\.bz2|\.xz|\.zst)?$", "jsonl": rf"\.{JSONL}$", "parquet": rf"\.{PARQUET}$"}


@dataclass(frozen=True)
class Texts:
    """Rows from files. `form` None: by their names; `title_only` as in `extremis shard --text title`."""

    source: str
    form: str | None = None
    fields: Fields = field(default_factory=Fields)
    title_only: bool = False

    def batches(self, rows: int, features: bool) -> Iterator[pa.RecordBatch]:
        """Yield `key`, `text`, and with `features` `feature_ids` and `feature_values`, up to `rows` rows at a time.

        Raises InputError at the first wrong row, and where there is no row at all; StorageError.
        """
        seen = 0
        for url, form in self.files():
            if form == "text" and features:
                raise InputError(
                    f"{url}: lines of text, but this encoder reads sparse features. Give JSON lines or Parquet."
                )
            batches = self._read_lines(url, rows, seen) if form == "text" else self._read_records(url, rows, features)
            for batch in batches:
                seen += batch.num_rows
                if batch.num_rows:
                    yield batch
        if not seen:
            raise InputError(f"{self.source}: nothing to predict for: no row in it.")

    def files(self) -> list[tuple[str, str]]:
        """List (URL, form) of every file, by name. Raises InputError: none there, or one of unknown form."""
        urls = [self.source] if storage.exists(self.source) else self._list()
        return [(url, self.form or self._form_of(url)) for url in urls]

    def _list(self) -> list[str]:
        root, names = listing(self.source)
        wild = "*" in self.source or "?" in self.source
        kept = [name for name in names if wild or self.form or any(re.search(end, name) for end in _ENDS.values())]
        if not kept:
            raise InputError(
                f"{self.source}: no input here; found: {listed(names)}. Expected a file, a folder or a pattern of "
                "text lines (.txt), JSON lines (.jsonl) or Parquet (.parquet), any but the last also compressed."
            )
        return [join(root, name) for name in kept]

    def _form_of(self, url: str) -> str:
        for form, end in _ENDS.items():
            if re.search(end, url):
                return form
        raise InputError(f"{url}: its name does not say what it holds. Say so with --form {'|'.join(_ENDS)}.")

    def _read_lines(self, url: str, rows: int, seen: int) -> Iterator[pa.RecordBatch]:
        for block in lines.read_blocks(url, rows):
            try:
                text = block["line"].cast(pa.large_string()).cast(pa.string())
            except pa.ArrowInvalid:
                raise InputError(
                    f"{url}: a line between {seen + 1:,} and {seen + len(block):,} is not UTF-8."
                ) from None
            yield pa.record_batch({"key": pa.array(np.arange(seen, seen + len(block))).cast(pa.string()), "text": text})
            seen += len(block)

    def _read_records(self, url: str, rows: int, features: bool) -> Iterator[pa.RecordBatch]:
        keyed = Keyed(self.fields)
        if url.endswith(f".{PARQUET}"):
            keyed_parquet.check_columns(url, [self.fields.key])
        if features and not features_in([url], self.fields):
            raise InputError(
                f"{url}: no {self.fields.feature_ids}, which this encoder reads. Add them, or see --fields."
            )
        # As a point whose labels are elsewhere: only key, text and features are read.
        part = Part("test", url, {(FEATURES if features else PLAIN) + PAIRED: url})
        first = 0
        for raw in keyed.read(part, rows):
            parsed = keyed.parse(raw, first, part, "title" if self.title_only else "title+content")
            if parsed.rejects:
                reject = parsed.rejects[0]
                raise InputError(f"{reject.file}, line {reject.line}: {reject.detail}. Fix it, or leave the row out.")
            first += raw.num_rows
            kept = [
                name for name in ("key", "text", "feature_ids", "feature_values") if name in parsed.batch.schema.names
            ]
            yield parsed.batch.select(kept)
