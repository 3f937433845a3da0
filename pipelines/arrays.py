"""Tables of negatives for anyone's vectors and pairs."""

import contextlib
import csv
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from pipelines.flow import FileExchange, Packet, receive
from pipelines.formats import base, xc
from pipelines.formats.base import is_pattern, list_files, parse_fields_by_table, say_names
from pipelines.formats.from_columns import check_names, column_names, open_parquet, read_parquet
from pipelines.job import Job, Summary, describe, make_table
from pipelines.mine import mine
from pipelines.options import ArrayOptions, default_row_group_rows, default_shards
from pipelines.progress import Meter, Progress, silent
from pipelines.runners.local import choose_runner, for_workers
from schemas import arrow, storage
from schemas.errors import InputError
from schemas.hashing import hash_strings
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, is_published, unpublish
from schemas.owners import Build, claimed, require_output_folder
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files.parquet import list_array, matrix_array, writing_shard
from schemas.storage import join
from schemas.table import Request, Table, find_reusable, rechunk

KEY, TEXT, VECTOR = "key", "text", "vector"
_SUFFIX = re.compile(r"\.(npy|safetensors|parquet|arrow|feather)$")
_STORED_TYPES = {"float16": "float16", "float32": "float32", "float64": "float32", "bfloat16": "float32"}
_TENSORS = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 100 << 20  # bytes; the safetensors library has the same limit
_FLOATS = "Write rows of float16 or float32, as numpy.save(path, array.astype('float32')) does."

BatchOffsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class ColumnNames:
    """Column names of the fields. `vector` is also the name of a tensor; if `vector` is empty, no vectors are read."""

    key: str = KEY
    text: str = TEXT
    vector: str = VECTOR


@dataclass(frozen=True)
class RowFile:
    """File with `rows` rows. `columns` maps each field that the file contains (key, text, vector) to its column name.

    `names` lists all columns. `dtype` and `dimension` describe the vectors. `offsets` lists (first row, byte offset) of
    a matrix, or of each Arrow batch.
    """

    url: str
    rows: int
    columns: Mapping[str, str]
    dtype: str
    dimension: int
    offsets: BatchOffsets = ()
    names: tuple[str, ...] = ()  # empty for a matrix
    order: Literal["<", ">"] = "<"  # byte order

    def read(self, start: int, stop: int, step: int, wanted: Collection[str], cosine: bool) -> Iterator[pa.Table]:
        """Validate and yield the fields `wanted` of rows [start, stop) in stored types, up to `step` rows at a time."""
        columns = {role: name for role, name in self.columns.items() if role in wanted}
        for first, rows in (self._batches if self.names else self._matrices)(start, stop, step, [*columns.values()]):
            yield pa.table({role: self._column(role, first, rows[name], cosine) for role, name in columns.items()})

    def fault(self, row: int, what: str) -> InputError:
        """Return an error that names row `row` of the file."""
        return InputError(f"{self.url}, row {row:,}: {what}")

    def _matrices(self, start: int, stop: int, step: int, columns: list[str]) -> Iterator[tuple[int, Any]]:
        wide = self.dtype == "bfloat16"
        kind = np.dtype("uint16" if wide else self.dtype).newbyteorder(self.order)
        place, size = self.offsets[0][1], kind.itemsize * self.dimension
        for low in range(start, stop, step):
            data = storage.read_range(self.url, place + low * size, place + min(low + step, stop) * size)
            x = np.frombuffer(data, kind).reshape(-1, self.dimension)
            yield low, {VECTOR: (x.astype(np.uint32) << 16).view(np.float32) if wide else x}

    def _batches(self, start: int, stop: int, step: int, columns: list[str]) -> Iterator[tuple[int, Any]]:
        parquet = self.url.endswith(".parquet")
        for first, batch in self._parquet(start, stop, step, columns) if parquet else self._arrow(start, stop):
            for low in range(max(start, first), min(stop, first + batch.num_rows), step):
                yield low, batch.slice(low - first, min(step, stop - low))

    def _parquet(self, start: int, stop: int, step: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        with open_parquet(self.url, buffer_size=storage.READ_BYTES) as file:
            rows = offsets_of(np.array([file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]))
            for group in np.flatnonzero((rows[:-1] < stop) & (rows[1:] > start)).tolist():
                first = int(rows[group])
                for batch in file.iter_batches(step, row_groups=[group], columns=columns, use_threads=False):
                    yield first, batch
                    first += batch.num_rows

    def _arrow(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        with base.open_file(self.url) as stream:
            schema = _open_stream(stream)
            for (first, place), (end, _) in itertools.pairwise([*self.offsets, (self.rows, 0)]):
                if first < stop and end > start:
                    stream.seek(place)
                    yield first, _next_batch(stream, schema)

    def _column(self, role: str, first: int, values: Any, cosine: bool) -> pa.Array:
        """Return `values`, which start at row `first`, as a table column. Raises InputError naming an invalid row."""
        if role == VECTOR:
            return self._vectors(
                first, values if isinstance(values, np.ndarray) else self._matrix(first, values), cosine
            )
        plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        is_text = pa.types.is_string(plain.type) or pa.types.is_large_string(plain.type)
        if not (is_text or pa.types.is_string_view(plain.type) or pa.types.is_integer(plain.type)):
            raise InputError(f"{self.url}: the {role}s have the type {plain.type}. Write strings or whole numbers.")
        if role == KEY and plain.null_count:
            raise self.fault(first + plain.is_null().index(True).as_py(), "no key. Give every row a key.")
        return plain.cast(pa.string()).fill_null("")

    def _matrix(self, first: int, lists: pa.Array) -> np.ndarray:
        sizes = pc.list_value_length(lists).fill_null(-1).to_numpy()
        for row in np.flatnonzero(sizes != self.dimension)[:1]:
            had = f"a vector of {sizes[row]:,} numbers" if sizes[row] >= 0 else "no vector"
            raise self.fault(first + row, f"{had}, expected {self.dimension:,} numbers as in the other rows.")
        return lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.dimension)

    def _vectors(self, first: int, x: np.ndarray, cosine: bool) -> pa.Array:
        stored = np.dtype(_STORED_TYPES[self.dtype])
        with np.errstate(over="ignore"):
            kept = x.astype(stored)
        for row in np.flatnonzero(~np.isfinite(kept).all(axis=1))[:1]:
            what = f"the vector contains a number that is not finite in {stored} (NaN, infinite or too large)"
            raise self.fault(first + row, f"{what}. Embed the row again, or leave the row out.")
        if cosine:
            x = x.astype(np.float64)
            norms = np.sqrt((x * x).sum(axis=1, keepdims=True))
            for row in np.flatnonzero(norms == 0)[:1]:
                raise self.fault(first + row, "the vector is all zeros, so it has no cosine. Leave the row out.")
            kept = (x / norms).astype(stored)
        return matrix_array(kept, pa.from_numpy_dtype(stored))


@dataclass(frozen=True)
class RowFiles:
    """Files at `source` with the same columns, dtype and dimension. Row numbers continue from file to file."""

    source: str
    files: tuple[RowFile, ...]

    @cached_property
    def first(self) -> np.ndarray:
        """Number of the first row of each file, followed by N."""
        return offsets_of(np.array([file.rows for file in self.files]))

    @property
    def rows(self) -> int:
        """Number of rows N."""
        return int(self.first[-1])

    @property
    def dimension(self) -> int:
        """Dimension D of the vectors."""
        return self.files[0].dimension

    @property
    def stored(self) -> str:
        """Number type of the vectors in tables: float16 remains float16, and all other types become float32."""
        return _STORED_TYPES[self.files[0].dtype]

    def has(self, role: str) -> bool:
        """Return whether the files have the field `role`."""
        return role in self.files[0].columns

    def read(
        self, start: int, stop: int, step: int, wanted: Collection[str], cosine: bool = False
    ) -> Iterator[pa.Table]:
        """Yield rows [start, stop) in tables of exactly `step` rows (the last may be shorter)."""
        parts = (
            file.read(max(0, start - low), min(file.rows, stop - low), step, wanted, cosine)
            for file, low in zip(self.files, self.first.tolist(), strict=False)
            if low < stop and low + file.rows > start
        )
        return rechunk(itertools.chain.from_iterable(parts), step)

    def locate(self, row: int) -> tuple[RowFile, int]:
        """Return the file that contains row `row`, and the row's number in that file."""
        number = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.files[number], row - int(self.first[number])


def urls_of(source: str) -> list[str]:
    """List the vector files at `source` (a file, a prefix, or a pattern), which are recognised by their extensions."""
    wild = is_pattern(source)
    root, names = list_files(source) if wild else (source, storage.list_names(source))
    urls = [join(root, name) for name in names if _SUFFIX.search(name) and name[0] not in "._"]
    return urls or [source] * bool(_SUFFIX.search(source) and not wild)


def open_files(source: str, names: ColumnNames) -> RowFiles:
    """Open the files at `source`, which contain vectors, keys and texts, or only keys and texts.

    Raises InputError if there are no files, a format is unknown or damaged, or dimensions, dtypes or columns differ.
    """
    urls = urls_of(source)
    if not urls:
        found = "a file of another format" if storage.exists(source) else say_names(storage.list_names(source))
        raise InputError(
            f"{source}: no vectors here; found: {found}. Expected a file that ends in .npy, .safetensors, .parquet, "
            ".arrow or .feather, or a folder of such files."
        )
    with ThreadPoolExecutor() as pool:
        files = tuple(file for file in pool.map(lambda url: _open(url, names), urls) if file.rows)
    if not files:
        raise InputError(f"{source}: the files contain no rows. Is the path right?")
    for file, what in itertools.product(files, ("dimension", "dtype", "columns")):
        of_first, own = getattr(files[0], what), getattr(file, what)
        if own != of_first:
            own, of_first = (", ".join(each) if what == "columns" else each for each in (own, of_first))
            raise InputError(
                f"{file.url}: {what} {own}, but {of_first} in {files[0].url}. Write all files with the same columns "
                "and types."
            )
    return RowFiles(source, files)


def _open(url: str, names: ColumnNames) -> RowFile:
    """Open one file. Raises InputError if the format does not match the file name, or if fields are missing."""
    form = url.rpartition(".")[2]
    try:
        if form == "parquet":
            with open_parquet(url, buffer_size=storage.READ_BYTES) as file:
                batch = next(file.iter_batches(1), None)
                return _of_columns(url, file.schema_arrow, file.metadata.num_rows, batch, names)
        with base.open_file(url) as stream:
            if form in ("arrow", "feather"):
                return _open_arrow(url, stream, names)
            if not names.vector:
                raise InputError(
                    f"{url}: this format has no columns for keys and texts. Write keys and texts as Parquet or Arrow."
                )
            return _open_npy(url, stream) if form == "npy" else _open_safetensors(url, stream, names)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{url}: not a .{form} file, or damaged: {reason}. Write the file again.") from None


def _open_npy(url: str, stream: IO[bytes]) -> RowFile:
    dtype, shape, by_column = xc.read_header(stream)
    if dtype.hasobject:
        raise InputError(f"{url}: an array of Python objects; Extremis does not unpickle objects. {_FLOATS}")
    if by_column and len(shape) == 2 and min(shape) > 1:
        raise InputError(f"{url}: the array is stored column by column. Save numpy.ascontiguousarray(array) instead.")
    return _of_matrix(url, shape, dtype.name, stream.tell(), dtype.newbyteorder("<").str == dtype.str)


def _open_safetensors(url: str, stream: IO[bytes], names: ColumnNames) -> RowFile:
    size = int.from_bytes(stream.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size:,} bytes")
    header = json.loads(stream.read(size))
    tensors = {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items() if name != "__metadata__"}
    fitting = [name for name, (dtype, shape) in tensors.items() if dtype in _TENSORS and len(shape) == 2]
    name = fitting[0] if len(fitting) == 1 and names.vector not in tensors else names.vector
    if name not in fitting:
        found = say_names([f"{each} ({dtype} {list(shape)})" for each, (dtype, shape) in tensors.items()])
        raise InputError(
            f"{url}: no tensor {name!r} [N, D] of floats; found: {found}. Give the name with --fields vector=NAME."
        )
    dtype, shape = tensors[name]
    return _of_matrix(url, shape, _TENSORS[dtype], 8 + size + int(header[name]["data_offsets"][0]), True)


def _of_matrix(url: str, shape: tuple[int, ...], dtype: str, place: int, little: bool) -> RowFile:
    if dtype not in _STORED_TYPES or len(shape) != 2 or shape[1] < 1:
        raise InputError(f"{url}: expected rows of numbers [N, D], got an array of {dtype} {list(shape)}. {_FLOATS}")
    item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if storage.size(url) < place + shape[0] * shape[1] * item:
        raise ValueError(f"too short for {shape[0]:,} × {shape[1]:,} numbers")
    return RowFile(url, shape[0], {VECTOR: VECTOR}, dtype, shape[1], [(0, place)], order="<" if little else ">")


def _open_arrow(url: str, stream: IO[bytes], names: ColumnNames) -> RowFile:
    """Find the offsets of the record batches in an Arrow file with a footer, or in a stream as saved by `datasets`."""
    schema, places, rows, some = _open_stream(stream), list[tuple[int, int]](), 0, None
    while True:
        place = stream.tell()
        try:
            batch = _next_batch(stream, schema)
        except EOFError:
            return _of_columns(url, schema, rows, some, names, places)
        places.append((rows, place))
        rows, some = rows + batch.num_rows, some or batch.slice(0, 1) or None


def _open_stream(stream: IO[bytes]) -> pa.Schema:
    stream.seek(8 if stream.read(6) == b"ARROW1" else 0)
    return pa.ipc.read_schema(pa.PythonFile(stream, mode="r"))


def _next_batch(stream: IO[bytes], schema: pa.Schema) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.ipc.read_message(pa.PythonFile(stream, mode="r")), schema)


def _of_columns(
    url: str, schema: pa.Schema, rows: int, some: pa.RecordBatch | None, names: ColumnNames, places: BatchOffsets = ()
) -> RowFile:
    """Describe a file with columns; `some` rows give the dimension. Raises InputError if no column contains vectors."""
    check_names(url, schema.names)
    columns = {role: name for role, name in vars(names).items() if name in schema.names and role != VECTOR}
    if not names.vector:
        return RowFile(url, rows, columns, "", 0, places, tuple(schema.names))
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    are_lists = {each.name: any(is_kind(each.type) for is_kind in lists) for each in schema}
    fitting = [each.name for each in schema if are_lists[each.name] and pa.types.is_floating(each.type.value_type)]
    name = fitting[0] if len(fitting) == 1 and names.vector not in schema.names else names.vector
    if name not in fitting:
        found = say_names([f"{each.name} ({each.type})" for each in schema])
        raise InputError(
            f"{url}: no column {name!r} with lists of floats; found: {found}. Give the name with --fields vector=NAME."
        )
    dimension = (some and pc.list_value_length(some.column(name))[0].as_py()) or 0
    if rows and not dimension:
        raise InputError(f"{url}, row 0: no vector. {_FLOATS}")
    dtype = np.dtype(schema.field(name).type.value_type.to_pandas_dtype()).name
    return RowFile(url, rows, {**columns, VECTOR: name}, dtype, dimension, places, tuple(schema.names))


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
    line = base.first_line(url).decode(errors="replace")
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
    with base.open_file(url) as file:
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


WIDTH = 50  # default of K
_GROUP_BYTES, _SHARD_BYTES = 8 << 20, 128 << 20  # size of the vectors; a text counts as _TEXT_BYTES
_TEXT_BYTES = 256
_STEP = "import vectors"
_REMEDY = "Give another --out, or --overwrite to replace OUT."


@dataclass(frozen=True)
class Side:
    """The queries, or the documents (named `labels`), with their files of vectors and their files of keys and texts.

    `label_count` is the number of labels. Under OUT, the rows are stored in `table`, and the vectors in `embeddings`,
    which is cut like the `existing` table of a data set, if there is one.
    """

    name: str
    label_count: int
    vectors: RowFiles
    text_files: RowFiles | None
    existing: Table | None = None
    same_key: bool = False  # a document with the key of a query is the query's filter pair, unless it is a positive

    @property
    def table(self) -> str:
        return "data/labels" if self.name == "labels" else "data/queries/train"

    @property
    def embeddings(self) -> str:
        return f"embeddings/{self.name}"

    @property
    def keyed(self) -> RowFiles:
        """Files that contain the keys and texts: `text_files` if given, otherwise the vector files."""
        return self.text_files or self.vectors

    @property
    def schemas(self) -> tuple[pa.Schema, pa.Schema]:
        """Schemas of the table of rows and of the table of vectors."""
        shape = self.vectors.dimension, self.vectors.stored
        if self.name == "labels":
            types = {"label_id": pa.int64(), KEY: pa.string(), TEXT: pa.string(), "frequency": pa.int64()}
            return arrow.without_nulls(types), arrow.vectors(*shape)
        types = {"query_id": pa.int64(), KEY: pa.string(), "label_ids": pa.list_(arrow.label_type(self.label_count))}
        types |= {"filter_label_ids": types["label_ids"]} if self.same_key else {}
        types |= {TEXT: pa.string()} if self.keyed.has(TEXT) else {}
        return arrow.without_nulls(types), arrow.embeddings(*shape)

    @property
    def written(self) -> dict[str, pa.Schema]:
        """Tables to write, and their schemas."""
        rows, vectors = self.schemas
        return ({} if self.existing else {self.table: rows}) | {self.embeddings: vectors}

    @property
    def vector_bytes(self) -> int:
        return self.vectors.dimension * np.dtype(self.vectors.stored).itemsize

    @property
    def group_rows(self) -> int:
        """Number of rows per row group, chosen to limit the memory that a row group needs."""
        return max(1, min(default_row_group_rows(self.vectors.rows), _GROUP_BYTES // self.vector_bytes))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Row range [start, stop) of each shard; all new shards except the last consist of full row groups."""
        rows = self.vectors.rows
        if self.existing:
            return [*itertools.pairwise(offsets_of(np.array([entry.rows for entry in self.existing.shards])).tolist())]
        shards = default_shards(rows, rows * (self.vector_bytes + _TEXT_BYTES * self.keyed.has(TEXT)), _SHARD_BYTES)
        step = -(-rows // (shards * self.group_rows)) * self.group_rows
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def read(self, start: int, stop: int, cosine: bool) -> Iterator[dict[str, pa.Array]]:
        """Yield the columns of rows [start, stop), one row group at a time; without keys, row numbers are the keys."""
        keyed = self.keyed.read(start, stop, self.group_rows, {KEY, TEXT}) if self.text_files else None
        for rows in self.vectors.read(start, stop, self.group_rows, {KEY, TEXT, VECTOR}, cosine):
            ids = pa.array(np.arange(start, start + rows.num_rows))
            columns = {self.schemas[0].names[0]: ids, KEY: ids.cast(pa.string()), TEXT: pa.array([""] * len(ids))}
            for table in (rows, next(keyed)) if keyed else (rows,):
                columns |= dict(zip(table.column_names, table.columns, strict=True))
            yield columns
            start += rows.num_rows


@dataclass(frozen=True)
class ImportPlan:
    """Plan of one import. Workers write below `url`."""

    url: str
    sides: Sequence[Side]
    cosine: bool
    meter: Meter = field(default=Meter(), compare=False)


def mine_arrays(
    queries: str,
    documents: str,
    options: ArrayOptions,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Mine negatives from `documents` for each vector at `queries`. Returns the manifest of the table at OUT/queries.

    The vectors of queries [N, D] and documents [L, D] are float16, float32 or float64, or bfloat16 in safetensors. If
    `positives` is a data set, the vectors belong to the rows of its split `train` and to its labels. If OUT is already
    complete with the same content and options, it is returned; an interrupted run resumes. Readers never see an
    incomplete table. Raises InputError (invalid input, with file, row and remedy; OUT contains something else;
    invalid options), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    options, queries, documents = options.for_workers(place), place(queries), place(documents)
    if options.out is None:
        raise InputError("--out is missing: specify where to write the tables with --out URL.")
    out = options.out
    choose_runner(beam_options)  # refuses wrong options before anything is read
    require_output_folder(
        out, "mined", [queries, documents, options.query_texts, options.document_texts, options.positives]
    )
    existing = _open_data(options)
    names, of_labels = parse_fields_by_table(options.fields or "", ColumnNames())
    opened = (
        _open_job(queries, options.query_texts, names),
        _open_job(documents, options.document_texts, of_labels or names),
    )
    sides = [
        Side(name, opened[1][0].rows, *files, table, same_key=options.same_key == "filter")
        for name, files, table in zip(("queries", "labels"), opened, existing or (None, None), strict=True)
    ]
    if options.same_key == "filter" and (existing or not all(side.keyed.has(KEY) for side in sides)):
        where = "DATA has its own filter pairs" if existing else "both sides need keys, but one has only row numbers"
        raise InputError(f"--same-key filter: {where}. Leave the option out.")
    for side in sides:
        if side.existing and side.existing.rows != side.vectors.rows:
            raise InputError(
                f"{side.vectors.source}: {side.vectors.rows:,} vectors, but {side.existing.url} has "
                f"{side.existing.rows:,} rows. Give one vector for each row, in row order."
            )
    dimensions = [side.vectors.dimension for side in sides]
    if len({*dimensions}) > 1:
        raise InputError(
            f"{queries}: vectors of {dimensions[0]} dimensions, but the vectors in {documents} have {dimensions[1]}. "
            "Embed queries and documents with the same model."
        )
    stated: dict[str, Any] = {
        side.name: _identity([file.url for some in (side.vectors, side.text_files) if some for file in some.files])
        for side in sides
    }
    stated["positives"] = _identity(list_pair_files(options.positives)) if options.positives and not existing else None
    stated |= {f"rows_of_{side.name}": side.existing.digest for side in sides if side.existing}
    stated |= {"metric": options.metric or "inner", "fields": vars(names), "fields_of_labels": vars(of_labels or names)}
    stated |= {"same_key": "filter"} if options.same_key == "filter" else {}
    last, kind = (sides[1].embeddings, "vectors") if existing else ("data", "data")  # the last table of an import
    request = Request(kind, None, stated, section="arrays")

    def find() -> Manifest | None:
        if existing and is_published(join(out, "data")):  # OUT is from an import with pairs
            return None
        return find_reusable(join(out, last), request, _REMEDY, overwrite=options.overwrite)

    places = {name: join(out, side.embeddings) for name, side in zip(("queries", "vectors"), sides, strict=True)}
    mining = options.model_copy(update={**places, "width": options.width or WIDTH})
    # RUN is a folder without a run: nothing is read from it, and the tables go to OUT.
    data = options.positives if existing and options.positives else join(out, "data")
    go_on = functools.partial(mine, data, join(out, "embeddings"), None, mining, beam_options, say)
    if find() is not None:
        return go_on()
    with claimed(out, "mined", say):
        if find() is None:  # else the previous owner of the claim has imported the vectors
            _import(out, sides, stated, options, beam_options, say)
        return go_on()


def _open_data(options: ArrayOptions) -> tuple[Table, Table] | None:
    """Open the training queries and the labels of the data set `positives`; None if `positives` is not a data set.

    Raises InputError for texts in addition to the data set's texts; TableError.
    """
    data = options.positives
    if data is None or not (is_published(data) and Table.open(data).kind == "data"):
        return None
    for flag, texts in (("--query-texts", options.query_texts), ("--document-texts", options.document_texts)):
        if texts:
            raise InputError(f"{flag} {texts}: keys and texts come from {data}. Leave {flag} out.")
    layout = DataLayout(data)
    return Table.open(layout.queries("train"), "queries"), Table.open(layout.labels, "labels")


def _open_job(source: str, texts: str | None, names: ColumnNames) -> tuple[RowFiles, RowFiles | None]:
    """Open vectors, and separate files of keys and texts. Raises InputError if row counts or columns do not match."""
    vectors = open_files(source, names)
    beside = open_files(texts, replace(names, vector="")) if texts else None
    if beside and beside.rows != vectors.rows:
        raise InputError(
            f"{texts}: {beside.rows:,} rows, but {vectors.rows:,} vectors in {source}. Give one row for each vector."
        )
    found = beside or vectors
    for role in (KEY, TEXT):
        name = getattr(names, role)
        if name != role and not found.has(role):
            there = ", ".join(found.files[0].names) or "vectors alone"
            raise InputError(
                f"--fields {role}={name}: {found.source} has no such column; found: {there}. Fix the name."
            )
    return vectors, beside


def _identity(urls: Sequence[str]) -> dict[str, Any]:
    """Return the number of files, their total size and a digest; the result does not depend on the files' location."""
    with ThreadPoolExecutor() as pool:
        known = list(pool.map(base.identify, urls))
    digest = storage.sha256(json.dumps([sha256 for _, sha256 in known]).encode())
    return {"file": f"{len(urls)} file(s)", "bytes": sum(size for size, _ in known), "sha256": digest}


def _import(
    out: str,
    sides: Sequence[Side],
    stated: Mapping[str, Any],
    options: ArrayOptions,
    beam_options: Sequence[str],
    say: Progress,
) -> None:
    """Build the tables at OUT and publish them, with the data set last. Raises InputError, StorageError."""
    if is_published(join(out, "queries")) and not options.overwrite:
        raise InputError(f"{out}: contains hard negatives that were mined from different input. {_REMEDY}")
    for side in sides:
        has = [f"{role}s" for role in (KEY, TEXT) if side.keyed.has(role)] or ["row numbers as keys"]
        has = [f"the rows of {side.existing.url}"] if side.existing else has
        shape = f"{side.vectors.rows:,} × {side.vectors.dimension} {side.vectors.files[0].dtype}"
        say(f"{side.vectors.source}: {shape}, {' and '.join(has)}")

    def make(job: Job) -> Manifest:
        plan = ImportPlan(job.build.url, sides, options.metric == "cosine", job.watch.meter)
        columns = (
            _ids_by_shard(sides) if sides[0].existing else _pairs_by_shard(sides, _read_all_pairs(sides, options, say))
        )
        shards = FileExchange(join(job.watch.staging, "columns")).send(columns)
        summary = job.run_step(_STEP, sum(side.vectors.rows for side in sides), shards, import_rows, plan)
        for name in ("data", sides[1].embeddings):
            unpublish(join(out, name))
        for name in ("queries", "data", "embeddings"):
            storage.remove(join(out, name), recursive=True)
        return _publish(job.build, sides, summary, stated)

    urls = [file.url for side in sides for file in side.vectors.files]
    needs = {"vectors": sum(side.vectors.rows * side.vector_bytes for side in sides)}
    make_table(out, "mined", lambda: None, make, beam_options, say, needs=needs, urls=urls, reads=urls[:1])


def _read_all_pairs(sides: Sequence[Side], options: ArrayOptions, say: Progress) -> dict[str, Ragged]:
    """Read the columns of each query: its positives, none without `positives`, and filter pairs with `same_key`.

    Raises InputError for repeated keys, too.
    """
    queries, documents = (KeyLookup.of(side.keyed) for side in sides)
    pairs = Ragged.empty(sides[0].vectors.rows)
    if options.positives is not None:
        pairs = read_positives(options.positives, queries, documents, say)
    if options.same_key != "filter":
        return {"label_ids": pairs}
    keys = (rows.column(KEY) for rows in queries.files.read(0, pairs.rows, 1 << 16, {KEY}))
    own = np.concatenate([documents.find(some) for some in keys])
    is_filter = (own >= 0) & ~pairs.contains(own[:, None])[:, 0]
    say(f"{int(is_filter.sum()):,} queries have the key of a document, which is never their negative")
    return {"label_ids": pairs, "filter_label_ids": Ragged.from_counts(own[is_filter], is_filter.astype(np.int64))}


def _ids_by_shard(sides: Sequence[Side]) -> Iterator[tuple[tuple[int, int], pa.RecordBatch]]:
    """Yield ((side, shard), column) with the ids of the existing tables."""
    for number, side in enumerate(sides):
        assert side.existing is not None
        for shard in range(len(side.bounds)):
            name = side.existing.id_column
            ids = pa.concat_tables(side.existing.batches_of(shard, [name])).column(name).combine_chunks()
            yield (number, shard), pa.record_batch([ids], [name])


def _pairs_by_shard(
    sides: Sequence[Side], pairs: Mapping[str, Ragged]
) -> Iterator[tuple[tuple[int, int], pa.RecordBatch]]:
    """Yield ((side, shard), columns): each query's pairs, or how often each document is a positive."""
    labels = sides[1]
    kind = arrow.label_type(labels.label_count)
    for shard, (start, stop) in enumerate(sides[0].bounds):
        columns = {name: list_array(*rows.slice(start, stop), kind) for name, rows in pairs.items()}
        yield (0, shard), pa.record_batch(columns)
    frequency = np.bincount(pairs["label_ids"].entries, minlength=labels.label_count)
    for shard, (start, stop) in enumerate(labels.bounds):
        yield (1, shard), pa.record_batch([pa.array(frequency[start:stop], pa.int64())], ["frequency"])


def import_rows(element: tuple[tuple[int, int], Packet], plan: ImportPlan) -> Summary:
    """Write a shard of vectors, and of new rows. Raises InputError naming the file and row; StorageError."""
    (number, shard), packet = element
    plan.meter.start(_STEP)
    side = plan.sides[number]
    (start, stop), cut = side.bounds[shard], (shard, len(side.bounds))
    (more,) = receive([packet])
    group_rows = side.existing.manifest.group_rows(shard) if side.existing else side.group_rows
    done = 0
    with contextlib.ExitStack() as opened:
        files = {
            table: opened.enter_context(writing_shard(join(plan.url, table), *cut, schema, group_rows))
            for table, schema in side.written.items()
        }
        for columns in side.read(start, stop, plan.cosine):
            count = len(columns[KEY])
            columns |= dict(zip(more.schema.names, more.slice(done, count).columns, strict=True))
            for table, schema in side.written.items():
                files[table].write(pa.table([columns[name] for name in schema.names], schema=schema))
            done += count
            plan.meter.count(_STEP, count)
    plan.meter.count(_STEP, 0, sum(file.entry.bytes for file in files.values()))
    entries: dict[str, tuple[Shard, ...]] = {table: (file.entry,) for table, file in files.items()}
    mentions = {} if side.existing or side.name == "labels" else {"labels": len(more.column(0).flatten())}
    return Summary(entries, {side.table: Counter(rows_out=done, **mentions)})


def _publish(build: Build, sides: Sequence[Side], summary: Summary, stated: Mapping[str, Any]) -> Manifest:
    def put(side: Side, kind: str, path: str, parents: dict[str, str], **parameters: Any) -> Manifest:
        like = side.existing.manifest if side.existing else None
        group_rows, ids = (like.row_group_rows, like.id_range) if like else (side.group_rows, (0, side.vectors.rows))
        manifest = describe(Request(kind, parents, parameters), summary, side.written[path], group_rows, ids, path)
        return Build(join(build.out, path), join(build.url, path), build.claim).publish(manifest)

    digests = {}
    for side, kind in zip(sides, ("embeddings", "vectors"), strict=True):
        if side.existing:
            digest, more = side.existing.digest, {"arrays": dict(stated)}
        else:
            digest, more = put(side, side.name, side.table, {}, training_points=sides[0].vectors.rows).digest, {}
        vectors = put(side, kind, side.embeddings, {side.name: digest}, what=side.name, **more)
        digests[side.table.removeprefix("data/")] = digest
    if sides[0].existing:
        return vectors
    manifest = Manifest(kind="data", parents=digests, parameters={"options": {}, "arrays": dict(stated)})
    return Build(join(build.out, "data"), join(build.url, "data"), build.claim).publish(manifest)
