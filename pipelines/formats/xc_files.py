"""Aligned files of XC data sets: their names, matrices whose header states their rows (text or npz), lines."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipelines.formats import lines, npz, sparse
from pipelines.formats.base import LABELS, SPLITS, Inputs, Part
from pipelines.formats.names import filters_at, listing, one_missing, one_of
from schemas.errors import InputError
from schemas.storage import join

# The roles of files, and LABELS; BOTH is the old form's file of labels and features.
FEATURES, BOTH, TEXT, JSON = "features", "both", "text", "json"
_MATRICES = (LABELS, FEATURES, BOTH)
MAX_FEATURES = 1 << 31  # an id is an int32
MAX_LABELS = 1 << 31
_LABELS_A_POINT = 1000
_MISSING = 1000  # rows at the end that a matrix in text need not write, if it has as many besides


_HEADERS = {"": ("two", "rows columns"), BOTH: ("three", "points features labels")}  # of matrices in text


def read_size(url: str) -> tuple[int, int]:
    """Return (rows, columns) of the matrix at `url`, from its header. Raises InputError, StorageError."""
    if url.endswith(".npz"):
        return npz.read_shape(url)
    rows, columns = read_header(url)
    return rows, columns


def read_header(url: str, role: str = "") -> list[int]:
    """Read the whole numbers in the first line of the matrix `url` of `role`. Raises InputError, StorageError."""
    count, names = _HEADERS[role]
    header = lines.first_line(url)
    sizes = sparse.whole_numbers(header)
    if len(sizes) != len(names.split()):
        raise InputError(
            f"{url}, line 1: expected the header `{names}`, {count} whole numbers; got {sparse.shown(header)}."
        )
    return sizes


def check_features(features: int, url: str) -> None:
    """Raise InputError where the header of `url` states more features than there can be."""
    if features > MAX_FEATURES:
        raise InputError(f"{url}: the header states {features:,} features; there can be {MAX_FEATURES:,}. Fix it.")


def labels_by_number(labels: int, points: int, url: str) -> Part:
    """Make the part of `labels` labels of which the header of `url` states nothing but their number.

    Raises InputError where there cannot be so many: they would all be written.
    """
    limit = min(MAX_LABELS, _LABELS_A_POINT * (points + _LABELS_A_POINT))
    if labels > limit:
        raise InputError(
            f"{url}: the header states {labels:,} labels for {points:,} points; at most {limit:,} are believed without "
            "a file of the labels. Fix the header."
        )
    return Part(LABELS, "labels", {}, rows=labels)


def first_line_of_rows(role: str, url: str) -> int:
    """Return the line, from 1, of row 0: a header stands before those of a matrix in text."""
    return 2 if role in _MATRICES and not url.endswith(".npz") else 1


def read_part(part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield blocks of exactly `block_rows` rows (the last may be shorter) with the columns of every file of `part`.

    A file of lines gives a column `<role>`; an npz matrix the columns `<role>.indices` and `<role>.values`. The
    columns that each matrix states are in the schema's metadata, by role. Of a part without files nothing is known but
    the number of its rows. Raises InputError, StorageError.
    """
    if part.rows is not None:
        for first in range(0, part.rows, block_rows):
            yield pa.record_batch({"nothing": pa.nulls(min(block_rows, part.rows - first))})
        return
    rows, columns = _stated(part)
    stated = {role: str(count).encode() for role, count in columns.items()}
    readers = [read_file(role, url, rows, block_rows) for role, url in part.files.items()]
    for blocks in zip(*readers, strict=True):
        beside = {name: column for block in blocks for name, column in block.items()}
        yield pa.record_batch(beside).replace_schema_metadata(stated)


def _stated(part: Part) -> tuple[int | None, dict[str, int]]:
    """Return the rows that headers state, None without headers, and columns by role. Raises InputError: they differ."""
    if BOTH in part.files:
        rows, features, labels = read_header(part.files[BOTH], BOTH)
        return rows, {FEATURES: features, LABELS: labels}
    sizes = {role: read_size(url) for role, url in part.files.items() if role in _MATRICES}
    if len({size[0] for size in sizes.values()}) > 1:
        stated = " and ".join(f"{part.files[role]} states {size[0]:,}" for role, size in sizes.items())
        raise InputError(f"{stated} rows, but row n of one belongs to row n of the other. Are they of one data set?")
    return next((size[0] for size in sizes.values()), None), {role: size[1] for role, size in sizes.items()}


def read_file(role: str, url: str, rows: int | None, block_rows: int) -> Iterator[dict[str, pa.Array]]:
    """Yield blocks of the file of `role`: its columns as in `read_part`. Raises InputError: it has not `rows` rows."""
    if url.endswith(".npz"):
        for block in npz.read_rows(url, block_rows):
            offsets = pa.array(block.offsets)
            yield {
                f"{role}.indices": pa.LargeListArray.from_arrays(offsets, pa.array(block.ids)),
                f"{role}.values": pa.LargeListArray.from_arrays(offsets, pa.array(block.values)),
            }
        return
    for column in _lines(role, url, rows, block_rows):
        yield {role: column}


def _lines(role: str, url: str, rows: int | None, block_rows: int) -> Iterator[pa.LargeBinaryArray]:
    """Yield blocks of exactly `block_rows` lines up to `rows`.

    A header may state more rows than a matrix has lines: they are empty. But a file that stops within a line, or far
    from its end, is cut off.
    """
    matrix = role in _MATRICES
    source = lines.Blocks(url, block_rows, skip=int(matrix))
    held = pa.array([], pa.large_binary())
    read = 0
    for batch in source:
        column = batch["line"]
        if rows is not None and read + len(column) > rows:
            _check_blank(url, column.slice(rows - read).to_pylist(), rows, 1 + matrix + rows)
            column = column.slice(0, rows - read)
        if len(held):
            yield held
        held = column
        read += len(column)
    missing = 0 if rows is None else rows - read
    if missing and not (matrix and source.ended and missing <= read + _MISSING):
        raise InputError(
            f"{url}: cut off: {read:,} lines{' after the header' if matrix else ''}, expected {rows:,}, as many as the "
            f"header {'states' if matrix else 'of the matrix beside it states'}. Copy it again."
        )
    while missing or len(held):
        blank = min(missing, block_rows - len(held))
        yield pa.concat_arrays([held, pa.array([b""] * blank, pa.large_binary())])
        missing -= blank
        held = held.slice(len(held))


def _check_blank(url: str, beyond: Sequence[bytes], rows: int, line: int) -> None:
    for number, content in enumerate(beyond, start=line):
        if content.strip():
            raise InputError(
                f"{url}, line {number}: beyond the {rows:,} rows that the header states: {sparse.shown(content)}. Fix "
                "the header; is the file that of another split?"
            )


_STEMS = {"train": "trn", "val": "val", "test": "tst", LABELS: "lbl"}
# Names that the files of each role may have: those in the first group also end in a codec's suffix.
_OF_LABELS: dict[str, tuple[list[str], list[str]]] = {
    LABELS: ([], []),
    FEATURES: (["lbl_X_Xf.txt", "Yf.txt"], ["lbl_X_Xf.npz"]),
    TEXT: (["Y.txt", "raw/Y.txt", "lbl.raw.txt", "raw_data/label.raw.txt"], []),
    JSON: ([], ["lbl.json.gz", "lbl.raw.json.gz"]),
}
_OF_SPLITS: dict[str, tuple[list[str], list[str]]] = {
    LABELS: (["{stem}_X_Y.txt"], ["{stem}_X_Y.npz", "Y.{stem}.npz"]),
    FEATURES: (["{stem}_X_Xf.txt"], ["{stem}_X_Xf.npz", "X.{stem}.npz"]),
    TEXT: (["{stem}_X.txt", "raw/{stem}_X.txt", "{stem}.raw.txt", "raw_data/{split}.raw.txt", "X.{stem}.txt"], []),
    JSON: ([], ["{stem}.json.gz", "{stem}.raw.json.gz"]),
}


def usual(table: str, role: str) -> list[str]:
    """List the names that the file of `role` (LABELS, FEATURES, TEXT, JSON) of `table` may have."""
    packed, whole = (_OF_LABELS if table == LABELS else _OF_SPLITS)[role]
    names = [name + codec for name in packed for codec in lines.SUFFIXES] + whole
    return [name.format(stem=_STEMS[table], split=table) for name in names]


def is_any(names: Sequence[str], table: str, role: str) -> bool:
    """Tell whether `names` hold the file of `role` of `table`."""
    return any(name in names for name in usual(table, role))


def find_parts(source: str, name: str, expects: str, roles: Sequence[str], required: str) -> Inputs:
    """Find the data set at `source` as parts whose files have the `roles`; every split has to have the `required` one.

    Sizes are those of the headers. Raises InputError: a file is missing or given twice, or headers disagree.
    """
    source, names = listing(source)
    parts = []
    for table in (*SPLITS, LABELS):
        files = {
            role: join(source, file) for role in roles if (file := one_of(source, names, usual(table, role), expects))
        }
        if table != LABELS:
            if not files.keys() & {LABELS, required} and table != "train":
                continue  # texts alone make no split, nor do they make a test split of another form
            needed = [required] if JSON in files else [role for role in (LABELS, required) if role in roles]
            for role in [role for role in needed if role not in files]:
                one_of(source, names, usual(table, role), f"{expects}, of each split", required=True)
        if files:
            first = next(files[role] for role in (LABELS, JSON, TEXT, FEATURES) if role in files)
            parts.append(Part(table, first.rsplit("/", 1)[-1], files))
    return _sized(source, name, expects, parts, names)


def _sized(source: str, name: str, expects: str, parts: list[Part], names: Sequence[str]) -> Inputs:
    """Return the inputs with the numbers of labels and features, from the headers."""
    of_labels = next((part for part in parts if part.table == LABELS), None)
    matrices = {url: read_size(url) for part in parts if (url := part.files.get(LABELS))}
    widths = [(read_size(part.files[FEATURES])[1], part.files[FEATURES]) for part in parts if FEATURES in part.files]
    features, widest = max(widths, default=(None, ""))
    if features is not None:
        check_features(features, widest)
    labels = max((size[1] for size in matrices.values()), default=None)
    if of_labels is None:
        if labels is None:
            raise one_missing(source, names, usual(LABELS, JSON), expects)
        widest = next(url for url, size in matrices.items() if size[1] == labels)
        parts.append(labels_by_number(labels, sum(size[0] for size in matrices.values()), widest))
    elif FEATURES in of_labels.files:
        rows = read_size(of_labels.files[FEATURES])[0]
        if labels is not None and labels > rows:
            raise InputError(
                f"{of_labels.files[FEATURES]}: the header states {rows:,} rows, one a label, but the label matrices "
                f"have {labels:,} columns. Are they of one data set?"
            )
        labels = rows
    else:
        labels = None  # a line is a label: they are counted
    return Inputs(name, tuple(parts), keyed=False, filters=filters_at(source, names), labels=labels, features=features)
