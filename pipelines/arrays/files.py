"""Files of vectors, keys and texts, read by ranges of rows: `.npy`, safetensors, Parquet, Arrow and Feather.

Nothing is unpickled. Memory is bounded by a batch of rows; of an Arrow file by one of its record batches.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.common.vectors import rechunk
from pipelines.formats import lines
from pipelines.formats.column_files import open_parquet
from pipelines.formats.names import listed, listing
from schemas import storage
from schemas.errors import InputError
from schemas.ragged import offsets_of
from schemas.shard_files.parquet import matrix_array
from schemas.storage import join

FORMS = ("npy", "safetensors", "parquet", "arrow", "feather")
KEY, TEXT, VECTOR = "key", "text", "vector"
_SUFFIX = re.compile(rf"\.({'|'.join(FORMS)})$")
_STORED = {"float16": "float16", "float32": "float32", "float64": "float32", "bfloat16": "float32"}
_TENSORS = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"}
_MOST_HEADER = 100 << 20  # bytes, as the safetensors library has it
_OPENERS = 8  # files at a time
_FLOATS = "Write the vectors as rows of float16 or float32, as numpy.save(path, array.astype('float32')) does."


@dataclass(frozen=True)
class Names:
    """Name of each field in files with columns; in safetensors that of the tensor."""

    key: str = KEY
    text: str = TEXT
    vector: str = VECTOR


@dataclass(frozen=True)
class RowFile:
    """File of `rows` rows; `columns`: which fields it has, by their names there, among all `names`.

    `dtype`, `dimension`: of its vectors. `places`: (first row, byte) of a matrix, or of each batch of an Arrow file.
    """

    url: str
    rows: int
    names: tuple[str, ...]
    columns: Mapping[str, str]
    dtype: str = ""
    dimension: int = 0
    places: tuple[tuple[int, int], ...] = ()
    swapped: bool = False  # big-endian

    def read(self, start: int, stop: int, step: int, wanted: Collection[str], cosine: bool) -> Iterator[pa.Table]:
        """Yield rows [start, stop) of the fields `wanted`, about `step` at a time. Raises InputError, StorageError."""
        columns = {role: name for role, name in self.columns.items() if role in wanted}
        named = list(columns.values())
        read = self._batches(start, stop, step, named) if self.names else self._matrices(start, stop, step)
        for first, values in read:
            made = {
                role: self._vectors(first, values[name], cosine)
                if role == VECTOR
                else self._strings(first, values[name], name, role)
                for role, name in columns.items()
            }
            yield pa.table(made)

    def fault(self, row: int, what: str, remedy: str) -> InputError:
        """Return the error over row `row` of the file."""
        return InputError(f"{self.url}, row {row:,}: {what}. {remedy}")

    def _matrices(self, start: int, stop: int, step: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        wide = self.dtype == "bfloat16"
        kind = np.dtype(np.uint16 if wide else self.dtype).newbyteorder(">" if self.swapped else "<")
        place, size = self.places[0][1], kind.itemsize * self.dimension
        for low in range(start, stop, step):
            high = min(low + step, stop)
            data = storage.read_range(self.url, place + low * size, place + high * size)
            numbers = np.frombuffer(data, kind).reshape(-1, self.dimension)
            yield low, {VECTOR: (numbers.astype(np.uint32) << 16).view(np.float32) if wide else numbers}

    def _batches(self, start: int, stop: int, step: int, named: list[str]) -> Iterator[tuple[int, Any]]:
        """Yield (first row, batch) of files with columns."""
        read = _arrow_batches(self, start) if self.places else _parquet_batches(self, start, stop, step, named)
        for first, batch in read:
            for low in range(max(start, first), min(stop, first + batch.num_rows), step):
                yield low, batch.slice(low - first, min(step, stop - low))
            if first + batch.num_rows >= stop:
                return

    def _vectors(self, first: int, values: Any, cosine: bool) -> pa.Array:
        """Return vectors [n, D] of rows from `first` on, checked, of length 1 for cosine, as they are stored."""
        x = values if isinstance(values, np.ndarray) else self._unlisted(first, values)
        stored = np.dtype(_STORED[self.dtype])
        with np.errstate(over="ignore"):
            kept = x.astype(stored)
        if (wrong := np.flatnonzero(~np.isfinite(kept).all(axis=1))).size:
            raise self.fault(
                first + int(wrong[0]),
                f"its vector is not finite in {stored} (NaN, infinite or too large)",
                "Leave the row out, or embed it again.",
            )
        if cosine:
            exact = x.astype(np.float64)
            norms = np.sqrt((exact * exact).sum(axis=1))
            if (norms == 0).any():
                zero = first + int(np.flatnonzero(norms == 0)[0])
                raise self.fault(zero, "its vector is zero, which has no cosine", "Leave the row out, or use inner.")
            kept = (exact / norms[:, None]).astype(stored)
        return matrix_array(kept, pa.from_numpy_dtype(stored))

    def _unlisted(self, first: int, lists: pa.Array) -> np.ndarray:
        sizes = pc.list_value_length(lists).fill_null(-1).to_numpy()
        if (wrong := np.flatnonzero(sizes != self.dimension)).size:
            row, size = int(wrong[0]), int(sizes[wrong[0]])
            said = "no vector" if size < 0 else f"a vector of {size:,} numbers, where the first has {self.dimension:,}"
            raise self.fault(first + row, said, "Write vectors of one dimension.")
        return lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.dimension)

    def _strings(self, first: int, values: pa.Array, name: str, role: str) -> pa.Array:
        plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        if role == TEXT:
            plain = plain.fill_null("") if not pa.types.is_null(plain.type) else pa.array([""] * len(plain))
        elif plain.null_count:
            row = first + int(np.flatnonzero(plain.is_null().to_numpy(zero_copy_only=False))[0])
            raise self.fault(row, f"no {name}", "Give every row a key.")
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_integer)
        if not any(is_kind(plain.type) for is_kind in kinds):
            raise InputError(
                f"{self.url}: the column {name} is of type {plain.type}; a {role} is a string or a number."
            )
        return plain.cast(pa.string())


@dataclass(frozen=True)
class RowFiles:
    """Files at `source`, of the same columns, dtype and dimension: rows count on from file to file."""

    source: str
    files: tuple[RowFile, ...]
    first: np.ndarray = field(init=False, compare=False)  # first row of each file, and N

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", offsets_of(np.array([file.rows for file in self.files])))

    @property
    def rows(self) -> int:
        """N."""
        return int(self.first[-1])

    @property
    def dimension(self) -> int:
        """D."""
        return self.files[0].dimension

    @property
    def stored(self) -> str:
        """Numbers of the vectors in tables: float16 stays, all others become float32."""
        return _STORED[self.files[0].dtype]

    def has(self, role: str) -> bool:
        """Return whether the files have the field `role`."""
        return role in self.files[0].columns

    def read(
        self, start: int, stop: int, step: int, wanted: Collection[str], cosine: bool = False
    ) -> Iterator[pa.Table]:
        """Yield rows [start, stop) in tables of exactly `step` rows, the last may be shorter."""
        parts = (
            file.read(max(0, start - low), min(file.rows, stop - low), step, wanted, cosine)
            for file, low in zip(self.files, self.first.tolist(), strict=False)
            if low < stop and low + file.rows > start
        )
        return rechunk(itertools.chain.from_iterable(parts), step)

    def place(self, row: int) -> tuple[RowFile, int]:
        """Return the file of row `row`, and its number there."""
        number = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.files[number], row - int(self.first[number])


def urls_of(source: str) -> list[str]:
    """List the files of vectors at `source`: a file, a prefix, or a pattern with `*` and `?`; sorted by name."""
    if _SUFFIX.search(source) and "*" not in source and "?" not in source:
        names = storage.list_names(source) if not storage.exists(source) else []  # a folder may be called so, too
        return [join(source, name) for name in names if _SUFFIX.search(name)] or [source]
    root, names = listing(source) if "*" in source or "?" in source else (source, storage.list_names(source))
    return [join(root, name) for name in names if _SUFFIX.search(name) and not name.startswith((".", "_"))]


def open_files(source: str, names: Names, vectors: bool = True) -> RowFiles:
    """Open the files at `source`: their vectors, keys and texts, or without `vectors` the latter alone.

    Raises InputError: no such files, of no known form, damaged, or not all of one dimension, dtype and columns.
    """
    urls = urls_of(source)
    if not urls:
        forms = ", ".join(f".{form}" for form in FORMS)
        found = listed(storage.list_names(source)) if not storage.exists(source) else "one file of another kind"
        raise InputError(
            f"{source}: no vectors here; found: {found}. Expected a file whose name ends in {forms}, or a folder."
        )
    with ThreadPoolExecutor(_OPENERS) as pool:
        opened = list(pool.map(lambda url: _open(url, names, vectors), urls))
    files = tuple(file for file in opened if file.rows)
    if not files:
        raise InputError(f"{source}: no rows here. Is the path right?")
    for other in files[1:]:
        for what in ("dimension", "dtype", "columns"):
            if (a := getattr(files[0], what)) != (b := getattr(other, what)):
                a, b = (", ".join(map(str, each)) if what == "columns" else each for each in (a, b))
                raise InputError(f"{other.url}: {what} {b}, but {a} in {files[0].url}. Write all files alike.")
    return RowFiles(source, files)


def _open(url: str, names: Names, vectors: bool) -> RowFile:
    form = url.rpartition(".")[2]
    if form == "parquet":
        file = _open_parquet(url, names, vectors)
    elif form in ("arrow", "feather"):
        file = _open_arrow(url, names, vectors)
    elif not vectors:
        raise InputError(f"{url}: expected keys and texts in columns, of a .parquet, .arrow or .feather file.")
    else:
        with lines.open_file(url) as stream:
            file = _open_npy(url, stream) if form == "npy" else _open_safetensors(url, stream, names)
    if file.columns.get(VECTOR) and file.rows and not file.dimension:
        raise InputError(f"{url}: vectors of no numbers. {_FLOATS}")
    return file


def _open_npy(url: str, stream: IO[bytes]) -> RowFile:
    layout = np.lib.format
    try:
        version = layout.read_magic(stream)
        header = layout.read_array_header_1_0 if version == (1, 0) else layout.read_array_header_2_0
        shape, fortran, dtype = header(stream)
    except ValueError as error:
        raise InputError(f"{url}: not a .npy file, or a damaged one: {str(error)[:200]}. Save it again.") from None
    if dtype.hasobject:
        raise InputError(f"{url}: an array of Python objects, which are never unpickled. {_FLOATS}")
    if dtype.name not in _STORED or len(shape) != 2:
        raise InputError(f"{url}: an array of {dtype} {list(shape)}, where rows of numbers [N, D] are read. {_FLOATS}")
    if fortran and min(shape) > 1:
        raise InputError(f"{url}: stored column by column. Save it as numpy.ascontiguousarray(array).")
    return _matrix(url, shape, dtype.name, stream.tell(), dtype.newbyteorder("<") != dtype)


def _open_safetensors(url: str, stream: IO[bytes], names: Names) -> RowFile:
    size = int.from_bytes(stream.read(8), "little")
    try:
        if size > _MOST_HEADER:
            raise ValueError(f"a header of {size:,} bytes")
        tensors = json.loads(stream.read(size))
        tensors.pop("__metadata__", None)
        shapes = {name: (each["dtype"], tuple(map(int, each["shape"]))) for name, each in tensors.items()}
        fitting = {name for name, (dtype, shape) in shapes.items() if dtype in _TENSORS and len(shape) == 2}
        name = names.vector if names.vector in fitting or len(fitting) != 1 else fitting.pop()
        begin = int(tensors[name]["data_offsets"][0]) if name in shapes else 0
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"{url}: not safetensors, or damaged: {str(error)[:200]}. Save it again.") from None
    dtype, shape = shapes.get(name, ("", ()))
    if dtype not in _TENSORS or len(shape) != 2:
        found = ", ".join(f"{each} ({kind} {list(sizes)})" for each, (kind, sizes) in shapes.items()) or "nothing"
        raise InputError(
            f"{url}: no tensor {name!r} of rows of floats; found: {found}. Name it with --fields vector=NAME."
        )
    return _matrix(url, shape, _TENSORS[dtype], 8 + size + begin, False)


def _matrix(url: str, shape: tuple[int, ...], dtype: str, place: int, swapped: bool) -> RowFile:
    rows, dimension = shape
    item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if rows < 0 or dimension < 0 or storage.size(url) < place + rows * dimension * item:
        raise InputError(f"{url}: cut off, or damaged: too short for {rows:,} × {dimension:,} numbers. Copy it again.")
    return RowFile(url, rows, (), {VECTOR: VECTOR}, dtype, dimension, ((0, place),), swapped)


def _open_parquet(url: str, names: Names, vectors: bool) -> RowFile:
    with open_parquet(url) as file:
        found = _described(url, file.schema_arrow, names, vectors)
        first = next(file.iter_batches(1, columns=[found.columns[VECTOR]]), None) if vectors else None
        return _sized(found, file.metadata.num_rows, first)


def _parquet_batches(
    file: RowFile, start: int, stop: int, step: int, named: list[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    with open_parquet(file.url, buffer_size=storage.READ_BYTES) as opened:
        first = 0
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if first < stop and first + rows > start:
                low = first
                for batch in opened.iter_batches(step, row_groups=[group], columns=named, use_threads=False):
                    yield low, batch
                    low += batch.num_rows
            first += rows


def _open_arrow(url: str, names: Names, vectors: bool) -> RowFile:
    """Note where each record batch lies: of a file with a footer, or of a stream, as Hugging Face `datasets` saves."""
    with lines.open_file(url) as stream:
        try:
            schema, source = _arrow_schema(stream)
            found, places, rows, first = _described(url, schema, names, vectors), list[tuple[int, int]](), 0, None
            while True:
                place = stream.tell()
                try:
                    batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
                except EOFError:
                    break
                places.append((rows, place))
                first, rows = first or batch, rows + batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{url}: no Arrow file with plain columns, or damaged: {str(error)[:200]}. Save it again."
            ) from None
    return replace(_sized(found, rows, first), places=tuple(places))


def _arrow_schema(stream: IO[bytes]) -> tuple[pa.Schema, pa.PythonFile]:
    stream.seek(8 if stream.read(6) == b"ARROW1" else 0)
    source = pa.PythonFile(stream, mode="r")
    return pa.ipc.read_schema(source), source


def _arrow_batches(file: RowFile, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    ends = [first for first, _ in file.places[1:]] + [file.rows]
    with lines.open_file(file.url) as stream:
        schema, source = _arrow_schema(stream)
        for (first, place), end in zip(file.places, ends, strict=True):
            if end > start:
                stream.seek(place)
                yield first, pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def _described(url: str, schema: pa.Schema, names: Names, vectors: bool) -> RowFile:
    """Return the file without its rows. Raises InputError: no column of vectors."""
    columns = {role: name for role, name in vars(names).items() if name in schema.names and role != VECTOR}
    found = RowFile(url, 0, tuple(schema.names), columns)
    if not vectors:
        return found
    of_floats = [each.name for each in schema if _is_floats(each.type)]
    name = names.vector if names.vector in schema.names or len(of_floats) != 1 else of_floats[0]
    if name not in of_floats:
        there = ", ".join(f"{each.name} ({each.type})" for each in list(schema)[:20])
        raise InputError(
            f"{url}: no column {name!r} of lists of float16, float32 or float64; found: {there}. "
            "Name it with --fields vector=NAME."
        )
    kind = schema.field(name).type
    dimension = kind.list_size if pa.types.is_fixed_size_list(kind) else 0
    dtype = np.dtype(kind.value_type.to_pandas_dtype()).name
    return replace(found, columns={**columns, VECTOR: name}, dtype=dtype, dimension=dimension)


def _sized(found: RowFile, rows: int, first: pa.RecordBatch | None) -> RowFile:
    """Add the rows, and where the type does not tell it, the dimension, which is that of the first row."""
    dimension = found.dimension
    if first is not None and first.num_rows and not dimension and VECTOR in found.columns:
        dimension = pc.list_value_length(first.column(found.columns[VECTOR]))[0].as_py() or 0
    return replace(found, rows=rows, dimension=dimension)


def _is_floats(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and pa.types.is_floating(kind.value_type)
