"""Points and pairs from lines of text.

JSON lines and tab-separated pairs come first; then cells that hold lists; then sparse rows, and columns made of them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from pipelines.formats import base
from pipelines.formats.base import Fields, InvalidRecord, Parsed, Part, RawRows, Reason, Record, Text
from schemas.ragged import SparseRows, offsets_of
from schemas.shard_files import parquet
from schemas.shard_files.parquet import string_bytes

_ROW = "\x01row"  # added to each object, because Arrow alone would accept an object that ends in another line
# First fields of a header: Extremis's, BEIR's, and other usual names.
_HEADERS = (b"query_key", b"query-id", b"query_id", b"qid")
_NUMBER = r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"
LARGEST = float(np.finfo(np.float32).max)


def parse_points(raw: pa.RecordBatch, first_row: int, part: Part, fields: Fields, text: Text) -> Parsed:
    """Parse raw lines of `part` into points, or into labels like points without labels."""
    lines, contents = raw["line"].to_pylist(), part.contents
    is_simple = contents.labels and contents.need_text and contents.keys and not contents.single
    if is_simple and (plain := _parse_simple_block(lines, first_row, fields)) is not None:
        return Parsed(plain, [])

    def read(record: Record, row: int) -> tuple[str, str, Any, Any, list[str], int]:
        features = _feature_pair(record, fields) if contents.features else None
        vector = _vector(record, fields.vector, contents.dense) if contents.dense else None
        whole = _text(record, fields, text, contents.need_text)
        if contents.keys:
            key = _key(base.required(record, fields.key), fields.key, part.lists_labels)
        else:
            key = base.text_key(whole)
        point = key, whole, features, vector
        if not contents.labels:
            return (*point, [], 0)
        name = fields.label if contents.single else fields.labels
        named = record.get(name)
        if named is None or (isinstance(named, str) and not named.strip()):
            named = []
        elif contents.single:
            named = [named]
        elif isinstance(named, str):
            named = split_cell(named, name)
        if not isinstance(named, list):
            raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a list of label keys, got {base.shown(named)}")
        keys = [_key(value, name, trim=True) for value in named if value is not None]  # a null is no label
        if not keys:
            raise InvalidRecord(
                Reason.NO_LABELS, f"the point {base.shown(key)} has no labels ({name} is empty or missing)"
            )
        once = sorted(set(keys))
        return (*point, once, len(keys) - len(once))

    rows, good, rejects = base.parse_lines(lines, first_row, part.name, read, skip_blank=True)
    keys, texts, features, vectors, named, merged = zip(*good, strict=True) if good else ((), (), (), (), (), ())
    columns: list[Any] = [rows, keys, texts, *(_features(features) if contents.features else [])]
    columns += [vector_column(np.array(vectors, np.float64).reshape(-1, contents.dense))] if contents.dense else []
    columns += [named] if contents.labels else []
    schema = base.points_schema("label_keys" if contents.labels else None, contents.features, contents.dense)
    return Parsed(pa.record_batch([*columns, merged], schema=schema), rejects)


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str, fields: Fields) -> Parsed:
    """Parse raw lines into pairs; pairs with a weight of 0 or less are left out."""

    def read(record: Record, row: int) -> tuple[str, str, bool]:
        weight = record.get(fields.weight, 1)
        if type(weight) not in (int, float) or weight != weight:
            raise InvalidRecord(Reason.WRONG_TYPE, f"{fields.weight} must be a number, got {base.shown(weight)}")
        query = _key(base.required(record, fields.query_key), fields.query_key)
        label = _key(base.required(record, fields.label_key), fields.label_key, trim=True)
        return query, label, weight > 0

    rows, good, rejects = base.parse_lines(raw["line"].to_pylist(), first_row, file, read, skip_blank=True)
    kept = [(row, query, label) for row, (query, label, relevant) in zip(rows, good, strict=True) if relevant]
    columns = list(zip(*kept, strict=True)) if kept else [(), (), ()]
    return Parsed(pa.record_batch(columns, schema=base.pairs_schema()), rejects, len(rows) - len(kept))


def _key(value: Any, name: str, trim: bool = False) -> str:
    key = base.key(value, name)
    key = key.strip() if trim else key
    if not key:
        raise InvalidRecord(Reason.MALFORMED, f"{name} contains an empty key")
    return key


def _text(record: Record, fields: Fields, parts: Text, is_required: bool) -> str:
    title = record.get(fields.title)
    name = fields.text if record.get(fields.text) is not None else fields.content
    body = record.get(name)
    if title is None:
        if body is None:
            return base.string(base.required(record, fields.body), fields.body) if is_required else ""
        return base.string(body, name)
    title = base.string(title, fields.title)
    return title if body is None or parts == "title" else base.join_title(title, base.string(body, name))


def _feature_pair(record: Record, fields: Fields) -> tuple[list[int], list[float]]:
    ids = base.numbers(record.get(fields.feature_ids) or [], fields.feature_ids, whole=True)
    values = record.get(fields.feature_values)
    values = [1.0] * len(ids) if values is None else base.numbers(values, fields.feature_values)
    if len(ids) != len(values):
        raise InvalidRecord(
            Reason.MALFORMED, f"{len(ids)} {fields.feature_ids}, but {len(values)} {fields.feature_values}"
        )
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise InvalidRecord(
            Reason.FEATURE_OUT_OF_RANGE, f"{fields.feature_ids} must be in [0, 2^31), got {base.shown(ids)}"
        )
    if any(not abs(value) <= LARGEST for value in values):
        raise InvalidRecord(
            Reason.MALFORMED, f"{fields.feature_values} contains a value that a 32-bit float cannot hold"
        )
    return ids, values


def _vector(record: Record, name: str, dense: int) -> list[float]:
    values = base.numbers(base.required(record, name), name)
    if len(values) != dense:
        raise InvalidRecord(Reason.MALFORMED, WRONG_LENGTH.format(name, len(values), dense))
    if any(not abs(value) <= MOST_FLOAT16 for value in values):
        raise InvalidRecord(Reason.MALFORMED, NOT_FLOAT16.format(name))
    return values


def _features(rows: Sequence[tuple[list[int], list[float]]]) -> list[pa.Array]:
    offsets = offsets_of(np.array([len(ids) for ids, _ in rows], np.int64))
    ids = np.fromiter(chain.from_iterable(ids for ids, _ in rows), np.int64, offsets[-1])
    values = np.fromiter(chain.from_iterable(values for _, values in rows), np.float32, offsets[-1])
    return feature_columns(SparseRows(ids, values, offsets))


def _parse_simple_block(lines: Sequence[bytes], first_row: int, fields: Fields) -> pa.RecordBatch | None:
    """Parse raw lines [B] into points with only key, text and labels; return None unless every line is valid."""
    marked = [b'{"\\u0001row":%d,%b' % (row, line[1:]) for row, line in enumerate(lines) if line[:1] == b"{"]
    if not lines or len(marked) < len(lines):
        return None
    texts = [(name, pa.string()) for name in (fields.key, fields.text, fields.title)]
    schema = pa.schema([(_ROW, pa.int64()), *texts, (fields.labels, pa.list_(pa.string()))])
    if len(schema.names) > len(set(schema.names)):
        return None
    content = b"\n".join(marked)
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(content),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(content) + 1),
            pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        ).combine_chunks()
        table.validate(full=True)
    except pa.ArrowException:
        return None
    rows, keys, texts, titles, labels = (column.combine_chunks() for column in table.select(schema.names).columns)
    count = len(lines)
    if len(rows) != count or rows.null_count or (rows.to_numpy() != np.arange(count)).any():
        return None
    named = pc.utf8_trim_whitespace(labels.flatten())
    offsets = labels.offsets.to_numpy()
    if keys.null_count or texts.null_count or titles.null_count < count or labels.null_count or named.null_count:
        return None
    if (np.diff(offsets) == 0).any() or not all(string_bytes(column).counts.all() for column in (keys, named)):
        return None
    columns = [pa.array(np.arange(first_row, first_row + count)), keys, texts, *unite_keys(named, offsets - offsets[0])]
    return pa.record_batch(columns, schema=base.points_schema("label_keys", features=False))


def parse_tabbed_pairs(raw: pa.RecordBatch, first_row: int, file: str) -> Parsed:
    """Parse raw lines into pairs; pairs with a weight of 0 or less and empty lines are left out."""
    block, lines = RawRows(raw, first_row, file), raw["line"]

    def reject(rows: np.ndarray, reason: Reason, problem: str) -> None:
        good[rows] = False
        for row in rows.tolist():
            block.reject(row, reason, problem + base.shown(lines[row].as_py()[:200].decode("utf-8", "replace")))

    split = pc.split_pattern(lines, "\t")
    fields, count = split.values, split.value_lengths().to_numpy()
    first = split.offsets.to_numpy()[:-1]  # each line's first field
    full = pc.binary_length(fields).to_numpy() > 0

    blank = (count == 1) & ~full[first]
    if first_row == 0 and len(lines) and fields[0].as_py() in _HEADERS:
        blank[0] = True
    good = ~blank
    expected = "expected query key, label key[, weight] separated by tabs, got "
    reject(np.flatnonzero(good & (count != 2) & (count != 3)), Reason.MALFORMED, expected)
    reject(np.flatnonzero(good)[~(full[first[good]] & full[first[good] + 1])], Reason.MALFORMED, "an empty key: ")
    weighted = np.flatnonzero(good & (count == 3))
    weights = parse_numbers(fields.take(pa.array(first[weighted] + 2)))
    reject(weighted[np.isnan(weights)], Reason.MALFORMED, "the weight is not a number: ")
    good[weighted[~(weights > 0)]] = False
    left_out = int(np.count_nonzero(weights <= 0))
    rows = np.flatnonzero(good)
    keys = [
        base.decode_column(
            fields.take(pa.array(first[rows] + number)),
            lambda place, _: reject(rows[[place]], Reason.NOT_UNICODE, "a key is not UTF-8: "),
        )
        for number in (0, 1)
    ]
    keys[1] = pc.utf8_trim_whitespace(keys[1])
    reject(rows[pc.equal(keys[1], "").to_numpy(zero_copy_only=False)], Reason.MALFORMED, "an empty key: ")
    batch = pa.record_batch([pa.array(rows + first_row), *keys], schema=base.pairs_schema())
    return Parsed(batch.filter(block.good(rows)), block.rejects, left_out)


def parse_numbers(fields: pa.LargeBinaryArray) -> np.ndarray:
    """Parse each field as a number, float64 [B]; a field that is not a number becomes NaN."""
    values = np.full(len(fields), np.nan)
    good = pc.match_substring_regex(fields, _NUMBER)
    numbers = fields.filter(good).cast(pa.string())
    places = good.to_numpy(zero_copy_only=False)
    try:
        values[places] = numbers.cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:  # Python reads numbers that Arrow may refuse: with a plus sign, or too large
        values[places] = [float(number) for number in numbers.to_pylist()]
    return values


# Cells that hold lists of labels, as programs write them.

_ESCAPE = r"""\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|[nrtbf\\/'"])"""
_ESCAPES = dict(zip("nrtbf\\/'\"", "\n\r\t\b\f\\/'\"", strict=True))
_ANY = _ESCAPE.replace("(x", "(?:x")
_QUOTED = rf"""(?:'([^'\\]*(?:{_ANY}[^'\\]*)*)'|"([^"\\]*(?:{_ANY}[^"\\]*)*)")"""
_SIGNS = r"""[^\s"'()\[\]{},\\]"""  # of a word without quotes, as DuckDB writes it
_ENTRY = re.compile(rf"(?:{_QUOTED}|(\((?:{_SIGNS}|\s)*\)|{_SIGNS}+(?:\s+{_SIGNS}+)*))(\s*,\s*|\s+|$)")
_LIST = re.compile(rf"\[.*\]|[({{]\s*['\"].*[)}}]|{_QUOTED}(?:(?:\s*,\s*|\s+){_QUOTED})+", re.DOTALL)
_VALUE = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|null|NULL|None|nan|NaN|<NA>|[tT]rue|[fF]alse|\.\.\.")
_NULLS = {"null", "NULL", "None", "nan", "NaN", "<NA>"}
_NEVER_LABELS = {"true", "True", "false", "False", "..."}
_BY_DUCKDB = re.compile(r"""(?:|\s|\s.*|.*\s|null|.*["'(),:=\[\\\]{}].*)""", re.DOTALL | re.IGNORECASE)  # with quotes


def split_cells(
    column: pa.StringArray, name: str, reject: Callable[[int, Reason, str], None]
) -> tuple[np.ndarray, pa.StringArray]:
    """Return (offsets int64 [B + 1], labels) of cells [B] of the column `name`; `reject` cells that are not read."""
    column = pc.utf8_trim_whitespace(column)
    if not pc.any(pc.match_substring_regex(column, r"""^[\[({"']""")).as_py():  # no lists: read without a loop
        parts = pc.split_pattern_regex(column, "[|;]")
        flat = pc.utf8_trim_whitespace(parts.flatten())
        kept = pc.greater(pc.binary_length(flat), 0)
        starts = offsets_of(kept.to_numpy(zero_copy_only=False))
        return starts[parts.offsets.to_numpy()], flat.filter(kept)
    labels = list[list[str]]()
    for row, cell in enumerate(column.to_pylist()):
        labels.append([])
        try:
            labels[row] = split_cell(cell, name)
        except InvalidRecord as bad:
            reject(row, bad.reason, str(bad))
    return offsets_of(np.array([*map(len, labels)], np.int64)), pa.array(chain.from_iterable(labels), pa.string())


def split_cell(cell: str, name: str) -> list[str]:
    """Return the labels in a cell of the column `name`. Raises InvalidRecord if the cell is a list that is not read."""
    text = cell.strip()
    if not _LIST.fullmatch(text):
        return [label for part in re.split("[|;]", text) if (label := part.strip())]
    try:
        found = orjson.loads(text)  # the usual list, read quickly
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, list) and {*map(type, found)} <= {str}:
        return found
    try:
        return _read_list(text if text[0] in "'\"" else text[1:-1].strip())
    except ValueError as bad:
        why = "half a surrogate pair" if isinstance(bad, UnicodeDecodeError) else bad
        detail = f'{name}: {base.shown(text)} is no list of labels: {why}. Write ["a", "b"]'
        raise InvalidRecord(Reason.MALFORMED, detail) from None


def _read_list(body: str) -> list[str]:
    entries, place = list[re.Match[str]](), 0
    while place < len(body) and (entry := _ENTRY.match(body, place)):
        entries.append(entry)
        place = entry.end()
    if place < len(body):
        raise ValueError(f"{base.shown(body[place : place + 20])} is neither a label nor a number")
    commas = {"," in entry[4] for entry in entries if entry[4]}
    if len(commas) > 1:
        raise ValueError("there are commas between some entries only")
    spaced, labels, nulls, by_duckdb = False in commas, list[str](), set[str](), False not in commas
    for single, double, word, _ in map(re.Match.groups, entries):
        if word is None:
            labels.append(_unescape(single if double is None else double))
            by_duckdb &= double is None and _BY_DUCKDB.fullmatch(labels[-1]) is not None
            continue
        words = word.split()
        values = all(map(_VALUE.fullmatch, words))
        if _NEVER_LABELS & {*words} or (len(words) > 1 and not commas) if values else spaced:
            raise ValueError(f"{base.shown(word)} without quotes may mean several things")
        found = words if spaced else [word]
        nulls |= _NULLS & {*found}
        labels += [label for label in found if label not in _NULLS]
    doubtful = nulls - {"null", "NULL"} if by_duckdb else ()  # DuckDB writes labels of these two names with quotes
    if labels and doubtful:
        raise ValueError(f"{min(doubtful)} without quotes may mean several things")
    return labels


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    text = re.sub(_ESCAPE, lambda found: _ESCAPES.get(found[1]) or chr(int(found[1][1:], 16)), text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON writes two halves of a character


# Sparse rows: fields `index:value`, or indices alone.

MAX_DIGITS = 18  # digits of an index that int64 can always hold
_SHOWN = 200
_FIELD, _SPACE, _MARK, _OTHER = 0, 1, 2, 3
_PAIR = re.compile(rb"[0-9]{1,18}:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
INDEX = re.compile(rb"[0-9]{1,18}")


def parse_sparse_pairs(lines: pa.LargeBinaryArray) -> tuple[SparseRows, dict[int, str]]:
    """Parse lines [B] of `index:value` fields separated by spaces or tabs into (rows [B], errors of invalid lines).

    An invalid line becomes an empty row. The order and repetitions of entries within a row are preserved.
    """
    ragged, wrong = _parse(lines, _pairs, _wrong_pair)
    finite, beyond = only_finite(ragged)
    return finite, wrong | beyond


def parse_indices(lines: pa.LargeBinaryArray) -> tuple[SparseRows, dict[int, str]]:
    """Parse lines [B] of comma-separated indices into (rows [B] in which all values are 1, errors of invalid lines)."""
    return _parse(lines, _indices, _wrong_index)


def only_finite(ragged: SparseRows) -> tuple[SparseRows, dict[int, str]]:
    """Replace rows that contain a non-finite value with empty rows. Returns (rows, errors of invalid rows)."""
    finite = np.isfinite(ragged.values)
    if finite.all():
        return ragged, {}
    rows = ragged.row_of()
    wrong = np.unique(rows[~finite])
    kept = ragged.keep(~np.isin(rows, wrong))
    return kept, dict.fromkeys(wrong.tolist(), "a value does not fit into a 32-bit float")


def cut_at_space(lines: pa.LargeBinaryArray) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    """Split each line [B] at its first space."""
    cut = pc.split_pattern(lines, " ", max_splits=1)
    first = cut.offsets[:-1]
    second = pc.if_else(pc.equal(cut.value_lengths(), 2), pc.add(first, 1), None)
    return cut.values.take(first), cut.values.take(second).fill_null(b"")


def _sort(ragged: SparseRows) -> tuple[SparseRows, np.ndarray]:
    """Return the rows sorted by index, and which of their entries repeat the index before, which came first."""
    rows, again = ragged.row_of(), np.zeros(len(ragged.ids), bool)
    same_row = rows[1:] == rows[:-1]
    if (same_row & (np.diff(ragged.ids) < 0)).any():
        order = np.lexsort((ragged.ids, rows))
        ragged = SparseRows(ragged.ids[order], ragged.values[order], ragged.offsets)
    again[1:] = same_row & (np.diff(ragged.ids) == 0)
    return ragged, again


def merge_labels(ragged: SparseRows) -> tuple[SparseRows, np.ndarray]:
    """Return rows of distinct, sorted labels (values > 0), and the number of duplicates in each row, int32 [B]."""
    ragged, again = _sort(ragged.keep(ragged.values > 0))
    merged = np.bincount(ragged.row_of()[again], minlength=ragged.rows).astype(np.int32)
    return ragged.keep(~again), merged


def unite_keys(keys: pa.StringArray, offsets: np.ndarray) -> tuple[pa.ListArray, pa.Array]:
    """Return the columns label_keys and merged for rows with label keys `keys` [V]; row i starts at `offsets[i]`."""
    coded = keys.dictionary_encode()
    order = pc.sort_indices(coded.dictionary)
    rank = np.argsort(order.to_numpy())
    once, merged = merge_labels(SparseRows(rank[coded.indices], np.ones(len(coded), np.float32), offsets))
    named = coded.dictionary.take(order).take(pa.array(once.ids))
    return pa.ListArray.from_arrays(pa.array(once.offsets.astype(np.int32)), named), pa.array(merged)


def merge_features(ragged: SparseRows) -> SparseRows:
    """Return rows of distinct, sorted features; the values of a repeated feature are summed in order."""
    ragged, again = _sort(ragged)
    if not again.any():
        return ragged
    sums = np.add.reduceat(ragged.values.astype(np.float64), np.flatnonzero(~again))
    return ragged.keep(~again)._replace(values=np.clip(sums, -LARGEST, LARGEST).astype(np.float32))


def feature_columns(ragged: SparseRows) -> list[pa.Array]:
    """Return the columns feature_ids and feature_values for rows of features."""
    merged = merge_features(ragged)
    return [
        parquet.list_array(merged.ids.astype(np.int32), merged.offsets, pa.int32()),
        parquet.list_array(merged.values, merged.offsets, pa.float32()),
    ]


MOST_FLOAT16 = float(np.finfo(np.float16).max)  # largest number in a dense vector
WRONG_LENGTH = "{} has {:,} numbers, expected {:,} as in the other rows"
NOT_FLOAT16 = "{} contains a value that a finite 16-bit float cannot hold"


def vector_column(vectors: np.ndarray) -> pa.FixedSizeListArray:
    """Return dense vectors [B, d] as a column; numbers above MOST_FLOAT16, which are in rejected rows, become zeros."""
    kept = np.where(np.abs(vectors) <= MOST_FLOAT16, vectors, 0).astype(np.float16)
    return parquet.matrix_array(kept, pa.float16())


def _parse(
    lines: pa.LargeBinaryArray,
    fast: Callable[[np.ndarray, np.ndarray], SparseRows | None],
    find_fault: Callable[[bytes], str | None],
) -> tuple[SparseRows, dict[int, str]]:
    ragged = fast(*parquet.string_bytes(lines))
    if ragged is not None:
        return ragged, {}
    each = lines.to_pylist()
    wrong = {row: detail for row, line in enumerate(each) if (detail := find_fault(line)) is not None}
    for row in wrong:
        each[row] = b""
    ragged = fast(*parquet.string_bytes(pa.array(each, pa.large_binary())))
    assert ragged is not None, "the fast pass reads every line that the slow pass accepts"
    return ragged, wrong


def _classes(fields: bytes, spaces: bytes, mark: bytes) -> np.ndarray:
    table = np.full(256, _OTHER, np.uint8)
    for some, kind in ((fields, _FIELD), (spaces, _SPACE), (mark, _MARK)):
        table[list(some)] = kind
    return table


_PAIR_BYTES = _classes(b"0123456789.eE+-", b" \t", b":")
_INDEX_BYTES = _classes(b"0123456789", b"", b",")


@dataclass(frozen=True)
class _Fields:
    """Fields of lines; a field is a run of consecutive field bytes.

    `text` [F]: fields as strings. `start` [F] and `lengths` [F]: positions in the data. `first` int64 [B + 1]: first
    field of each line. `kind` [F]: class of the byte before each field (0 at the start of a line). `marks`: number of
    colons or commas.
    """

    text: pa.StringArray
    start: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    kind: np.ndarray
    marks: int


def _fields(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> _Fields | None:
    """Find the fields of lines; None if a byte does not belong to any class."""
    kinds = classes[data]
    if kinds.max(initial=0) == _OTHER:
        return None
    breaks = np.flatnonzero(kinds)
    # Fields are between breaks. A break is a separator in the text (one byte), or the start of a line (zero bytes).
    places = np.searchsorted(breaks, offsets[:-1])
    before = np.insert(breaks, places, offsets[:-1])
    start = np.insert(breaks + 1, places, offsets[:-1])
    kind = np.insert(kinds[breaks], places, 0)
    lengths = np.append(before[1:], len(data)) - start
    full = lengths > 0
    start, lengths, kind = start[full], lengths[full], kind[full]
    buffers = [None, pa.py_buffer(offsets_of(lengths).astype(np.int32)), pa.py_buffer(data[kinds == _FIELD])]
    text = pa.Array.from_buffers(pa.string(), len(lengths), buffers)
    marks = int(np.count_nonzero(kinds == _MARK))
    return _Fields(text, start, lengths, np.searchsorted(start, offsets), kind, marks)


def _pairs(data: np.ndarray, offsets: np.ndarray) -> SparseRows | None:
    fields = _fields(data, offsets, _PAIR_BYTES)
    if fields is None or len(fields.kind) != 2 * fields.marks or (fields.first % 2).any():  # a line has half a pair
        return None
    of_value = fields.kind == _MARK
    if of_value[::2].any() or not of_value[1::2].all() or fields.lengths[::2].max(initial=0) > MAX_DIGITS:
        return None
    if (fields.start[::2] + fields.lengths[::2] + 1 != fields.start[1::2]).any():  # there is a space before the colon
        return None
    even = np.arange(0, len(fields.kind), 2)
    try:
        indices = fields.text.take(pa.array(even)).cast(pa.uint64())
        values = fields.text.take(pa.array(even + 1)).cast(pa.float32())
    except pa.ArrowInvalid:
        return None
    return SparseRows(indices.to_numpy().astype(np.int64), values.to_numpy(), fields.first // 2)


def _indices(data: np.ndarray, offsets: np.ndarray) -> SparseRows | None:
    fields = _fields(data, offsets, _INDEX_BYTES)
    if fields is None or (fields.kind == _SPACE).any() or fields.lengths.max(initial=0) > MAX_DIGITS:
        return None
    # A comma separates two fields of a line, so each non-empty line has one comma fewer than fields.
    begins = fields.first[:-1][np.diff(fields.first) > 0]  # the first field of each line that has any
    if fields.marks != np.count_nonzero(fields.kind == _MARK) or (fields.kind[begins] == _MARK).any():
        return None
    indices = fields.text.cast(pa.uint64()).to_numpy().astype(np.int64)
    return SparseRows(indices, np.ones(len(indices), np.float32), fields.first)


def _wrong_pair(line: bytes) -> str | None:
    for field in line.replace(b"\t", b" ").split(b" "):
        if field and not _PAIR.fullmatch(field):
            return f"expected fields index:value such as 12:1.0, got {shown_raw(field)}"
    return None


def _wrong_index(line: bytes) -> str | None:
    for field in line.split(b",") if line else ():
        if not INDEX.fullmatch(field):
            return f"expected labels such as 3,17,20, got {shown_raw(field)}"
    return None


def shown_raw(field: bytes) -> str:
    """Return `field` as text that is safe to print and truncated."""
    return base.shown(field[:_SHOWN].decode("utf-8", "replace"))
