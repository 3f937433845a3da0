"""Versions of exports: what an export needs of earlier exports, and which export of a folder is current."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from schemas import storage
from schemas.errors import InputError, TableError, option
from schemas.layout import check_folder, check_name
from schemas.manifest import Manifest, is_published
from schemas.owners import reading
from schemas.storage import join, relative, resolve
from schemas.table import Table
from schemas.versions import VERSION, part_name, require_tables
from schemas.waits import Say

KIND = "export"
CURRENT = "CURRENT"  # file in a folder of exports that names the current export; replaced as a whole
REPLACED = ".replaced"  # file in an export, written when another one becomes current in its place
_LONGEST = 1024  # longest content of CURRENT in bytes


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
    require_tables(table, needed, f"use another version, or export the run again without {option('onto')}")


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
            f"export into the file, or export again with {option('current', True)}."
        ) from None


def export_name(url: str) -> str:
    """Return the name of the export at `url` in CURRENT. Raises InputError if CURRENT cannot contain this name."""
    return check_name(f"{option('current', True)}: the folder", relative(resolve(url, ".."), resolve(url, ".")))


def make_current(url: str) -> str:
    """Make the export at `url` the current export in its folder, and return the URL of CURRENT.

    A process that opens the folder meanwhile gets either this export or the previous export. Raises InputError,
    StorageError.
    """
    if not is_published(url):
        raise InputError(f"{url}: no finished table here, so it cannot be made current.")
    parent, name = resolve(url, ".."), export_name(url)
    with contextlib.suppress(TableError):
        if (before := find_current(parent)) not in (None, join(parent, name)) and is_published(before):
            storage.write_bytes(join(before, REPLACED), b"\n")
    storage.write_bytes(join(parent, CURRENT), f"{name}\n".encode())
    return join(parent, CURRENT)


@contextlib.contextmanager
def in_use(url: str, say: Say) -> Iterator[None]:
    """Hold a lease on the export at `url` until the block ends, if `extremis clean` may remove it: beside a CURRENT."""
    with contextlib.ExitStack() as lease:
        with contextlib.suppress(InputError):  # the export is a whole bucket
            if storage.exists(join(resolve(url, ".."), CURRENT)):
                lease.enter_context(reading(url, say))
        yield
