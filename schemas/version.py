"""Versions of data sets and exports: which predecessor and files a version needs, and which export is current."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, check_folder, check_name
from schemas.manifest import Manifest, View, is_published
from schemas.storage import join, relative, resolve
from schemas.table import Table

CURRENT = "CURRENT"  # file in a folder of exports that names the current export; replaced as a whole
VERSION = "version"  # parameter of a data set
_THREADS = 16
_LONGEST = 1024  # longest content of CURRENT in bytes


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
    _require_all(table, needed, "or use a version without this part")


def _require_all(table: Table, needed: Mapping[tuple[str, str], str], remedy: str) -> None:
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


@dataclass(frozen=True)
class ExportVersion:
    """Version of an export: the name of the newest part in the exported data, and the predecessor of the export.

    `onto`, `digest`: path and digest of the predecessor; None if there is none. `needs`: (part, path, digest) for all
    exports whose files this export uses.
    """

    part: str
    onto: str | None = None
    digest: str | None = None
    needs: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> "ExportVersion":
        """Read the version from an export's manifest."""
        stated = manifest.parameters.get(VERSION)
        if stated is None:
            return cls(part_name(1))
        return cls(**{**stated, "needs": tuple((part, place, digest) for part, place, digest in stated["needs"])})

    def moved(self, before: str, after: str) -> tuple[tuple[str, str, str], ...]:
        """Return `needs` of the export at `before`, with paths relative to `after`."""
        return tuple((part, relative(after, resolve(before, place)), digest) for part, place, digest in self.needs)


def require_needed_exports(table: Table) -> None:
    """Raise TableError, which names the exports, if needed exports are missing or were rebuilt."""
    needs = ExportVersion.of(table.manifest).needs
    needed = {(resolve(table.url, place), digest): part for part, place, digest in needs}
    _require_all(table, needed, "use another version, or export the run again without --onto")


def resolve_export(url: str) -> str:
    """Return `url` itself, or the current export if `url` is a folder of exports.

    Raises InputError if no export is current; TableError if CURRENT names no export; StorageError.
    """
    if is_published(url):
        return url
    current = find_current(url)
    if current is None and any(is_published(join(url, name)) for name in storage.list_names(url)):
        raise InputError(
            f"{url}: no export in this folder is current. Name an export in the folder, or make an export current with "
            "extremis export --current."
        )
    return current or url


def find_current(url: str) -> str | None:
    """Return the URL of the export that CURRENT names in the folder `url`; None if there is no such file.

    Raises TableError if CURRENT names no export; StorageError.
    """
    place = join(url, CURRENT)
    try:
        content = storage.read_bytes(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return join(url, check_folder(content[:_LONGEST].decode().strip()))
    except (InputError, UnicodeDecodeError):
        raise TableError(
            f"{place}: expected the name of a folder next to this file, got {content[:60]!r}. Write the name of an "
            "export into the file, or export again with --current."
        ) from None


def export_name(url: str) -> str:
    """Return the name of the export at `url`, as written to CURRENT.

    Raises InputError if CURRENT cannot contain this name.
    """
    return check_name("--current: the folder", relative(resolve(url, ".."), resolve(url, ".")))


def make_current(url: str) -> str:
    """Make the export at `url` the current export in its folder, and return the URL of CURRENT.

    A process that opens the folder meanwhile gets either this export or the previous export. Raises InputError,
    StorageError.
    """
    if not is_published(url):
        raise InputError(f"{url}: no finished table here, so it cannot be made current.")
    parent, name = resolve(url, ".."), export_name(url)
    storage.write_bytes(join(parent, CURRENT), f"{name}\n".encode())
    return join(parent, CURRENT)
