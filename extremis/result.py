"""Results of commands: mappings whose keys are also attributes, with a readable display in a prompt or notebook."""

import html
from collections.abc import Mapping
from typing import Any

from extremis.console import format_value, metric_grid
from schemas.errors import without_controls
from scoring.containers import html_table

_SHOWN_ROWS = 12  # rows of a list that are shown
_SHOWN_NUMBERS = 5  # numbers of a mapping that are shown
_NUMBERS = (int, float)

Grid = tuple[list[str], list[list[str]]]


class Result(dict[str, Any]):
    """The object that a command prints with `--json`: `result["metrics"]`, or `result.metrics`."""

    def __init__(self, command: str, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self._command = command

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"{self._command}: the result has no {name!r}; known names: {', '.join(self)}."
            ) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def __repr__(self) -> str:
        lines = [f"extremis.{self._command}", *(f"  {name}: {value}" for name, value in self._fields().items())]
        for name, (columns, rows) in self._grids().items():
            widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
            lines += [f"  {name}:"]
            lines += [
                "    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
                for row in (columns, *rows)
            ]
        return without_controls("\n".join(lines))

    def _repr_html_(self) -> str:
        fields = [[name, value] for name, value in self._fields().items()]
        parts = [f"<b>extremis.{html.escape(self._command)}</b>", html_table([], fields)]
        for name, (columns, rows) in self._grids().items():
            parts += [f"<b>{html.escape(name)}</b>", html_table(columns, rows)]
        return "".join(parts)

    def _fields(self) -> dict[str, str]:
        return {name: _format_cell(value) for name, value in self.items() if name not in self._grids()}

    def _grids(self) -> dict[str, Grid]:
        grids = dict[str, Grid]()
        for name, value in self.items():
            if name == "metrics" and "intervals" in self:
                grids[name] = metric_grid(self)
            elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
                columns = [key for key, cell in value[-1].items() if not isinstance(cell, Mapping | list | tuple)]
                grids[name] = columns, [[_format_cell(row.get(key)) for key in columns] for row in value[-_SHOWN_ROWS:]]
        return grids


def _format_cell(value: Any) -> str:
    if (
        isinstance(value, Mapping)
        and len(value) <= _SHOWN_NUMBERS
        and all(type(part) in _NUMBERS for part in value.values())
    ):
        return ", ".join(f"{key} {_format_cell(part)}" for key, part in value.items())
    if isinstance(value, Mapping | list | tuple):
        return f"{len(value):,} values"
    return format_value(value)
