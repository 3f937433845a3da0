"""Read row ranges from files of vectors, keys and texts: `.npy`, safetensors, Parquet, Arrow and Feather.

Nothing is unpickled. Memory is bounded by the size of one batch of rows or, for an Arrow file, of one record batch.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import lines, npz
from pipelines.formats.column_files import check_names, open_parquet
from pipelines.formats.names import is_pattern, list_files, say_names
from schemas import storage
from schemas.errors import InputError
from schemas.ragged import offsets_of
from schemas.shard_files.parquet import matrix_array
from schemas.storage import join
from schemas.table import rechunk

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
        with lines.open_file(self.url) as stream:
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
        with lines.open_file(url) as stream:
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
    dtype, shape, by_column = npz.read_header(stream)
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
