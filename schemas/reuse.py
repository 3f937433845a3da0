"""Reuse of existing tables: the requested table is kept, a stale table is rebuilt, and any other table is an error."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import InputError
from schemas.manifest import Manifest, is_published
from schemas.table import Table


@dataclass(frozen=True)
class Request:
    """A requested table: its kind, the digests of its parents, and the parameters that determine its content.

    If `parents` is None, the parameters contain the parents. `section`: name of the manifest's parameter that contains
    the other parameters. A parameter that a manifest lacks counts as None; additional parameters are ignored.
    """

    kind: str
    parents: Mapping[str, str] | None
    parameters: Mapping[str, Any]
    section: str | None = None

    def changes(self, manifest: Manifest, recorded: Mapping[str, Any]) -> Iterator[str]:
        """Describe the differences between the requested table and a finished table; empty if there are none."""
        if self.parents is not None:
            names = sorted({*manifest.parents, *self.parents})
            yield from (f"other {name}" for name in names if manifest.parents.get(name) != self.parents.get(name))
        for name, value in json.loads(json.dumps(self.parameters)).items():
            yield from _changes(name, recorded.get(name), value)


def find_reusable(
    url: str,
    request: Request,
    remedy: str,
    *,
    overwrite: bool = False,
    is_stale: Callable[[Mapping[str, Any]], bool] | None = None,
    check_replaceable: Callable[[str, Manifest], None] | None = None,
) -> Manifest | None:
    """Return the table at `url` if it is the requested table; None if the table must be built.

    A table with different options is rebuilt if `overwrite` is true, or if its parents differ and
    `is_stale(parameters)` is true because its input was rewritten. `check_replaceable` is called first. Raises
    InputError for any other table; the message names the differences and ends with `remedy`.
    """
    if not is_published(url):
        return None
    manifest = Table.open(url).manifest
    recorded = manifest.parameters.get(request.section) if request.section else manifest.parameters
    if manifest.kind != request.kind or recorded is None:
        raise InputError(
            f"{url}: contains a finished {manifest.kind} table, but this command writes a {request.kind} table. Give "
            "another path."
        )
    changes = list(request.changes(manifest, recorded))
    if not changes:
        return manifest
    other_parents = request.parents is not None and manifest.parents != request.parents
    if not (overwrite or (is_stale is not None and other_parents and is_stale(recorded))):
        raise InputError(
            f"{url}: contains a finished {manifest.kind} table that was made with other options "
            f"({'; '.join(changes)}). {remedy}"
        )
    if check_replaceable is not None:
        check_replaceable(url, manifest)
    return None


def find_by_parents(url: str, kind: str, parents: Mapping[str, str]) -> Manifest | None:
    """Return the table at `url` if it was built from these parents, whatever its parameters. Raises TableError."""
    table = Table.find(url, kind)
    return table.manifest if table is not None and table.parents == parents else None


def _changes(name: str, before: Any, after: Any) -> Iterator[str]:
    nested = [value for value in (before, after) if isinstance(value, Mapping)]
    if len(nested) == 2 and not any("sha256" in value for value in nested):
        for key in sorted({*before, *after}):
            yield from _changes(f"{name}.{key}", before.get(key), after.get(key))
    elif before != after:
        yield f"{name} was {_shown(before)}, now it is {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "sha256" in value:
        return f"{value.get('file')} ({value.get('bytes')} bytes, SHA-256 {str(value['sha256'])[:12]}…)"
    return "not set" if value is None else repr(value)
