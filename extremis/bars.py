"""Bars and tables, drawn by rich; a command loads rich when it shows its first bar or table."""

from collections.abc import Callable, Sequence
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text


class SafeConsole(Console):
    """A console that prints cleaned texts literally, also in table cells, and does not interpret markup or emoji."""

    def __init__(self, clean: Callable[[str], str], **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)
        self._clean = clean

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(self._clean(text), **options)


def make_bars(console: Console, counted: bool) -> progress.Progress:
    """Make progress bars with counts and times if `counted`, else with a note for the counts. Texts must be clean."""
    title, note = (progress.TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
    counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    columns = title, progress.BarColumn(), *(counts if counted else ()), note
    return progress.Progress(*columns, console=console, transient=True)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table; the first column is left-aligned, the others right-aligned, and no number is truncated."""
    grid = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        first = number == 0
        grid.add_column(column, justify="left" if first else "right", no_wrap=first, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid
