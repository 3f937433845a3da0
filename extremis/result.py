"""Results of functions: typed fields, which `--json` prints as one object, and what a terminal and a notebook show."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from extremis.console import format_value, results, table
from schemas.errors import without_controls

if TYPE_CHECKING:
    from typing_extensions import Self

_SHOWN_NUMBERS = 5  # numbers of a mapping that are shown


@dataclass(frozen=True)
class Grid:
    """A table of texts, of which the first `left` columns are left-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True, repr=False, kw_only=True)
class Result:
    """Base of what a function returns. A subclass states the fields; a field that is None by default may be absent.

    `more`: further values of the object that `--json` prints. `shown`: what a command prints, also in a notebook.
    """

    more: Mapping[str, object] = field(default_factory=dict)
    shown: Sequence[Grid | str] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any], shown: Sequence[Grid | str] = (), **facts: Any) -> "Self":
        """Make a result of `body` and `facts`: values without a field are `more`."""
        values, names = {**body, **facts}, {each.name for each in fields(cls)}
        more = {name: values.pop(name) for name in [*values] if name not in names}
        return cls(**values, more=more, shown=shown)

    def to_json(self) -> dict[str, object]:
        """Return the object of `--json`."""
        stated = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("more", "shown")}
        absent = {each.name for each in fields(self) if each.default is None and stated.get(each.name) is None}
        return {**{name: value for name, value in stated.items() if name not in absent}, **self.more}

    def _facts(self) -> list[list[str]]:
        cells = [[name, _format_cell(value)] for name, value in self.to_json().items()]
        return [[name, cell] for name, cell in cells if cell]

    def __repr__(self) -> str:
        lines = [type(self).__name__, *(f"  {name}: {cell}" for name, cell in self._facts())]
        for part in self.shown:
            lines += [part] if isinstance(part, str) else _draw(part)
        return without_controls("\n".join(lines))

    def _repr_html_(self) -> str:
        from scoring.containers import html_table  # imported late: it loads Arrow

        parts = [f"<b>{type(self).__name__}</b>", html_table([], self._facts())]
        for part in self.shown:
            if isinstance(part, str):
                parts.append(f"<pre>{html.escape(part)}</pre>")
            else:
                parts += [f"<b>{html.escape(part.title)}</b>", html_table(part.columns, part.rows)]
        return "".join(parts)


def show(result: Result) -> None:
    """Print what a command shows of its result."""
    for part in result.shown:
        if isinstance(part, str):
            results.print(part)
        else:
            table(part.title, part.columns, part.rows, part.left)


def _draw(grid: Grid) -> list[str]:
    widths = [max(map(len, column)) for column in zip(grid.columns, *grid.rows, strict=True)]
    lines = [f"  {grid.title}"]
    for row in (grid.columns, *grid.rows):
        sides = [str.ljust] * grid.left + [str.rjust] * (len(row) - grid.left)
        cells = [justify(cell, width) for justify, cell, width in zip(sides, row, widths, strict=True)]
        lines.append(f"    {'  '.join(cells)}".rstrip())
    return lines


def _format_cell(value: Any) -> str:
    """Return a value of a few characters; "" for a value that only a table can show."""
    if isinstance(value, Mapping) and 0 < len(value) <= _SHOWN_NUMBERS:
        is_plain = all(type(part) in (int, float) for part in value.values())
        return ", ".join(f"{key} {format_value(part)}" for key, part in value.items()) if is_plain else ""
    return "" if isinstance(value, Mapping | list | tuple) else format_value(value)
