"""Versions of data and exports under a prefix: what there is, what each needs, what of that is gone; removing one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from extremis.console import say
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, staging
from schemas.manifest import unpublish
from schemas.owners.claim import claimed
from schemas.storage import join, relative, resolve
from schemas.table import Table
from schemas.version import ExportVersion, Version, find_current, require_needed, require_parts


@dataclass(frozen=True)
class ListedData:
    """A data set; `fault` says what it needs and has not."""

    table: Table
    fault: str | None

    @property
    def version(self) -> Version:
        """Its place among versions."""
        return Version.of(self.table.manifest)

    @property
    def needs(self) -> dict[str, str]:
        """Other data sets that it needs: URL by part, oldest first."""
        return {part: resolve(self.table.url, place) for part, place in self.version.needs if place != "."}

    def facts(self, root: str) -> dict[str, Any]:
        """Return what there is to say, as JSON values; places are seen from `root`."""
        version, parameters = self.version, self.table.parameters
        return {
            "data": relative(root, self.table.url),
            "version": version.number,
            "part": version.part,
            "rows": parameters["rows"],
            "labels": parameters["labels"],
            "retired": version.retired,
            "needs": [relative(root, url) for url in dict.fromkeys(self.needs.values())],
            "digest": self.table.digest,
            "fault": self.fault,
        }


@dataclass(frozen=True)
class ListedExport:
    """An export; `fault` says what it needs and has not."""

    table: Table
    fault: str | None

    @property
    def needs(self) -> list[str]:
        """URLs of the exports whose files it names."""
        return [resolve(self.table.url, place) for _, place, _ in ExportVersion.of(self.table.manifest).needs]

    def facts(self, root: str) -> dict[str, Any]:
        """Return what there is to say, as JSON values; places are seen from `root`."""
        return {
            "export": relative(root, self.table.url),
            "part": ExportVersion.of(self.table.manifest).part,
            "labels": self.table.rows,
            "step": self.table.parameters.get("step"),
            "bytes": self._own_bytes,
            "needs": [relative(root, url) for url in self.needs],
            "digest": self.table.digest,
            "fault": self.fault,
        }

    @property
    def _own_bytes(self) -> int:
        patches = [patch.bytes for entry in self.table.shards if entry.view for patch in entry.view.patches]
        return sum(entry.bytes for entry in self.table.shards if entry.view is None) + sum(patches)


def list_data(root: str) -> list[ListedData]:
    """Return the data sets in the folders of `root`, by version and name; unfinished ones are left out."""
    listed = [opened for url in _folders(root) if (opened := find_data(url)) is not None]
    return sorted(listed, key=lambda each: (each.version.number, each.table.url))


def list_exports(root: str) -> list[ListedExport]:
    """Return the exports in the folders of `root`, by name; unfinished ones are left out."""
    return [opened for url in _folders(root) if (opened := find_export(url)) is not None]


def find_data(url: str) -> ListedData | None:
    """Open the data set at `url`; None where none is."""
    table = Table.find(url)
    return ListedData(table, _fault(require_parts, table)) if table is not None and table.kind == "data" else None


def find_export(url: str) -> ListedExport | None:
    """Open the export at `url`; None where none is."""
    table = Table.find(url)
    return ListedExport(table, _fault(require_needed, table)) if table is not None and table.kind == "export" else None


def name_current(root: str) -> str | None:
    """Return the name of the current export of the folder `root`; None where it has none."""
    url = find_current(root)
    return None if url is None else relative(root, url)


def drop(url: str) -> dict[str, Any]:
    """Remove the data set, or the export, at `url`, invisible first.

    Raises InputError: none is there, or one beside it needs a part of it; ClaimedError: it is being made.
    """
    with claimed(url, "removed", say):
        export, data = find_export(url), find_data(url)
        if export is not None:
            _require_unneeded_export(export)
            unpublish(url)
            folders = sorted({path.partition("/")[0] for path in export.table.manifest.files})
        elif data is not None:
            _require_unneeded(data)
            unpublish(url)
            folders = [*DataLayout.FOLDERS]
        else:
            raise InputError(f"{url}: no data set or export here. extremis data list names those of a prefix.")
        for name in folders:
            storage.remove(join(url, name), recursive=True)
        storage.remove(staging(url), recursive=True)
    say(f"{url}: removed")
    removed = export or data
    assert removed is not None
    return {"export" if export else "data": url, "digest": removed.table.digest}


def _require_unneeded_export(export: ListedExport) -> None:
    """Raise InputError where an export is current, or one beside it names its files."""
    url = resolve(export.table.url, ".")
    folder = resolve(url, "..")
    current = find_current(folder)
    if current is not None and resolve(current, ".") == url:
        raise InputError(f"{url}: the current export of {folder}. Make another one current first.")
    others = [other.table.url for other in list_exports(folder) if url in other.needs]
    if others:
        raise InputError(f"{url}: {', '.join(others)} need its files. Drop these first.")


def _require_unneeded(data: ListedData) -> None:
    """Raise InputError that names the data sets beside this one that need it."""
    url = resolve(data.table.url, ".")
    others = [
        f"{each.table.url} (version {each.version.number})"
        for each in list_data(resolve(url, ".."))
        if resolve(each.table.url, ".") != url and url in (resolve(place, ".") for place in each.needs.values())
    ]
    if others:
        raise InputError(
            f"{data.table.url}: {', '.join(others)} need its part {data.version.part}. Drop these first, the newest "
            "one first."
        )


def _folders(root: str) -> list[str]:
    return [join(root, name) for name in storage.list_names(root) if not name.startswith(".")]


def _fault(require: Callable[[Table], None], table: Table) -> str | None:
    """Return what `require` says against a table; None: nothing."""
    try:
        require(table)
    except TableError as error:
        return str(error)
    return None
