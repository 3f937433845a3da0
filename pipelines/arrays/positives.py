"""Read positives, which are (query, document) pairs, from CSV, TSV, Parquet, or qrels in TREC or BEIR format.

A pair refers to rows by key, or by row number if the values in a file are not keys. In memory, keys and pairs are
stored as 64-bit numbers.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from pipelines.arrays.files import KEY, RowFiles
from pipelines.common.progress import Progress
from pipelines.formats import lines
from pipelines.formats.column_files import column_names, read_parquet
from pipelines.formats.names import say_names
from schemas import storage
from schemas.errors import InputError
from schemas.hashing import hash_strings
from schemas.ragged import Ragged
from schemas.storage import join

_BLOCK_ROWS = 1 << 16
# Usual column names of a query, a document and a score.
_USUAL = (
    ("query", "query_key", "query-id", "query_id", "qid", "anchor"),
    ("document", "label_key", "label", "corpus-id", "corpus_id", "doc_id", "docid", "pid", "positive"),
    ("score", "relevance", "weight"),
)
_EXPECTED = "Expected a query, a document and optionally a score in each row, or TREC's four columns."
_NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
_ROW = r"^(0|[1-9]\d{0,17})$"


@dataclass(frozen=True)
class KeyLookup:
    """Look-up of rows by key hash or row number: sorted `hashes` uint64 [N], and the row `order` int64 [N] of each."""

    files: RowFiles
    hashes: np.ndarray | None = None
    order: np.ndarray | None = None
    seed: int = 0

    @classmethod
    def of(cls, files: RowFiles, seed: int = 0) -> "KeyLookup":
        """Read all keys if the files contain keys. If a key is repeated, raises InputError that names both rows."""
        if not files.has(KEY):
            return cls(files)
        parts = [hash_strings(rows.column(KEY), seed) for rows in files.read(0, files.rows, _BLOCK_ROWS, {KEY})]
        order = np.argsort(hashes := np.concatenate(parts), kind="stable")
        hashes = hashes[order]
        for place in np.flatnonzero(hashes[1:] == hashes[:-1])[:1]:
            rows = order[place : place + 2].tolist()
            a, b = (next(files.read(row, row + 1, 1, {KEY})).column(KEY)[0].as_py() for row in rows)
            if a != b:  # different keys with the same hash
                return cls.of(files, seed + 1)
            (other, there), (file, row) = map(files.locate, rows)
            raise file.fault(
                row, f"the key {a!r} is also the key of row {there:,} of {other.url}. Give each row a unique key."
            )
        return cls(files, hashes, order, seed)

    def find(self, named: pa.Array) -> np.ndarray:
        """Return the row of each string in `named` [B], int64; -1 for an unknown string."""
        if self.hashes is None or self.order is None:
            is_row = pc.fill_null(pc.match_substring_regex(named, _ROW), False)
            rows = pc.if_else(is_row, named, "-1").cast(pa.int64()).to_numpy(zero_copy_only=False)
            return np.where(rows < self.files.rows, rows, -1)
        sought = hash_strings(named, self.seed)
        nearest = np.minimum(np.searchsorted(self.hashes, sought), len(self.hashes) - 1)
        return np.where(self.hashes[nearest] == sought, self.order[nearest], -1)

    def for_names(self, named: pa.Array) -> "KeyLookup":
        """Return this look-up, or a look-up by row number if the strings in `named` are row numbers instead of keys."""
        numbers = replace(self, hashes=None)
        return numbers if (self.find(named) < 0).all() and (numbers.find(named) >= 0).all() else self


def read_positives(source: str, queries: KeyLookup, documents: KeyLookup, say: Progress) -> Ragged:
    """Return the positive documents of each query as N lists of row numbers (int64), sorted and without duplicates.

    Pairs with a score of 0 or less are ignored. Raises InputError if a key or format is unknown, or a file has no
    pairs.
    """
    stride, codes = documents.files.rows, [np.empty(0, np.int64)]
    for url in list_pair_files(source):
        count, sides = 0, [queries, documents]
        for first, columns in _read_pairs(url, queries, documents):
            if not count:
                sides = [keys.for_names(named) for keys, named in zip(sides, columns, strict=False)]
            rows = [keys.find(named) for keys, named in zip(sides, columns, strict=False)]
            for what, found, named, keys in zip(("query", "document"), rows, columns, sides, strict=False):
                for row in np.flatnonzero(found < 0)[:1].tolist():
                    among = "the keys" if keys.hashes is not None else f"the {keys.files.rows:,} rows"
                    raise InputError(
                        f"{url}, row {first + row:,}: the {what} {named[row].as_py()!r} is not among {among} of "
                        f"{keys.files.source}. Remove the pair, or add the row."
                    )
            good = _scores(url, first, columns[2]) > 0 if len(columns) > 2 else slice(None)
            codes.append((rows[0] * stride + rows[1])[good])
            count += len(rows[0])
        if not count:
            raise InputError(f"{url}: contains no pairs. {_EXPECTED}")
        by = " and ".join("row number" if keys.hashes is None else "key" for keys in sides)
        say(f"{url}: {count:,} pairs, identified by {by}")
    pairs = np.unique(np.concatenate(codes))
    say(f"{source}: {len(pairs):,} distinct pairs with a score above 0, or without a score")
    return Ragged.from_counts(pairs % stride, np.bincount(pairs // stride, minlength=queries.files.rows))


def list_pair_files(source: str) -> list[str]:
    """List the files of pairs at `source`: the file, or all files in the folder, sorted by name."""
    return [join(source, name) for name in storage.list_names(source)] or [source]


def _read_pairs(url: str, queries: KeyLookup, documents: KeyLookup) -> Iterator[tuple[int, list[pa.Array]]]:
    """Yield (first row, string columns); the columns are query, document and, if the file contains scores, score."""
    if url.endswith(".parquet"):
        row, chosen = 0, _choose(url, column_names(url) or [])
        for batch in read_parquet(url, _BLOCK_ROWS, chosen):
            yield row, [batch.column(name).cast(pa.string()) for name in chosen]
            row += batch.num_rows
        return
    line = lines.first_line(url).decode(errors="replace")
    delimiter = next((mark for mark in "\t,;" if mark in line), " ")
    names = next(csv.reader([line], delimiter=delimiter), [])
    pair = zip((queries, documents), ([pa.array([name]) for name in names]), strict=False)
    is_header = all((keys.for_names(name).find(name) < 0).all() for keys, name in pair)
    names = names if is_header else [str(number) for number in range(len(names))]
    row, chosen = 1 + is_header, _choose(url, names)
    options = (
        arrow_csv.ReadOptions(column_names=names, skip_rows=int(is_header), use_threads=False),
        arrow_csv.ParseOptions(delimiter=delimiter),
        arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=chosen),
    )
    with lines.open_file(url) as file:
        try:
            for batch in arrow_csv.open_csv(file, *options):
                yield row, batch.columns
                row += batch.num_rows
        except pa.ArrowException as error:
            raise InputError(f"{url}: {' '.join(str(error).split())[:200]}. {_EXPECTED}") from None


def _choose(url: str, names: Sequence[str]) -> list[str]:
    """Return the names of the query, document and score columns, identified by their usual names or by position."""
    usual = [next((name for name in names if name.lower() in some), "") for some in _USUAL]
    if usual[0] and usual[1]:
        return [name for name in usual if name]
    if not 2 <= len(names) <= 4:
        raise InputError(f"{url}: unexpected columns: {say_names(names)}. {_EXPECTED}")
    return [names[0], *names[-2:]] if len(names) == 4 else list(names)


def _scores(url: str, first: int, column: pa.Array) -> np.ndarray:
    column = pc.utf8_trim_whitespace(column)
    good = pc.fill_null(pc.match_substring_regex(column, _NUMBER), False)
    for row in np.flatnonzero(~good.to_numpy(zero_copy_only=False))[:1].tolist():
        raise InputError(f"{url}, row {first + row:,}: the score {column[row].as_py()!r} is not a number. {_EXPECTED}")
    return column.cast(pa.float64()).to_numpy()
