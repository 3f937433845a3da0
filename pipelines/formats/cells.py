"""Cells of text that name several labels: `sea|ships`, `sea;ships`, and lists as other programs write them.

One grammar reads the lists of JSON, Python (`['sea', None]`, also tuples and sets), NumPy (`['sea' 'ships']`) and
DuckDB (`[sea, 'Dante, \\'D', a | b]`). If two of these programs mean different labels by a cell, it is not read.
"""

import re
from collections.abc import Callable

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.records import shown

_QUOTED = r"""(?:'([^'\\]*(?:\\.[^'\\]*)*)'|"([^"\\]*(?:\\.[^"\\]*)*)")"""
_SIGNS = r"""[^"'()\[\]{},\\]"""  # of words without quotes, as DuckDB writes them
_ENTRY = re.compile(rf"(?:{_QUOTED}|(\({_SIGNS}*\)|{_SIGNS}+))(\s*,\s*|\s+|$)", re.DOTALL)
_LIST = re.compile(rf"\[.*\]|[({{]\s*['\"].*[)}}]|{_QUOTED}(?:(?:\s*,\s*|\s+){_QUOTED})+", re.DOTALL)
_PERHAPS_LIST = r"""^[\[({"']"""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NULLS = {"null": False, "NULL": False, "None": True, "nan": True, "NaN": True, "<NA>": True}  # whether DuckDB writes such a label so
_NO_LABELS = {"true", "false", "True", "False", "..."}
_NEEDS_QUOTES = re.compile(r"""\s|\s.*|.*\s|null|.*["'(),:=\[\\\]{}].*|""", re.DOTALL | re.IGNORECASE)  # in DuckDB
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00[0-9a-fA-F]{6}|.)", re.DOTALL)
_ESCAPES = dict(zip("nrtbf\\/'\"", "\n\r\t\b\f\\/'\"", strict=True))


def split_cells(column: pa.StringArray, refuse: Callable[[int, str], None]) -> tuple[np.ndarray, pa.StringArray]:
    """Return (offsets int64 [B + 1], labels) of cells [B] without nulls; a cell that is not read calls `refuse(row, why)`.

    Labels that no list contains have no blanks around them.
    """
    column = pc.utf8_trim_whitespace(column)
    is_list = pc.match_substring_regex(column, _PERHAPS_LIST).to_numpy(zero_copy_only=False)
    parts = pc.split_pattern_regex(column.filter(pa.array(~is_list)), "[|;]")
    flat = pc.utf8_trim_whitespace(parts.flatten())
    kept = pc.greater(pc.binary_length(flat), 0)
    starts = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
    lists = pa.ListArray.from_arrays(pa.array(starts[parts.offsets.to_numpy()].astype(np.int32)), flat.filter(kept))
    if is_list.any():
        rows = np.flatnonzero(is_list)
        read = list[list[str]]()
        for row, cell in zip(rows.tolist(), column.filter(pa.array(is_list)).to_pylist(), strict=True):
            try:
                read.append(split_cell(cell))
            except ValueError as error:
                read.append([])
                refuse(row, str(error))
        order = np.argsort(np.concatenate([np.flatnonzero(~is_list), rows]))
        lists = pa.concat_arrays([lists, pa.array(read, lists.type)]).take(pa.array(order))
    return np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())]), lists.flatten()


def split_cell(cell: str) -> list[str]:
    """Return the labels in a cell. Raises ValueError that explains why a list is not read."""
    text = cell.strip()
    if not _LIST.fullmatch(text):
        return [label for part in re.split("[|;]", text) if (label := part.strip())]
    try:
        found = orjson.loads(text)  # the usual list, read quickly
        if isinstance(found, list) and {*map(type, found)} <= {str}:
            return found
    except orjson.JSONDecodeError:
        pass
    try:
        return _read_list(text if text[0] in "'\"" else text[1:-1].strip())
    except ValueError as error:
        reason = str(error) if type(error) is ValueError else "it contains an invalid escape"
        raise ValueError(f'{shown(text)} is no list of labels: {reason}. Write ["a", "b"]') from None


def _read_list(body: str) -> list[str]:
    entries, place = list[re.Match[str]](), 0
    while place < len(body):
        entry = _ENTRY.match(body, place)
        if entry is None:
            raise ValueError(f"{shown(body[place : place + 20])} is neither a label nor a number")
        entries.append(entry)
        place = entry.end()
    commas = {"," in entry[4] for entry in entries if entry[4]}
    if len(commas) > 1:
        raise ValueError("there are commas between some entries only")
    labels, doubtful, by_duckdb = list[str](), False, commas != {False}
    for entry in entries:
        if entry[3] is None:
            labels.append(_unescape(entry[1] if entry[2] is None else entry[2]))
            by_duckdb &= entry[2] is None and _NEEDS_QUOTES.fullmatch(labels[-1]) is not None
            continue
        word = entry[3].strip()
        words = word.split()
        values = all(_NUMBER.fullmatch(each) or each in _NULLS or each in _NO_LABELS for each in words)
        if values and _NO_LABELS & {*words}:
            raise ValueError(f"{shown(word)} is no label")
        if commas == {False} and not values:
            raise ValueError(f"{shown(word)} has no quotes")
        if values and len(words) > 1 and not commas:
            raise ValueError("numbers without commas may be one label or several")
        for label in words if commas == {False} else [word]:
            doubtful |= _NULLS.get(label, False)
            labels += [] if label in _NULLS else [label]
    if doubtful and labels and by_duckdb:
        raise ValueError("None or nan may be a label or none")
    return labels


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(lambda found: _character(found[1]), text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON writes two halves of a character


def _character(code: str) -> str:
    if len(code) > 1:
        return chr(int(code[1:], 16))
    if code not in _ESCAPES:
        raise ValueError(f"{shown(chr(92) + code)} is an unknown escape")
    return _ESCAPES[code]
