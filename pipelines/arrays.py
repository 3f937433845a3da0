"""Negatives for anyone's vectors and pairs: `mine_arrays` opens files of vectors as `mine` opens a dump.

The vectors are read where they lie (`RowFiles`, `ArrayTable`); keys, texts and pairs become the data set OUT/data.
"""

import csv
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from pipelines.flow import FileExchange, Packet, receive
from pipelines.formats import base, xc
from pipelines.formats.base import is_pattern, list_files, parse_fields_by_table, say_names
from pipelines.formats.from_columns import check_names, column_names, is_list, open_parquet, read_parquet
from pipelines.formats.from_lines import parse_numbers
from pipelines.job import Job, Summary, describe, make_table
from pipelines.mine import mine_inputs
from pipelines.mining.inputs import EmbeddedSource, MineInputs
from pipelines.options import ArrayOptions, default_row_group_rows, default_shards
from pipelines.progress import Meter, Progress, silent
from pipelines.runners.local import choose_runner, for_workers
from schemas import arrow, storage
from schemas.errors import InputError, option
from schemas.hashing import hash_strings
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, columns_of, is_published, unpublish
from schemas.owners import Build, claimed, require_output_folder
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files.parquet import list_array, matrix_array, writing_shard
from schemas.storage import join
from schemas.table import Request, Table, find_reusable

KEY, TEXT, VECTOR = "key", "text", "vector"
_SUFFIX = re.compile(r"\.(npy|safetensors|parquet|arrow|feather)$")
_STORED_TYPES = {"float16": "float16", "float32": "float32", "float64": "float32", "bfloat16": "float32"}
_TENSORS = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"}
_FLOATS = "Write rows of float16 or float32, as numpy.save(path, array.astype('float32')) does."


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
    offsets: Sequence[tuple[int, int]] = ()
    names: tuple[str, ...] = ()  # empty for a matrix
    order: Literal["<", ">"] = "<"  # byte order

    def read(self, start: int, stop: int, step: int, wanted: Collection[str], cosine: bool) -> Iterator[pa.Table]:
        """Validate and yield the fields `wanted` of rows [start, stop) in stored types, up to `step` rows at a time."""
        columns = {role: name for role, name in self.columns.items() if role in wanted}
        for first, rows in (self._batches if self.names else self._matrices)(start, stop, step, [*columns.values()]):
            yield pa.table({role: self._column(role, first, rows[name], cosine) for role, name in columns.items()})

    def fault(self, row: int, what: str) -> InputError:
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
            return self._vectors(first, values, cosine)
        plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        is_text = pa.types.is_string(plain.type) or pa.types.is_large_string(plain.type)
        if not (is_text or pa.types.is_string_view(plain.type) or pa.types.is_integer(plain.type)):
            raise InputError(f"{self.url}: the {role}s have the type {plain.type}. Write strings or whole numbers.")
        if role == KEY and plain.null_count:
            raise self.fault(first + plain.is_null().index(True).as_py(), "no key. Give every row a key.")
        return plain.cast(pa.string()).fill_null("")

    def _vectors(self, first: int, x: Any, cosine: bool) -> pa.Array:
        if not isinstance(x, np.ndarray):
            sizes = pc.list_value_length(x).fill_null(-1).to_numpy()
            for row in np.flatnonzero(sizes != self.dimension)[:1]:
                had = f"a vector of {sizes[row]:,} numbers" if sizes[row] >= 0 else "no vector"
                raise self.fault(first + row, f"{had}, expected {self.dimension:,} numbers as in the other rows.")
            x = x.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.dimension)
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
        return int(self.first[-1])

    @property
    def dimension(self) -> int:
        return self.files[0].dimension

    @property
    def urls(self) -> list[str]:
        return [file.url for file in self.files]

    @property
    def stored(self) -> str:
        """Number type of the vectors in tables: float16 remains float16, and all other types become float32."""
        return _STORED_TYPES[self.files[0].dtype]

    def has(self, role: str) -> bool:
        return role in self.files[0].columns

    def read(self, edges: Sequence[int], wanted: Collection[str], cosine: bool = False) -> Iterator[pa.Table]:
        """Yield the rows between each two of the ascending `edges` as one table. Raises InputError, StorageError."""
        start, stop, step = edges[0], edges[-1], int(np.diff(edges).max())
        parts = itertools.chain.from_iterable(
            file.read(max(0, start - low), min(file.rows, stop - low), step, wanted, cosine)
            for file, low in zip(self.files, self.first.tolist(), strict=False)
            if low < stop and low + file.rows > start
        )
        table: pa.Table | None = None
        for low, high in itertools.pairwise(edges):
            while table is None or table.num_rows < high - low:
                if (more := next(parts, None)) is None:
                    raise InputError(
                        f"{self.source}: rows have gone since the files were opened. Run the command again."
                    )
                table = more if table is None else pa.concat_tables([table, more])
            yield table.slice(0, high - low).combine_chunks()
            table = table.slice(high - low)

    def read_keys(self) -> Iterator[pa.Array]:
        """Yield the keys of all rows, some rows at a time."""
        for rows in self.read([*range(0, self.rows, _BLOCK_ROWS), self.rows], {KEY}):
            yield rows.column(KEY)

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
            if form == "safetensors":
                return _open_safetensors(url, stream, names)
            dtype, shape, by_column = xc.read_header(stream)
            if dtype.hasobject:
                raise InputError(f"{url}: an array of Python objects; Extremis does not unpickle objects. {_FLOATS}")
            if by_column and len(shape) == 2 and min(shape) > 1:
                raise InputError(
                    f"{url}: the array is stored column by column. Save numpy.ascontiguousarray(array) instead."
                )
            return _of_matrix(url, shape, dtype.name, stream.tell(), dtype.newbyteorder("<").str == dtype.str)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{url}: not a .{form} file, or damaged: {reason}. Write the file again.") from None


def _open_safetensors(url: str, stream: IO[bytes], names: ColumnNames) -> RowFile:
    size = int.from_bytes(stream.read(8), "little")
    if size > 100 << 20:  # the safetensors library has the same limit
        raise ValueError(f"a header of {size:,} bytes")
    header = json.loads(stream.read(size))
    tensors = {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items() if name != "__metadata__"}
    fitting = [name for name, (dtype, shape) in tensors.items() if dtype in _TENSORS and len(shape) == 2]
    name = fitting[0] if len(fitting) == 1 and names.vector not in tensors else names.vector
    if name not in fitting:
        found = say_names([f"{each} ({dtype} {list(shape)})" for each, (dtype, shape) in tensors.items()])
        raise InputError(
            f"{url}: no tensor {name!r} [N, D] of floats; found: {found}. Give {option('fields', {'vector': 'NAME'})}."
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
    url: str,
    schema: pa.Schema,
    rows: int,
    some: pa.RecordBatch | None,
    names: ColumnNames,
    places: Sequence[tuple[int, int]] = (),
) -> RowFile:
    """Describe a file with columns; `some` rows give the dimension. Raises InputError if no column contains vectors."""
    check_names(url, schema.names)
    columns = {role: name for role, name in vars(names).items() if name in schema.names and role != VECTOR}
    if not names.vector:
        return RowFile(url, rows, columns, "", 0, places, tuple(schema.names))
    fitting = [each.name for each in schema if is_list(each.type) and pa.types.is_floating(each.type.value_type)]
    name = fitting[0] if len(fitting) == 1 and names.vector not in schema.names else names.vector
    if name not in fitting:
        found = say_names([f"{each.name} ({each.type})" for each in schema])
        raise InputError(
            f"{url}: no column {name!r} of float lists; found: {found}. Give {option('fields', {'vector': 'NAME'})}."
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
        hashes = np.concatenate([hash_strings(keys, seed) for keys in files.read_keys()])
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        for place in np.flatnonzero(hashes[1:] == hashes[:-1])[:1]:
            rows = order[place : place + 2].tolist()
            a, b = (next(files.read([row, row + 1], {KEY})).column(KEY)[0].as_py() for row in rows)
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
            is_row = pc.fill_null(pc.match_substring_regex(named, r"^(0|[1-9]\d{0,17})$"), False)
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
    scores = parse_numbers(column.fill_null("").cast(pa.large_binary()))
    for row in np.flatnonzero(np.isnan(scores))[:1].tolist():
        raise InputError(f"{url}, row {first + row:,}: the score {column[row].as_py()!r} is not a number. {_EXPECTED}")
    return scores


@dataclass(frozen=True)
class ArrayTable(Table):
    """Vectors in files, read where they lie as if they were a table with the row groups of the rows beside them."""

    files: RowFiles
    cosine: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayTable, (self.url, self.manifest, self.files, self.cosine)

    def read_groups(
        self, numbers: Iterable[int], columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (first row, ids and vectors) of the row groups `numbers`; neighbouring groups are read together."""
        wanted = np.fromiter(numbers, np.int64)
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1) if len(wanted) else ():
            edges = self.groups.first[run[0] : run[-1] + 2].tolist()
            for first, rows in zip(edges, self.files.read(edges, {VECTOR}, self.cosine), strict=False):
                yield first, rows.add_column(0, self.columns[0], pa.array(np.arange(first, first + rows.num_rows)))

    def batches_of(self, shard: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the row groups of shard `shard`, ids and vectors."""
        for _, rows in self.read_groups(np.flatnonzero(self.groups.shard == shard).tolist()):
            yield rows

    def shard_url(self, shard: int) -> str:
        """Return the URL of the file that contains the first row of shard `shard`."""
        return self.files.locate(sum(entry.rows for entry in self.shards[:shard]))[0].url


WIDTH = 50  # default of K
_GROUP_BYTES, _SHARD_BYTES = 8 << 20, 128 << 20  # size of the vectors; a text counts as _TEXT_BYTES
_TEXT_BYTES = 256
_STEP = "import rows"


@dataclass(frozen=True)
class Side:
    """The queries, or the documents (named `labels`): files of vectors, and of keys and texts if these are separate."""

    name: str
    vectors: RowFiles
    texts: RowFiles | None

    @classmethod
    def open(cls, name: str, source: str, texts: str | None, columns: ColumnNames) -> "Side":
        """Open the files. Raises InputError if row counts or columns do not match."""
        vectors = open_files(source, columns)
        side = cls(name, vectors, open_files(texts, replace(columns, vector="")) if texts else None)
        found = side.keyed
        if found.rows != vectors.rows:
            raise InputError(
                f"{texts}: {found.rows:,} rows, but {vectors.rows:,} vectors in {source}. Give one row for each vector."
            )
        for role in (KEY, TEXT):
            column = getattr(columns, role)
            if not found.has(role) and (column != role or not found.files[0].columns):
                there = ", ".join(found.files[0].names) or "vectors alone"
                raise InputError(
                    f"{option('fields', {role: column})}: {found.source} has no such column; found: {there}."
                )
        return side

    @property
    def keyed(self) -> RowFiles:
        """Files that contain the keys and texts, if any do."""
        return self.texts or self.vectors

    @property
    def table(self) -> str:
        """Path of the table of rows, below OUT."""
        return "data/labels" if self.name == "labels" else "data/queries/train"

    @property
    def vector_bytes(self) -> int:
        return self.vectors.dimension * np.dtype(self.vectors.stored).itemsize

    @property
    def group_rows(self) -> int:
        """Number of rows per row group, chosen to limit the memory that a row group of vectors needs."""
        return max(1, min(default_row_group_rows(self.vectors.rows), _GROUP_BYTES // self.vector_bytes))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Row range [start, stop) of each shard; all shards except the last consist of full row groups."""
        rows = self.vectors.rows
        shards = default_shards(rows, rows * (self.vector_bytes + _TEXT_BYTES * self.keyed.has(TEXT)), _SHARD_BYTES)
        step = -(-rows // (shards * self.group_rows)) * self.group_rows
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def read(self, start: int, stop: int, cosine: bool) -> Iterator[dict[str, pa.Array]]:
        """Check the vectors of rows [start, stop), and yield their ids, keys and texts, one row group at a time.

        Without keys, row numbers are the keys.
        """
        edges = [*range(start, stop, self.group_rows), stop]
        beside = self.texts.read(edges, {KEY, TEXT}) if self.texts else None
        for first, rows in zip(edges, self.vectors.read(edges, {KEY, TEXT, VECTOR}, cosine), strict=False):
            ids = pa.array(np.arange(first, first + rows.num_rows))
            columns = {"query_id": ids, "label_id": ids, KEY: ids.cast(pa.string()), TEXT: pa.array([""] * len(ids))}
            for table in (rows, next(beside)) if beside else (rows,):
                columns |= dict(zip(table.column_names, table.columns, strict=True))
            yield columns

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the files of vectors contain. Raises InputError, StorageError."""
        return _identity(self.vectors.urls)

    def beside(self, rows: Table, metric: str) -> ArrayTable:
        """Return the vectors as a table beside their `rows`; its digest depends on the content of the files."""
        kind = "vectors" if self.name == "labels" else "embeddings"
        schema = (arrow.vectors if kind == "vectors" else arrow.embeddings)(self.vectors.dimension, self.vectors.stored)
        shards = [
            Shard(path=one.path, rows=one.rows, bytes=0, sha256="0" * 64, groups=one.groups) for one in rows.shards
        ]
        known = {"what": self.name, "arrays": {"files": self.identity, "metric": metric}}
        changes = {"kind": kind, "columns": columns_of(schema), "shards": tuple(shards), "counters": {}}
        changes |= {"parents": {self.name: rows.digest}, "parameters": known}
        manifest = rows.manifest.model_copy(update=changes)
        return ArrayTable(self.vectors.source, manifest, self.vectors, metric == "cosine")


def mine_arrays(
    queries: str,
    documents: str,
    options: ArrayOptions,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Mine negatives from `documents` for each vector at `queries`. Returns the manifest of the table at OUT/queries.

    The vectors of queries [N, D] and documents [L, D] are float16, float32 or float64, or bfloat16 in safetensors. If
    `positives` is a data set, the vectors belong to the rows of its split `train` and to its labels; otherwise the data
    set OUT/data is made first. If OUT is already complete with the same content and options, it is returned; an
    interrupted run resumes. Readers never see an incomplete table. Raises InputError (invalid input, with file, row and
    remedy; OUT contains something else; invalid options), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    options, queries, documents = options.for_workers(place), place(queries), place(documents)
    if options.out is None:
        raise InputError(f"{option('out')} is missing: specify where to write the tables with {option('out', 'URL')}.")
    out, texts = options.out, (options.query_texts, options.document_texts)
    choose_runner(beam_options)  # refuses wrong options before anything is read
    require_output_folder(out, "mined", [queries, documents, *texts, options.positives])
    rows = _existing_rows(options)
    names, of_labels = parse_fields_by_table(options.fields or "", ColumnNames())
    columns = names, of_labels or names
    sides = tuple(map(Side.open, ("queries", "labels"), (queries, documents), texts, columns))
    remedy = f"Give another {option('out')}, or {option('overwrite', True)} to replace OUT."
    files = base.of_each(storage.state, [url for side in sides for url in side.vectors.urls])
    _require_equal_sides(sides, rows, options)
    stated: dict[str, Any] = {
        **{side.name: side.identity for side in sides},
        **{f"texts_of_{side.name}": side.texts and _identity(side.texts.urls) for side in sides},
        "positives": _identity(list_pair_files(options.positives)) if options.positives and not rows else None,
        "metric": options.metric or "inner",
        "fields": vars(columns[0]),
        "fields_of_labels": vars(columns[1]),
        "same_key": "filter" if options.same_key == "filter" else None,
    }

    def is_imported() -> bool:
        if rows:
            return not is_published(join(out, "data"))  # else OUT is from an import with pairs
        request = Request("data", None, stated, section="arrays")
        return find_reusable(join(out, "data"), request, remedy, overwrite=options.overwrite) is not None

    def go_on() -> dict[str, Manifest]:
        points, labels = rows or _rows_of(join(out, "data"))
        source = EmbeddedSource("queries", points, sides[0].beside(points, stated["metric"]))
        vectors = sides[1].beside(labels, stated["metric"])
        inputs = MineInputs(
            "labels",
            (source,),
            vectors,
            drop_bias=False,
            epoch=None,
            use_from=None,
            root=out,
            requested={},
            texts=labels,
            files=files,
        )
        own = options.model_copy(update={"width": options.width or WIDTH})
        return mine_inputs(inputs, None, own, beam_options, say)

    if is_imported():
        return go_on()
    with claimed(out, "mined", say):
        if not is_imported():  # else the previous owner of the claim has imported the rows
            if is_published(join(out, "queries")) and not options.overwrite:
                raise InputError(f"{out}: contains hard negatives that were mined from different input. {remedy}")
            if rows:
                _clear(out)
            else:
                _import(out, sides, stated, options, beam_options, say)
        return go_on()


def _existing_rows(options: ArrayOptions) -> tuple[Table, ...]:
    """Open the training queries and the labels of the data set `positives`; () if `positives` is not a data set.

    Raises InputError for texts in addition to the data set's texts; TableError.
    """
    data = options.positives
    if data is None or not (is_published(data) and Table.open(data).kind == "data"):
        return ()
    for name, texts in (("query_texts", options.query_texts), ("document_texts", options.document_texts)):
        if texts:
            raise InputError(f"{option(name, texts)}: keys and texts come from {data}. Leave {option(name)} out.")
    return _rows_of(data)


def _require_equal_sides(sides: Sequence[Side], rows: Sequence[Table], options: ArrayOptions) -> None:
    """Raise InputError if there are no keys to compare, or rows or dimensions do not fit together."""
    if options.same_key == "filter" and (rows or not all(side.keyed.has(KEY) for side in sides)):
        where = "DATA has its own filter pairs" if rows else "both sides need keys, but one has only row numbers"
        raise InputError(f"{option('same_key', 'filter')}: {where}. Leave the option out.")
    for side, table in zip(sides, rows, strict=False):
        if table.rows != side.vectors.rows:
            raise InputError(
                f"{side.vectors.source}: {side.vectors.rows:,} vectors, but {table.url} has {table.rows:,} rows. Give "
                "one vector for each row, in row order."
            )
    queries, documents = (side.vectors for side in sides)
    if queries.dimension != documents.dimension:
        raise InputError(
            f"{queries.source}: vectors of {queries.dimension} dimensions, but the vectors in {documents.source} have "
            f"{documents.dimension}. Embed queries and documents with the same model."
        )


def _rows_of(data: str) -> tuple[Table, Table]:
    """Open the training queries and the labels of a data set. Raises TableError."""
    layout = DataLayout(data)
    return Table.open(layout.queries("train"), "queries"), Table.open(layout.labels, "labels")


def _clear(out: str) -> None:
    unpublish(join(out, "data"))
    for name in ("queries", "data"):
        storage.remove(join(out, name), recursive=True)


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
    """Make the data set OUT/data of keys, texts and pairs, and check all vectors. Raises InputError, StorageError."""
    for side in sides:
        has = [f"{role}s" for role in (KEY, TEXT) if side.keyed.has(role)] or ["row numbers as keys"]
        shape = f"{side.vectors.rows:,} × {side.vectors.dimension} {side.vectors.files[0].dtype}"
        say(f"{side.vectors.source}: {shape}, {' and '.join(has)}")
    queries, labels = sides
    kind = arrow.label_type(labels.vectors.rows)
    types = {"query_id": pa.int64(), KEY: pa.string(), "label_ids": pa.list_(kind)}
    types |= {"filter_label_ids": pa.list_(kind)} if options.same_key == "filter" else {}
    types |= {TEXT: pa.string()} if queries.keyed.has(TEXT) else {}
    of_labels = {"label_id": pa.int64(), KEY: pa.string(), TEXT: pa.string(), "frequency": pa.int64()}
    schemas = arrow.without_nulls(types), arrow.without_nulls(of_labels)

    def columns() -> Iterator[tuple[tuple[int, int], pa.RecordBatch]]:
        """Yield ((side, shard), columns): each query's pairs, or how often each document is a positive."""
        pairs = _find_positives(sides, options, say)
        for shard, bounds in enumerate(queries.bounds):
            some = {name: list_array(*each.slice(*bounds), kind) for name, each in pairs.items()}
            yield (0, shard), pa.record_batch(some)
        frequency = np.bincount(pairs["label_ids"].entries, minlength=labels.vectors.rows)
        for shard, (start, stop) in enumerate(labels.bounds):
            yield (1, shard), pa.record_batch([pa.array(frequency[start:stop], pa.int64())], ["frequency"])

    def make(job: Job) -> Manifest:
        build = job.build
        shards = FileExchange(join(job.watch.staging, "columns")).send(columns())
        how = build.url, sides, schemas, options.metric == "cosine", job.watch.meter
        summary = job.run_step(_STEP, sum(side.vectors.rows for side in sides), shards, import_rows, *how)
        _clear(out)
        digests = {}
        for side, schema in zip(sides, schemas, strict=True):
            request = Request(side.name, {}, {"training_points": queries.vectors.rows})
            ids = 0, side.vectors.rows
            manifest = describe(request, summary, schema, side.group_rows, ids, side.table)
            own = Build(join(build.out, side.table), join(build.url, side.table), build.claim)
            digests[side.table.removeprefix("data/")] = own.publish(manifest).digest
        places = {side.name: side.vectors.source for side in sides}
        parameters = {"options": {}, "arrays": {**stated, "places": places}}
        data = Build(join(build.out, "data"), join(build.url, "data"), build.claim)
        return data.publish(Manifest(kind="data", parents=digests, parameters=parameters))

    urls = [url for side in sides for url in side.vectors.urls]
    needs = {"rows": sum(16 * side.vectors.rows for side in sides)}
    make_table(out, "mined", lambda: None, make, beam_options, say, needs=needs, urls=urls, reads=urls[:1])


def _find_positives(sides: Sequence[Side], options: ArrayOptions, say: Progress) -> dict[str, Ragged]:
    """Read the columns of each query: its positives, none without `positives`, and filter pairs with `same_key`.

    Raises InputError for repeated keys, too.
    """
    queries, documents = (KeyLookup.of(side.keyed) for side in sides)
    pairs = Ragged.empty(sides[0].vectors.rows)
    if options.positives is not None:
        pairs = read_positives(options.positives, queries, documents, say)
    if options.same_key != "filter":
        return {"label_ids": pairs}
    own = np.concatenate([documents.find(keys) for keys in queries.files.read_keys()])
    is_filter = (own >= 0) & ~pairs.contains(own[:, None])[:, 0]
    say(f"{int(is_filter.sum()):,} queries have the key of a document, which is never their negative")
    return {"label_ids": pairs, "filter_label_ids": Ragged.from_counts(own[is_filter], is_filter.astype(np.int64))}


def import_rows(
    element: tuple[tuple[int, int], Packet],
    out: str,
    sides: Sequence[Side],
    schemas: Sequence[pa.Schema],
    cosine: bool,
    meter: Meter,
) -> Summary:
    """Check a shard of vectors, and write its rows below `out`. Raises InputError with the file and row; StorageError.

    `element`: number of the side and the shard, and the packet of the columns that the launching process has made.
    """
    (number, shard), packet = element
    meter.start(_STEP)
    side, schema, done = sides[number], schemas[number], 0
    (more,) = receive([packet])
    with writing_shard(join(out, side.table), shard, len(side.bounds), schema, side.group_rows) as file:
        for columns in side.read(*side.bounds[shard], cosine):
            count = len(columns[KEY])
            columns |= dict(zip(more.schema.names, more.slice(done, count).columns, strict=True))
            file.write(pa.table([columns[name] for name in schema.names], schema=schema))
            done += count
            meter.count(_STEP, count)
    meter.count(_STEP, 0, file.entry.bytes)
    mentions = {} if side.name == "labels" else {"labels": len(more.column(0).flatten())}
    return Summary({side.table: (file.entry,)}, {side.table: Counter(rows_out=done, **mentions)})


def open_mined(out: str) -> tuple[ArrayTable, ArrayTable]:
    """Open the vectors of queries and documents that OUT was mined from; their digests tell whether they are unchanged.

    Raises InputError if the files are gone; TableError.
    """
    stated, found = Table.open(join(out, "data"), "data").parameters["arrays"], list[ArrayTable]()
    fields = {"queries": stated["fields"], "labels": stated["fields_of_labels"]}
    for name, rows in zip(fields, _rows_of(join(out, "data")), strict=True):
        source = stated["places"][name]
        if not any(map(storage.exists, urls_of(source))):
            raise InputError(
                f"{source}: the vectors that {out} was mined from are no longer here. Mine again from files that stay: "
                "save arrays with numpy.save."
            )
        side = Side(name, open_files(source, ColumnNames(**fields[name])), None)
        found.append(side.beside(rows, stated["metric"]))
    return found[0], found[1]
