"""What all formats share.

First rejects, and the parts of an input with the columns that they are parsed into; then lines of files, compressed or
not; names of files; names of fields; and records of JSON.
"""

import bz2
import codecs
import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import orjson
import pyarrow as pa

from pipelines.options import Text as Text
from schemas import arrow, storage
from schemas.errors import InputError, StorageError, option
from schemas.storage import join

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T")


class Reason(str, Enum):
    """Reason for rejecting a row; the value is the reason's name in the rejects table and in a manifest's counters."""

    NOT_JSON = "not_json"
    NOT_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    NOT_UNICODE = "not_unicode"
    MALFORMED = "malformed"  # a text line that does not match its format
    LABEL_OUT_OF_RANGE = "label_out_of_range"
    FEATURE_OUT_OF_RANGE = "feature_out_of_range"
    NO_LABELS = "no_labels"
    DUPLICATE_KEY = "duplicate_key"  # another row has the same key and different content
    UNKNOWN_LABEL = "unknown_label"  # one mention of a label that does not exist
    UNKNOWN_QUERY = "unknown_query"


@dataclass(frozen=True, order=True)
class Reject:
    """One rejected row: file, line (from 1), reason, and detail."""

    file: str
    line: int
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {printable(self.detail)}"


def printable(text: str) -> str:
    """Return `text` with control characters and other invisible characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def rejects_batch(rejects: Sequence[Reject]) -> pa.RecordBatch:
    """Return the rejects as rows of the rejects table."""
    columns = [[r.file for r in rejects], [r.line for r in rejects], [r.reason.value for r in rejects]]
    return pa.record_batch([*columns, [r.detail for r in rejects]], schema=arrow.rejects())


SPLITS = ("train", "val", "test")
LABELS = "labels"
PAIRS = "pairs/"  # a table `pairs/train` contains (query_key, label_key) of the split `train`


@dataclass(frozen=True)
class RowContents:
    """What the rows of a part with string keys contain.

    keys: rows contain keys; otherwise, the key of a row is a hash of its text. labels: rows name labels; otherwise,
    they are labels, or a file of pairs names the labels. single: each row names one label, in the field `label`.
    derived: the part contains labels that are extracted from the points. dense: length of a row's vector; 0: no vector.
    """

    features: bool = False
    keys: bool = True
    labels: bool = True
    single: bool = False
    derived: bool = False
    dense: int = 0

    @property
    def need_text(self) -> bool:
        """Whether a row without a text would be empty."""
        return not (self.features or self.dense)


@dataclass(frozen=True)
class Part:
    """Files that are read together, line by line; `files` maps each role to a URL.

    A table (a split, `labels`, `pairs/<split>`) may have many parts. `name` is shown in messages and rejects. For a
    part without files, `rows` is the number of rows given in a header.
    """

    table: str
    name: str
    files: Mapping[str, str]
    rows: int | None = None
    contents: RowContents = RowContents()

    @property
    def lists_labels(self) -> bool:
        """Whether the rows are labels with keys of their own."""
        return self.table == LABELS and not self.contents.derived


@dataclass(frozen=True)
class Inputs:
    """Files of one data set at a source.

    keyed: labels have string keys, and the pipeline assigns ids; otherwise, a label's id is its 0-based line number, as
    in XC. shared_points: the splits share files of points, and a point without a pair in one split belongs to another
    split. labels, features: the numbers of labels and features given in a header; None if the labels have to be
    counted, or if there are no features. filters: for each split, the URL of a file of pairs `row label`, in which row
    is a 0-based line of the split's only part.
    """

    format: str
    parts: tuple[Part, ...]
    keyed: bool
    filters: Mapping[str, str] = field(default_factory=dict)
    labels: int | None = None
    features: int | None = None
    shared_points: bool = False

    def parts_of(self, table: str) -> tuple[Part, ...]:
        """Return the parts of `table`, in the order in which their rows are numbered."""
        return tuple(part for part in self.parts if part.table == table)

    def shown(self, table: str) -> str:
        """Return a table's name for messages: the file's name, or the number of files."""
        parts = self.parts_of(table)
        return parts[0].name if len(parts) == 1 else f"the {len(parts)} files of {table}"

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that have parts."""
        return tuple(split for split in SPLITS if self.parts_of(split))


@dataclass(frozen=True)
class Parsed:
    """Valid rows with the columns of a `*_schema` below, rejects, and the number of pairs ignored because of weight."""

    batch: pa.RecordBatch
    rejects: list[Reject]
    left_out: int = 0


class RawRows:
    """Rows of a raw block that is being parsed into columns. For each rejected row, the first reason is recorded."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, file: str) -> None:
        self.raw, self.first_row, self.file = raw, first_row, file
        self.numbers = pa.array(np.arange(first_row, first_row + raw.num_rows))
        self._left_out: dict[int, Reject] = {}

    @property
    def rejects(self) -> list[Reject]:
        """Rejects, in row order."""
        return [reject for _, reject in sorted(self._left_out.items())]

    def reject(self, rows: int | np.ndarray, reason: Reason, detail: str, file: str = "", header: int = 0) -> None:
        """Reject the 0-based `rows` of the block because of `file`, which starts with `header` header lines."""
        for row in np.unique(rows).tolist():
            line = self.numbers[row].as_py() + header + 1
            self._left_out.setdefault(row, Reject(file or self.file, line, reason, detail))

    def good(self, rows: np.ndarray) -> pa.BooleanArray:
        """Mark the accepted rows among `rows`."""
        return pa.array(~np.isin(rows, list(self._left_out)))

    def parsed(self, columns: Sequence[pa.Array], schema: pa.Schema) -> Parsed:
        """Return the columns of all accepted rows, and the rejects."""
        batch = pa.record_batch(list(columns), schema=schema)
        if self._left_out:
            batch = batch.filter(self.good(np.arange(self.raw.num_rows)))
        return Parsed(batch, self.rejects)


class Format(Protocol):
    """One input format; instances are importable, picklable and frozen."""

    @property
    def name(self) -> str:
        """Name of the format, as in `--format`."""

    @property
    def expects(self) -> str:
        """Text for messages that lists the files that this format expects."""

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        """Return whether the `names` under `source` match this format; opens a file only if the names are ambiguous."""

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`, a prefix or a glob. Raises InputError if files are missing or duplicated."""

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield raw blocks of exactly `block_rows` rows (the last may be shorter).

        Reading must be cheap, because a single worker reads a part. Raises InputError if a file is unusable;
        StorageError.
        """

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        """Parse a raw block that starts at 0-based row `first_row` of its part into points, labels or pairs.

        If a format has no keys, it has no pairs, and an invalid label makes the whole data set unusable.
        """


def points_schema(labels: str | None, features: bool, dense: int = 0) -> pa.Schema:
    """Return the columns of normalised points.

    row: 0-based row in the part. key: unique within the data set, except for duplicate rows. text: empty if the format
    has no texts. labels: `label_ids` or `label_keys`, both sorted and unique; None: labels come from pairs. Ids are >=
    0; the upper bound is checked later, when the labels are counted. merged: number of duplicate labels that were
    removed from the point. features: feature_ids sorted and unique, with feature_values. dense: length of the vectors,
    or 0.
    """
    named = {"label_ids": pa.list_(pa.int64()), "label_keys": pa.list_(pa.string()), None: None}[labels]
    of_labels = [] if labels is None else [pa.field(labels, named)]
    return pa.schema([*labels_schema(features, dense), *of_labels, pa.field("merged", pa.int32())])


def labels_schema(features: bool, dense: int = 0) -> pa.Schema:
    """Return the columns of normalised labels, with the same meanings as in `points_schema`."""
    kinds = {"row": pa.int64(), "key": pa.string(), "text": pa.string()}
    if features:
        kinds |= {"feature_ids": pa.list_(pa.int32()), "feature_values": pa.list_(pa.float32())}
    if dense:
        kinds["dense"] = arrow.dense_type(dense)
    return pa.schema(list(kinds.items()))


def pairs_schema() -> pa.Schema:
    """Return the columns of normalised pairs; pairs with weight <= 0 are ignored without being rejected."""
    return pa.schema([("row", pa.int64()), ("query_key", pa.string()), ("label_key", pa.string())])


def decode_column(column: pa.Array, note: Callable[[int, int], None]) -> pa.StringArray:
    """Return a binary column without nulls as text; values that are not UTF-8 become "" and call `note(row, byte)`."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = []
        for row, value in enumerate(column.to_pylist()):
            try:
                texts.append(value.decode("utf-8"))
            except UnicodeDecodeError as error:
                texts.append("")
                note(row, error.start)
        return pa.array(texts, pa.string())


MAX_LINE_BYTES = 1 << 26  # a longer line is not a record, and would not fit into memory next to other lines
MAX_RATIO = 500  # largest ratio of content to compressed bytes, beyond UNSUSPECTED bytes; no text compresses better
UNSUSPECTED = 1 << 28
_CHUNK = 1 << 20
_ZSTD, _XZ = b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0"  # first bytes of a file
_THREADS = 16  # requests to storage at the same time


def _pieces(file: Any) -> Generator[bytes]:
    yield from iter(lambda: file.read(_CHUNK), b"")


def _streams(new: Callable[[], Any], padding: int, file: IO[bytes]) -> Generator[bytes]:
    """Yield the content of all streams of a bzip2 or xz file; between streams, `padding` zero bytes may repeat.

    The standard library's readers end at a damaged later stream without an error. Raises EOFError, OSError, LZMAError.
    """
    data = file.read(_CHUNK)
    while True:
        stream = new()
        while not stream.eof:
            if stream.needs_input and not data:
                raise EOFError
            yield stream.decompress(data, _CHUNK)
            data = file.read(_CHUNK) if stream.needs_input else b""
        data, zeros = stream.unused_data or file.read(_CHUNK), 0
        while padding and data.startswith(b"\0"):
            zeros += len(data) - len(data := data.lstrip(b"\0"))
            data = data or file.read(_CHUNK)
        if padding and zeros % padding:
            raise lzma.LZMAError(f"{zeros} zero bytes between streams")
        if not data:
            return


# By the end of the file name: the name of the format, and the function that yields the content of an open file.
_CODECS: dict[str, tuple[str, Callable[[Any], Generator[bytes]]]] = {
    ".gz": ("gzip", lambda file: _pieces(gzip.GzipFile(fileobj=file, mode="rb"))),
    ".bz2": ("bzip2", functools.partial(_streams, bz2.BZ2Decompressor, 0)),
    ".xz": ("xz", functools.partial(_streams, functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4)),
    ".zst": ("zstd", lambda file: _pieces(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))),
}
SUFFIXES = ("", *_CODECS)
CODEC = rf"(?:{'|'.join(map(re.escape, _CODECS))})?"  # pattern of a suffix
SCHEMA = pa.schema([pa.field("line", pa.large_binary(), nullable=False)])


class LineBlocks:
    """Lines of a file in batches: a binary column `line` [B] without line endings (LF or CRLF) or byte order mark.

    Batches have `block_lines` lines (the last may be shorter); the first `skip` lines are omitted. After reading,
    `ended` records whether the last line had a line ending, which is usually missing in incomplete files. Raises
    InputError if the format does not match the suffix, the file is incomplete or empty, or a line is longer than
    MAX_LINE_BYTES; StorageError.
    """

    def __init__(self, url: str, block_lines: int, skip: int = 0, encoding: str | None = None) -> None:
        self._url, self._block_lines, self._skip, self._encoding = url, block_lines, skip, encoding
        self.ended = True

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        def chunks() -> Iterator[list[bytes]]:
            for lines, ended in _split(self._url, self._encoding):
                self.ended = ended
                yield lines

        lines = itertools.islice(itertools.chain.from_iterable(chunks()), self._skip, None)
        while block := [*itertools.islice(lines, self._block_lines)]:
            yield pa.record_batch([pa.array(block, pa.large_binary())], schema=SCHEMA)


def read_lines(url: str, encoding: str | None = None) -> Generator[list[bytes]]:
    """Yield, for each MiB of the file's content, the lines that end in it. Raises the errors of `LineBlocks`."""
    yield from (lines for lines, _ in _split(url, encoding) if lines)


def first_line(url: str) -> bytes:
    """Read the first line of the file without reading the whole file. Raises the errors of `LineBlocks`."""
    with contextlib.closing(read_lines(url)) as some:
        return next(some, [b""])[0]


def identify(url: str) -> tuple[int, str]:
    """Return (bytes, SHA-256) of the stored file. Raises InputError, StorageError."""
    with open_file(url) as file:
        try:
            digest = storage.stream_sha256(file)
        except OSError as error:
            raise _lost(url, file.tell(), error) from error
        return file.tell(), digest


def without_checksum(urls: Iterable[str]) -> list[str]:
    """List the zstd and xz files that carry no checksum (in the first frame), so that damage may change the content."""

    def carries_none(url: str) -> bool:
        with open_file(url) as file:
            head = file.read(8).ljust(8, b"\xff")
        return (head[:4] == _ZSTD and not head[4] & 4) or (head[:6] == _XZ and not head[7] & 15)

    urls = [url for url in urls if url.endswith((".zst", ".xz"))]
    return [url for url, none in of_each(carries_none, urls).items() if none]


@contextlib.contextmanager
def unchanged(urls: Collection[str]) -> Iterator[None]:
    """Raise InputError after the block if one of the files has changed since its start. Raises StorageError."""
    before = of_each(storage.state, urls)
    yield
    require_unchanged(before)


def require_unchanged(before: Mapping[str, tuple[str, ...]]) -> None:
    """Raise InputError if the `storage.state` of one of the files is no longer the one before. Raises StorageError."""
    changed = [url for url, state in of_each(storage.state, before).items() if state != before[url]]
    if changed:
        raise InputError(
            f"{changed[0]}: the file changed while it was read. Run the same command again when the file is complete."
        )


def of_each(function: Callable[[str], T], urls: Collection[str]) -> dict[str, T]:
    """Return the results of `function` for each of the `urls`, which are looked up at the same time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(urls, pool.map(function, urls), strict=True))


def open_file(url: str) -> IO[bytes]:
    """Open an input file without decompressing it. Raises InputError if there is no such file; StorageError."""
    try:
        return storage.open_read(url)
    except FileNotFoundError:
        raise InputError(f"{url}: file not found.") from None


def _split(url: str, encoding: str | None) -> Iterator[tuple[list[bytes], bool]]:
    """Yield, for each chunk, (the lines that end in the chunk, whether these lines have line endings)."""
    pending, empty = b"", True
    for chunk in read_text(url, encoding):
        chunk = pending + chunk
        *whole, pending = chunk.split(b"\n")
        empty &= not whole
        if max(map(len, [*whole, pending])) > MAX_LINE_BYTES:
            raise InputError(f"{url}: a line is longer than {MAX_LINE_BYTES:,} bytes. Check the line endings.")
        yield [line.removesuffix(b"\r") for line in whole] if b"\r" in chunk else whole, True
    if pending:
        yield [pending.removesuffix(b"\r")], False
    elif empty:
        raise InputError(f"{url}: the file is empty. Copy the file again, or remove the file.")


_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def open_text(url: str, encoding: str | None) -> tuple[str, bytes, Iterator[bytes]]:
    """Return (encoding, first bytes, other chunks) of a file of text; None: the encoding of the mark, or UTF-8."""
    chunks, head = read_chunks(url), b""
    while len(head) < len(codecs.BOM_UTF8) and (more := next(chunks, b"")):
        head += more
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")
    return codecs.lookup(encoding or marked).name, head, chunks


def read_text(url: str, encoding: str | None = None) -> Iterator[bytes]:
    """Yield chunks of a file of text as UTF-8 without a byte order mark; None: in the encoding of the mark, or UTF-8.

    UTF-8 is not checked. Raises the errors of `LineBlocks`, and InputError if the file has another encoding.
    """
    name, head, chunks = open_text(url, encoding)
    if name in ("utf-8", "utf-8-sig"):
        yield from filter(None, itertools.chain([head.removeprefix(codecs.BOM_UTF8)], chunks))
        return
    decoder, mark, place = codecs.getincrementaldecoder(name)(), "\ufeff", 0
    for chunk in itertools.chain([head], chunks, [b""]):
        place += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk).removeprefix(mark).encode()
        except UnicodeError as error:
            raise InputError(
                f"{url}: not text in {name}, within the first {place:,} bytes ({error}). Give another "
                f"{option('encoding')}."
            ) from None
        if text:
            mark = ""
            yield text


def not_utf8(data: bytes) -> str:
    """Return what to do about text that is not UTF-8, for a message. Text that Windows wrote in the West is shown."""
    text = data.decode("cp1252", "replace").strip()
    letters = sum(sign.isascii() and sign.isalpha() for sign in text)
    if "\ufffd" not in text and sum(not sign.isascii() for sign in text) <= letters:
        likely = f"if it is “{printable(text[:_SHOWN])}”, give {option('encoding', 'cp1252')}"
        return f"not UTF-8 text: {likely}, or save the file as UTF-8"
    return f"not UTF-8 text: give its encoding with {option('encoding', 'NAME')}, or save the file as UTF-8"


def read_chunks(url: str) -> Iterator[bytes]:
    """Yield chunks of the content, decompressed according to the extension. Raises the errors of `LineBlocks`."""
    suffix = next((suffix for suffix in _CODECS if url.endswith(suffix)), None)
    name, unpack = _CODECS[suffix] if suffix else ("plain", _pieces)
    with open_file(url) as file, contextlib.closing(unpack(file)) as content:
        unpacked = 0
        try:
            for chunk in content:
                unpacked += len(chunk)
                if suffix and unpacked > max(UNSUSPECTED, MAX_RATIO * file.tell()):
                    raise InputError(
                        f"{url}: {file.tell():,} bytes unpack to more than {unpacked:,}, which is unusual for text. "
                        f"Expected at most {MAX_RATIO} times the compressed size. If the size is correct, unpack the "
                        "file first."
                    )
                yield chunk
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            by_zstd = str(error) if name == "zstd" else ""  # zstd and bzip2 do not define their own errors
            by_bzip2 = name == "bzip2" and str(error).endswith("data stream")
            if isinstance(error, EOFError) or "Truncated compressed stream" in by_zstd:
                fault = f"incomplete: the {name} stream stops after {file.tell():,} bytes. Copy the file again."
            elif "too much memory" in by_zstd:
                fault = (
                    "zstd with a window of more than 128 MiB; expected at most 128 MiB. Write the file with a smaller "
                    "window: zstd -dc -M2048MB FILE | zstd > NEW.zst."
                )
            elif "ZSTD" in by_zstd or by_bzip2 or isinstance(error, gzip.BadGzipFile | zlib.error | lzma.LZMAError):
                fault = (
                    f"not a {name} file, or damaged ({error}). The file name indicates {name}: compress a plain file "
                    f"with `{name}`, and copy a damaged file again."
                )
            else:
                raise _lost(url, file.tell(), error) from error
            raise InputError(f"{url}: {fault}") from None


def _lost(url: str, after: int, error: Exception) -> StorageError:
    return StorageError(f"could not read {url} after {after:,} bytes: {error}; run the same command again.")


_FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "val": ("filter_labels_val.txt", "val_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt", "filter_labels_text.txt"),
}
# Names of files with data; a folder also has other files, such as README.md.
_DATA = re.compile(rf"\.(?:json\.gz|(?:jsonl|ndjson|csv|tsv|txt|text|parquet|arrow|npz){CODEC})$")


def packed(*names: str) -> list[str]:
    """Return the names, each of them plain and with the suffix of each codec."""
    return [name + codec for name in names for codec in SUFFIXES]


def one_of(
    source: str, names: Sequence[str], usual: Sequence[str], expected: str, *, required: bool = False
) -> str | None:
    """Return the `usual` name that exists, or None. Raises InputError for two names, or for none if `required`."""
    present = [name for name in usual if name in names]
    if len(present) > 1:
        raise InputError(
            f"{source}: both {present[0]} and {present[1]} are here, with the same content. Remove one of the two "
            "files."
        )
    if not present and required:
        raise one_missing(source, names, usual, expected)
    return present[0] if present else None


def one_missing(source: str, names: Sequence[str], usual: Sequence[str], expected: str) -> InputError:
    return InputError(f"{source}: no {' or '.join(usual)} here; found: {say_names(names)}. Expected {expected}.")


def filters_at(source: str, names: Sequence[str]) -> Mapping[str, str]:
    """Return the URLs of the XC filter files among `names`, by split."""
    files = {split: one_of(source, names, packed(*usual), "") for split, usual in _FILTERS.items()}
    return {split: join(source, name) for split, name in files.items() if name}


def say_names(names: Sequence[str]) -> str:
    """List the first names, for a message."""
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "nothing"


def is_pattern(source: str) -> bool:
    """Return whether `source` is a pattern: it contains `*` or `?`, and no file or folder has exactly this name."""
    if not set(source) & set("*?"):
        return False
    return not (storage.exists(source) or storage.is_folder(source) or storage.list_names(source))


def single_file(source: str, kind: str) -> bool:
    """Return whether `source` is a single file with the extension `kind` (a regex), not a folder or a pattern."""
    named = re.search(rf"\.{kind}$", source) is not None
    return named and not is_pattern(source) and not storage.list_names(source)


def list_files(source: str) -> tuple[str, list[str]]:
    """Return (prefix, sorted names below the prefix) of `source`, a prefix or a pattern (`is_pattern`).

    For a prefix, the result contains the names directly under the prefix and, as `folder/name`, the names in its
    folders; `folder/name/` is a folder in a folder. For a pattern, the result contains the matching names, relative to
    the folders before the first wildcard; `[` and `{` stand for themselves. Names that begin with `.` or `_` are left
    out.
    """
    if is_pattern(source):
        parts = source.split("/")
        wild = next(i for i, part in enumerate(parts) if "*" in part or "?" in part)
        root = "/".join(parts[:wild]) or ("/" if source.startswith("/") else ".")
        return root, _matching(root, parts[wild:])
    types, names = storage.list_types(source), list[str]()
    for name in visible(types):
        inside = storage.list_types(join(source, name)) if types[name] != "file" else {}
        names += [f"{name}/{each}{'/' * (inside[each] == 'directory')}" for each in visible(inside)]
        names += [] if inside else [name]
    return source, sorted(names)


def visible(names: Iterable[str]) -> list[str]:
    """Return the names that do not begin with `.` or `_`, which mark files of other programs, such as `._a.jsonl`."""
    return [name for name in names if not name.startswith((".", "_"))]


def notes_on(source: str, read: Sequence[str]) -> Iterator[str]:
    """Yield lines to print about the files at `source`, of which the URLs `read` are read.

    Raises InputError for a filter file that is not read.
    """
    root, names = list_files(source)
    left = [name for name in names if join(root, name) not in read and (name.endswith("/") or _DATA.search(name))]
    for name in left:
        if "filter_labels" in name and (name.endswith("/") or storage.size(join(root, name))):
            raise InputError(
                f"{join(root, name)}: a filter file names points and labels by line number, so it works only beside "
                "the points of an XC format. Give the data in the format xc-text, or remove the file: its pairs then "
                "count as wrong predictions."
            )
    if left:
        yield f"{source}: not read: {say_names(left)}"
    if unchecked := without_checksum(read):
        yield f"damage cannot be noticed, because these files have no checksums: {say_names(unchecked)}"


def _matching(root: str, patterns: Sequence[str]) -> list[str]:
    names = fnmatch.filter(visible(storage.list_names(root)), patterns[0].replace("[", "[[]"))
    if len(patterns) == 1:
        return sorted(names)
    return sorted(f"{name}/{rest}" for name in names for rest in _matching(join(root, name), patterns[1:]))


LABELS_PREFIX = "labels."  # prefix of a field of the table of labels
ABSENT = "\x01absent"  # name of a field whose usual column is used for another field
OF_PAIRS = ("query_key", "label_key", "weight")  # all other fields belong to points and labels
OF_TEXTS = ("key", "text", "title", "content")
OF_ROWS = (*OF_TEXTS, "feature_ids", "feature_values", "vector")  # fields of points and labels


@dataclass(frozen=True)
class Fields:
    """Name of each field in the data.

    A point has a key, a text, and `labels` or one `label`. A label has a key and a text. A pair has a query key, a
    label key and optionally a weight. If a record has `title`, it is the first line of the text, before `text` or
    `content`. Features and a vector are optional.
    """

    key: str = "key"
    text: str = "text"
    labels: str = "labels"
    label: str = "label"
    title: str = "title"
    content: str = "content"
    feature_ids: str = "feature_ids"
    feature_values: str = "feature_values"
    vector: str = "vector"
    query_key: str = "query_key"
    label_key: str = "label_key"
    weight: str = "weight"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Fields that may contain the text."""
        return self.title, self.text, self.content

    @property
    def body(self) -> str:
        """Field that contains the text if no other field does."""
        return self.text if self.text != ABSENT else self.title

    def within(self, columns: Sequence[str]) -> "Fields":
        """Return the names of fields in rows with `columns`: these names if they have content, else the usual names."""
        if not {*self.texts, self.feature_ids, self.vector} & {*columns}:
            return Fields()
        return self if self.key in columns else dataclasses.replace(self, key=Fields().key)


Named = TypeVar("Named", bound="DataclassInstance")  # such as Fields: names of fields


def join_title(title: str, body: str) -> str:
    """Return a text whose first line is the title, unless one of the two is empty."""
    return f"{title}\n{body}" if title and body else title or body


def in_use(*names: str) -> list[str]:
    return [name for name in names if name != ABSENT]


def text_key(text: str) -> str:
    """Return a key for a point without a key: a hash of its text, so that rows with the same text become one point."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def parse_fields_by_table(text: str, usual: Named = Fields()) -> tuple[Named, Named | None]:  # type: ignore[assignment]
    """Parse `key=id,labels.key=code` into the field names of points and pairs, and the field names of labels.

    Entries that start with `labels.` change only the field names of labels; without such entries, the second result is
    None. Raises the errors of `parse_fields`.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    of_labels = [item.removeprefix(LABELS_PREFIX) for item in items if item.startswith(LABELS_PREFIX)]
    fields = parse_fields(",".join(item for item in items if not item.startswith(LABELS_PREFIX)), usual)
    return fields, parse_fields(",".join(of_labels), fields) if of_labels else None


def parse_fields(text: str, usual: Named = Fields()) -> Named:  # type: ignore[assignment]
    """Parse `key=id,text=query`, which gives the names of the fields that differ from the usual names.

    A column belongs to one field: if an entry assigns a column to a field, the field that usually uses this column is
    absent. Only the key and the text may share a column. Raises InputError if a field is unknown, a name is missing, or
    one column is assigned to two fields.
    """
    names = [field.name for field in dataclasses.fields(usual)]
    changes = dict[str, str]()
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{option('fields')}: unknown field {name!r}; {meant}known fields: {', '.join(names)}.")
        if not equals or not value or name in changes:
            expected = f"{name}=NAME once, as in key=id,text=query"
            raise InputError(parameter="fields", got=repr(item), expected=expected)
        changes[name] = value
    changed = vars(usual) | changes
    for name, other in itertools.product(changes, names):
        same = name != other and changed[name] == changed[other] and (name in OF_PAIRS) == (other in OF_PAIRS)
        if same and {name, other} != {"key", "text"}:
            if other in changes:
                raise InputError(
                    f"{option('fields')}: {name} and {other} both name the column {changed[name]!r}. Use it once."
                )
            changed[other] = ABSENT
    return dataclasses.replace(usual, **changed)


_SHOWN = 80
Record = dict[str, Any]


class InvalidRecord(Exception):
    """Error for an invalid row: `reason` is the reason for rejecting the row, and the message gives details."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse_lines(
    lines: Sequence[bytes], first_row: int, file: str, read: Callable[[Record, int], T], skip_blank: bool = False
) -> tuple[list[int], list[T], list[Reject]]:
    """Read raw lines [B] that start at 0-based row `first_row`; return (rows, results of `read`, rejects).

    `read` receives each record and its row number, and may raise InvalidRecord. Blank lines are skipped with
    `skip_blank`, and rejected otherwise.
    """
    rows, good, rejects = list[int](), list[T](), list[Reject]()
    for row, line in enumerate(lines, start=first_row):
        try:
            record = _load(line)
            if type(record) is not dict:
                raise InvalidRecord(Reason.NOT_OBJECT, f"expected a JSON object, got {shown(record)}")
            good.append(read(record, row))
            rows.append(row)
        except InvalidRecord as bad:
            if line.strip() or not skip_blank:
                rejects.append(Reject(file, row + 1, bad.reason, str(bad)))
    return rows, good, rejects


def field_names(line: bytes) -> list[str]:
    """Return the field names of a raw line; empty if the line is not a record."""
    try:
        record = _load(line)
    except InvalidRecord:
        return []
    return list(record) if type(record) is dict else []


def required(record: Record, name: str) -> Any:
    """Return the field `name`. Raises InvalidRecord if the field is missing."""
    if name not in record:
        raise InvalidRecord(Reason.MISSING_FIELD, f"the field {name!r} is missing; found {shown(sorted(record))}")
    return record[name]


def string(value: Any, name: str) -> str:
    """Return `value` if it is text that UTF-8 can encode. Raises InvalidRecord."""
    if not isinstance(value, str):
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a string, got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(
                Reason.NOT_UNICODE, f"{name} contains half a surrogate pair at character {error.start}"
            ) from None
    return value


def key(value: Any, name: str) -> str:
    """Return a key: a string, or a whole number of up to 64 bits as its digits. Raises InvalidRecord."""
    if type(value) is not int and not isinstance(value, float):
        return string(value, name)
    if type(value) is float or not -(1 << 63) <= value < 1 << 64:
        bits = value.bit_length() if isinstance(value, int) else 0
        got = f"a number of {bits:,} bits" if bits > 4 * _SHOWN else shown(value)  # Python prints no huge numbers
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a string or a whole number of up to 64 bits, got {got}")
    return str(value)


def numbers(value: Any, name: str, whole: bool = False) -> list[Any]:
    """Return `value` if it is a list of numbers, or of `whole` numbers. Raises InvalidRecord."""
    if not isinstance(value, list) or not {*map(type, value)} <= {int, *(() if whole else (float,))}:  # not bool
        kind = "whole numbers" if whole else "numbers"
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a list of {kind}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return `value` as text that is safe to print and truncated to the length of a line."""
    try:
        text = ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _load(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass  # the standard library accepts slightly more, and explains the fault
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRecord(Reason.NOT_UNICODE, not_utf8(line[max(error.start - _SHOWN // 2, 0) :])) from None
    except (ValueError, RecursionError) as error:
        text = shown(line[:_SHOWN].decode("utf-8", "replace"))
        raise InvalidRecord(Reason.NOT_JSON, f"not JSON ({str(error)[:_SHOWN]}): {text}") from None
