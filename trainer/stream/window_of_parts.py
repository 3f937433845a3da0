"""Windows of a version: the parts to train on, each a source dealt by its age."""

import fnmatch
import re
from collections.abc import Sequence

from schemas.errors import InputError
from schemas.manifest import Manifest
from schemas.versions.version import PartTable, parts_of
from trainer.stream.source import Source, Table


def sources_of_parts(table: Table, window: str | Sequence[str], half_life: float) -> list[Source]:
    """Return the parts of `table` that `window` names as sources, oldest first; with a weight by age.

    A part of age a, counted in parts of the window from the newest on, is dealt 2 ** (-a / half_life) times an epoch.
    Raises InputError where there is no such part.
    """
    parts = choose_parts(table, window)
    ages = range(len(parts) - 1, -1, -1)
    return [
        Source(f"queries-{part.name}", _part_of(table, part), weight=0.5 ** (age / half_life) if half_life else 1.0)
        for part, age in zip(parts, ages, strict=True)
    ]


def in_window(sources: list[Source], window: str | Sequence[str], half_life: float) -> list[Source]:
    """Return `sources` with the parts of the window in place of the queries. Raises InputError."""
    if not window and not half_life:
        return sources
    queries, *others = sources
    return [*sources_of_parts(queries.table, window, half_life), *others]


def choose_parts(table: Table, window: str | Sequence[str]) -> list[PartTable]:
    """Return the parts that `window` names: `last N`, a pattern, a list of names, or all for "". Raises InputError."""
    parts = parts_of(table.manifest)
    names = ", ".join(part.name for part in parts)
    if not parts:
        raise InputError(f"{table.url}: not of a version, so it has no parts. Leave out data.parts and data.half_life.")
    if isinstance(window, str):
        last = re.fullmatch(r"last (\d{1,9})", window.strip())
        if last:
            named = list(parts[-int(last[1]) :]) if int(last[1]) else []
        else:
            named = [part for part in parts if fnmatch.fnmatchcase(part.name, window or "*")]
    else:
        missing = sorted({*window} - {part.name for part in parts})
        if missing:
            raise InputError(f"data.parts: {table.url} has no part {', '.join(missing)}; it has {names}.")
        named = [part for part in parts if part.name in window]
    if not named:
        raise InputError(f"data.parts = {window!r}: {table.url} has no such part; it has {names}.")
    return named


def _part_of(table: Table, part: PartTable) -> Table:
    """Return the rows of one part as a table: shards of the same view, without a manifest of its own on storage."""
    shards = table.manifest.shards[part.first : part.stop]
    rows = sum(entry.rows for entry in shards)
    own: Manifest = table.manifest.model_copy(update={"shards": shards, "rows": rows, "id_range": (0, rows)})
    return Table(table.url, own)
