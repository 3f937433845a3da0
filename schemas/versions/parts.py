"""Parts of a version's table: those that a window names, and their rows as a table of their own."""

import fnmatch
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from schemas.errors import InputError
from schemas.manifest import Manifest
from schemas.versions.version import PARTS, PartTable, parts_of


def choose_parts(url: str, table: Manifest, window: str | Sequence[str]) -> list[PartTable]:
    """Return the parts that `window` names: `last N`, a pattern, a list of names, or all for "". Raises InputError."""
    parts = parts_of(table)
    names = ", ".join(part.name for part in parts)
    if not parts:
        raise InputError(f"{url}: not of a version, so it has no parts. Leave out what names or weighs parts.")
    if isinstance(window, str):
        last = re.fullmatch(r"last (\d{1,9})", window.strip())
        if last:
            named = list(parts[-int(last[1]) :]) if int(last[1]) else []
        else:
            named = [part for part in parts if fnmatch.fnmatchcase(part.name, window or "*")]
    else:
        missing = sorted({*window} - {part.name for part in parts})
        if missing:
            raise InputError(f"parts: {url} has no part {', '.join(missing)}; it has {names}.")
        named = [part for part in parts if part.name in window]
    if not named:
        raise InputError(f"parts = {window!r}: {url} has no such part; it has {names}.")
    return named


def rows_of_parts(table: Manifest, parts: Sequence[PartTable]) -> Manifest:
    """Return the manifest of the rows of some parts: shards of the same view, each row with its id there.

    It is on no storage, and the same wherever it is made. `id_range` is None where the parts are no neighbours.
    """
    shards = tuple(shard for part in parts for shard in table.shards[part.first : part.stop])
    rows = sum(shard.rows for shard in shards)
    first = sum(shard.rows for shard in table.shards[: parts[0].first])
    neighbours = len(shards) == parts[-1].stop - parts[0].first
    edges = itertools.pairwise(itertools.accumulate((part.stop - part.first for part in parts), initial=0))
    own = [vars(replace(part, first=start, stop=stop)) for part, (start, stop) in zip(parts, edges, strict=True)]
    changes = {
        "shards": shards,
        "rows": rows,
        "id_range": (first, first + rows) if neighbours else None,
        "parameters": {**table.parameters, PARTS: own},
    }
    return table.model_copy(update=changes)


def source_of_part(source: str, part: str) -> str:
    """Return the name that rows of one part have among the sources of a run."""
    return f"{source}-{part}"


def part_of_source(name: str, source: str, table: Manifest) -> PartTable | None:
    """Return the part of `table` that the source `name` is, where it is one of the parts of `source`."""
    return next((part for part in parts_of(table) if source_of_part(source, part.name) == name), None)
