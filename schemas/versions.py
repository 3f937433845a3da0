"""Versions of data sets: the predecessor, the parts and the tables that a version needs."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from schemas.errors import TableError
from schemas.layout import DataLayout
from schemas.manifest import Manifest, View
from schemas.storage import join, relative, resolve
from schemas.table import Table

VERSION = "version"  # parameter of a data set or an export
_THREADS = 16


@dataclass(frozen=True)
class Version:
    """Version of a data set: path and digest of its predecessor, and the name of the part that it adds.

    `number` counts from 1; a data set without a predecessor has number 1. `needs`: (part, path of the part's data set)
    for all parts, oldest first. `retired`: number of labels that are no longer candidates. `lineage`: digests of the
    earlier versions, oldest first. `choices`: what determines the content in addition to the input and the options.
    """

    number: int
    part: str
    onto: str | None
    digest: str | None
    needs: list[tuple[str, str]]
    retired: int
    lineage: list[str]
    choices: dict[str, Any]

    @classmethod
    def of(cls, manifest: Manifest) -> "Version":
        """Read the version from a data set's manifest."""
        stated = manifest.parameters.get(VERSION)
        if stated is not None:
            return cls(**{**stated, "needs": [(part, place) for part, place in stated["needs"]]})
        part = manifest.parameters.get("part") or part_name(1)
        return cls(1, part, None, None, [(part, ".")], 0, [], {})

    @property
    def parts(self) -> list[str]:
        """Names of all parts, oldest first."""
        return [part for part, _ in self.needs]


def parts_since(data: Manifest, digest: str) -> list[str] | None:
    """Return the parts of `data` that the version with `digest` lacks; None if `data` does not extend this version."""
    version = Version.of(data)
    lineage = [*version.lineage, data.digest]
    return version.parts[lineage.index(digest) + 1 :] if digest in lineage else None


def part_name(number: int) -> str:
    """Return the default name of the part of version `number`."""
    return f"{number:04d}"


def open_data(data: str) -> tuple[Table, dict[str, Table]]:
    """Open the data set at `data`; return it and its tables by name. Every table and part must exist.

    Raises TableError, which names missing or changed parts.
    """
    table = Table.open(data, "data")
    tables = {name: Table.open(join(data, name)) for name in table.parents}
    for name, opened in tables.items():
        if opened.digest != table.parents[name]:
            raise TableError(f"{opened.url}: this table was replaced after {data} was published. Shard the data again.")
    require_parts(table)
    return table, tables


def require_parts(table: Table) -> None:
    """Raise TableError, which names the parts, if parts of a version of data are missing or changed."""
    if VERSION not in table.parameters:
        return
    urls = [join(table.url, name) for name in table.parents if name.startswith("queries/")]
    urls.append(DataLayout(table.url).labels)
    needed = {(resolve(url, part.table), part.digest): part.name for url in urls for part in Table.open(url).parts}
    require_tables(table, needed, "or use a version without this part")


def require_tables(table: Table, needed: Mapping[tuple[str, str], str], remedy: str) -> None:
    """Raise TableError, which names the parts, if any of `needed` (a table's URL and digest) is missing or changed."""

    def fault(place: tuple[str, str], part: str) -> str | None:
        url, digest = place
        try:
            same = Table.open(url).digest == digest
        except TableError:
            return f"part {part} ({url}) is missing"
        return None if same else f"part {part} ({url}) has been rebuilt since"

    with ThreadPoolExecutor(_THREADS) as pool:
        faults = "; ".join(filter(None, pool.map(fault, needed, needed.values())))
    if faults:
        raise TableError(f"{table.url}: files that this version needs are missing: {faults}. Restore them, {remedy}.")


def move_view(view: View, before: str, after: str) -> View:
    """Return the view of a table at `before`, with paths that are relative to a table at `after`."""
    patches = {
        name: patch.model_copy(update={"place": relative(after, resolve(before, patch.place))})
        for name in ("gone", "columns", "changed")
        if (patch := getattr(view, name)) is not None
    }
    return view.model_copy(update={"table": relative(after, resolve(before, view.table)), **patches})
