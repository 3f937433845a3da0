"""Cells of text that name several labels: `sea|ships`, `sea;ships`, and lists as other programs write them.

One grammar reads the lists of JSON, Python (`['sea', None]`, also tuples and sets), NumPy (`['sea' 'ships']`) and
DuckDB (`[sea, 'Dante, \\'D', a | b]`). A list that two of these programs would read differently is not read.
"""

import re
from collections.abc import Callable
from itertools import chain

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.base import Reason
from pipelines.formats.records import InvalidRecord, shown
from schemas.ragged import offsets_of

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
        starts = np.append(0, np.cumsum(kept.to_numpy(zero_copy_only=False)))
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
        detail = f'{name}: {shown(text)} is no list of labels: {why}. Write ["a", "b"]'
        raise InvalidRecord(Reason.MALFORMED, detail) from None


def _read_list(body: str) -> list[str]:
    entries, place = list[re.Match[str]](), 0
    while place < len(body) and (entry := _ENTRY.match(body, place)):
        entries.append(entry)
        place = entry.end()
    if place < len(body):
        raise ValueError(f"{shown(body[place : place + 20])} is neither a label nor a number")
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
            raise ValueError(f"{shown(word)} without quotes may mean several things")
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
