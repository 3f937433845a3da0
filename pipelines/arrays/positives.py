"""Positives as pairs of a query and a document: CSV or TSV, Parquet, and qrels of TREC and BEIR.

A pair names its rows by key, or by number where rows have no keys. Keys and pairs are held as numbers, 64 bits each.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from pipelines.arrays.files import KEY, RowFiles
from pipelines.common.progress import Progress
from pipelines.formats import lines
from pipelines.formats.column_files import parquet_names, read_parquet
from pipelines.formats.names import listed
from pipelines.sharding.hashing import hash_strings
from schemas import storage
from schemas.errors import InputError
from schemas.ragged import Ragged
from schemas.storage import join

_BLOCK_ROWS = 1 << 16
# Usual names of the three columns, in the order of most tools.
_QUERIES = ("query", "query_key", "query-id", "query_id", "qid", "anchor")
_DOCUMENTS = ("document", "label_key", "label", "corpus-id", "corpus_id", "doc_id", "docid", "pid", "positive")
_SCORES = ("score", "relevance", "weight")
_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_ROW = r"^(0|[1-9]\d{0,17})$"


@dataclass(frozen=True)
class Keys:
    """Rows of `rows` by key: `hashes` uint64 [N] ascending, with the row of each in `order`; None: by number alone."""

    rows: RowFiles
    hashes: np.ndarray | None = None
    order: np.ndarray | None = None
    seed: int = 0

    @classmethod
    def of(cls, rows: RowFiles) -> "Keys":
        """Read all keys. Raises InputError that names a key's two rows where it is there twice."""
        if not rows.has(KEY):
            return cls(rows)
        for seed in range(8):  # equal hashes of different keys are possible
            parts = [hash_strings(part.column(KEY), seed) for part in rows.read(0, rows.rows, _BLOCK_ROWS, {KEY})]
            order = np.argsort(hashes := np.concatenate(parts), kind="stable")
            hashes = hashes[order]
            same = np.flatnonzero(hashes[1:] == hashes[:-1])
            for first, second in zip(order[same].tolist(), order[same + 1].tolist(), strict=True):
                a, b = (next(rows.read(row, row + 1, 1, {KEY})).column(KEY)[0].as_py() for row in (first, second))
                if a == b:
                    (file, row), (other, there) = rows.place(second), rows.place(first)
                    what = f"the key {a!r} is that of row {there:,} of {other.url}, too"
                    raise file.fault(row, what, "Give each row a key of its own.")
            if not same.size:
                break
        return cls(rows, hashes, order, seed)

    def find(self, named: pa.Array) -> np.ndarray:
        """Return the row of each of `named` [B] strings, int64; -1: there is none."""
        if self.hashes is None or self.order is None:
            is_row = pc.fill_null(pc.match_substring_regex(named, _ROW), False)
            found = pc.if_else(is_row, named, "-1").cast(pa.int64()).to_numpy(zero_copy_only=False)
            return np.where(found < self.rows.rows, found, -1)
        sought = hash_strings(named, self.seed)
        nearest = np.minimum(np.searchsorted(self.hashes, sought), len(self.hashes) - 1)
        return np.where(self.hashes[nearest] == sought, self.order[nearest], -1)

    def as_named_by(self, named: pa.Array) -> "Keys":
        """Return these, or the numbers of rows where no one of `named` is a key and all are such numbers."""
        numbers = Keys(self.rows)
        return numbers if (self.find(named) < 0).all() and (numbers.find(named) >= 0).all() else self


def read_positives(source: str, queries: Keys, documents: Keys, say: Progress) -> Ragged:
    """Return the documents of each query, ascending and each once: rows int64 of N lists.

    Pairs with a score of 0 or less are left out. Raises InputError: an unknown key, no pairs, or no such form.
    """
    stride, codes = documents.rows.rows, [np.empty(0, np.int64)]
    for url in files_of(source):
        count = left_out = 0
        sides = None
        for first, columns in _read_pairs(url, queries, documents):
            names = columns[:2]
            sides = sides or [keys.as_named_by(named) for keys, named in zip((queries, documents), names, strict=True)]
            rows = [keys.find(named) for keys, named in zip(sides, names, strict=True)]
            for what, found, named, keys in zip(("query", "document"), rows, names, sides, strict=True):
                if (wrong := np.flatnonzero(found < 0)).size:
                    by = f"key of {keys.rows.source}" if keys.hashes is not None else "number of one of its rows"
                    raise InputError(
                        f"{url}, row {first + int(wrong[0]):,}: {what} {named[int(wrong[0])].as_py()!r} is no {by}, "
                        f"which has {keys.rows.rows:,} rows. Take the pair out, or add the row."
                    )
            kept = _scores(url, first, columns[2]) > 0 if len(columns) > 2 else np.ones(len(rows[0]), bool)
            count, left_out = count + len(kept), left_out + int((~kept).sum())
            codes.append((rows[0] * stride + rows[1])[kept])
        if not count:
            raise InputError(f"{url}: no pairs of a query and a document here. Is the path right?")
        by = " and ".join("number" if keys.hashes is None else "key" for keys in sides or ())
        say(f"{url}: {count:,} pairs by {by}" + (f", {left_out:,} with a score of 0 or less left out" * bool(left_out)))
    pairs = np.unique(np.concatenate(codes))
    return Ragged.from_counts(pairs % stride, np.bincount(pairs // stride, minlength=queries.rows.rows))


def files_of(source: str) -> list[str]:
    """List the files of pairs at `source`: a file, or all of a folder, sorted by name."""
    return [source] if storage.exists(source) else [join(source, name) for name in storage.list_names(source)]


def _read_pairs(url: str, queries: Keys, documents: Keys) -> Iterator[tuple[int, list[pa.Array]]]:
    """Yield (first row, columns of strings: query, document, and a score where there is one)."""
    row = 0
    if url.endswith(".parquet"):
        chosen = _choose(url, parquet_names(url))
        for batch in read_parquet(url, _BLOCK_ROWS, chosen):
            yield row, [batch.column(name).cast(pa.string()) for name in chosen]
            row += batch.num_rows
        return
    line = lines.first_line(url).decode(errors="replace")
    delimiter = next((mark for mark in "\t,;" if mark in line), " ")
    fields = next(csv.reader([line], delimiter=delimiter), [])
    named = [pa.array([name]) for name in fields[:2]]
    has_header = len(named) == 2 and not any(
        (keys.as_named_by(name).find(name) >= 0).any() for keys, name in zip((queries, documents), named, strict=True)
    )
    names = fields if has_header else [str(number) for number in range(len(fields))]
    chosen = _choose(url, names)
    reading = pc_csv.ReadOptions(column_names=names, skip_rows=int(has_header), use_threads=False)
    parsing = pc_csv.ParseOptions(delimiter=delimiter)
    as_text = pc_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=chosen)
    with lines.open_file(url) as file:
        try:
            for batch in pc_csv.open_csv(file, reading, parsing, as_text):
                yield row + 1 + int(has_header), batch.columns
                row += batch.num_rows
        except pa.ArrowException as error:
            raise InputError(f"{url}: {str(error)[:200]}. Expected {_EXPECTED}.") from None


_EXPECTED = "a query, a document and maybe a score in each row, or TREC's four columns"


def _choose(url: str, names: Sequence[str]) -> list[str]:
    """Return the columns of query, document and score: by their usual names, or else by their places."""
    usual = [next((name for name in names if name.lower() in some), "") for some in (_QUERIES, _DOCUMENTS, _SCORES)]
    if usual[0] and usual[1]:
        return [name for name in usual if name]
    if not 2 <= len(names) <= 4:
        raise InputError(f"{url}: columns {listed(names)}. Expected {_EXPECTED}.")
    return [names[0], *names[2:]] if len(names) == 4 else list(names)


def _scores(url: str, first: int, column: pa.Array) -> np.ndarray:
    good = pc.fill_null(pc.match_substring_regex(column, _NUMBER), False).to_numpy(zero_copy_only=False)
    if (wrong := np.flatnonzero(~good)).size:
        raise InputError(
            f"{url}, row {first + int(wrong[0]):,}: the score {column[int(wrong[0])].as_py()!r} is no number. "
            f"Expected {_EXPECTED}."
        )
    return pc.utf8_trim_whitespace(column).cast(pa.float64()).to_numpy()
