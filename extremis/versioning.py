"""Versions of data and exports in a folder: lists versions and their dependencies, and removes a version."""

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from extremis.console import say
from extremis.result import Grid
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, staging
from schemas.manifest import unpublish
from schemas.owners import claimed
from schemas.storage import join, relative, resolve
from schemas.table import Table
from schemas.versions import Version, require_parts
from scoring.export_versions import ExportVersion, find_current, require_needed_exports


@dataclass(frozen=True)
class _Listed:
    """A data set or export. `fault`: describes files that the item needs but that are missing."""

    table: Table
    fault: str | None

    KIND: ClassVar[str]

    @classmethod
    def find(cls, url: str) -> Self | None:
        """Open the item at `url`; None if there is no item of this kind."""
        table = Table.find(url)
        if table is None or table.kind != cls.KIND:
            return None
        try:
            (require_parts if cls.KIND == "data" else require_needed_exports)(table)
        except TableError as error:
            return cls(table, str(error))
        return cls(table, None)

    @classmethod
    def below(cls, root: str) -> list[Self]:
        """Return the finished items in the folders of `root`, sorted by name."""
        names = (name for name in storage.list_names(root) if not name.startswith("."))
        return [found for name in names if (found := cls.find(join(root, name))) is not None]


class ListedData(_Listed):
    KIND = "data"
    folders = DataLayout.FOLDERS

    @property
    def version(self) -> Version:
        return Version.of(self.table.manifest)

    @property
    def needs(self) -> dict[str, str]:
        """The other data sets that this data set needs: URL by part, oldest first."""
        return {part: resolve(self.table.url, place) for part, place in self.version.needs if place != "."}

    def to_json(self, root: str) -> dict[str, Any]:
        """Return information about the data set as JSON values; paths are relative to `root`."""
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

    def require_unneeded(self, url: str, folder: str) -> None:
        """Raise InputError if other data sets in `folder` need this data set at `url`; the message names them."""
        others = [
            f"{each.table.url} (version {each.version.number})"
            for each in ListedData.below(folder)
            if resolve(each.table.url, ".") != url and url in (resolve(place, ".") for place in each.needs.values())
        ]
        if others:
            raise InputError(
                f"{self.table.url}: {', '.join(others)} need the part {self.version.part} of this data set. Drop these "
                "first, beginning with the newest."
            )


class ListedExport(_Listed):
    KIND = "export"

    @property
    def folders(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self.table.manifest.files})

    @property
    def needs(self) -> list[str]:
        """URLs of the exports whose files this export uses."""
        return [resolve(self.table.url, place) for _, place, _ in ExportVersion.of(self.table.manifest).needs]

    def to_json(self, root: str) -> dict[str, Any]:
        """Return information about the export as JSON values; paths are relative to `root`."""
        patches = [patch.bytes for entry in self.table.shards if entry.view for patch in entry.view.patches]
        return {
            "export": relative(root, self.table.url),
            "part": ExportVersion.of(self.table.manifest).part,
            "labels": self.table.rows,
            "step": self.table.parameters.get("step"),
            "bytes": sum(entry.bytes for entry in self.table.shards if entry.view is None) + sum(patches),
            "needs": [relative(root, url) for url in self.needs],
            "digest": self.table.digest,
            "fault": self.fault,
        }

    def require_unneeded(self, url: str, folder: str) -> None:
        """Raise InputError if the export at `url` is current, or if another export in `folder` uses its files."""
        current = find_current(folder)
        if current is not None and resolve(current, ".") == url:
            raise InputError(f"{url}: this is the current export of {folder}. Make another export current first.")
        others = [other.table.url for other in ListedExport.below(folder) if url in other.needs]
        if others:
            raise InputError(f"{url}: {', '.join(others)} need files of this export. Drop these exports first.")


def drop(place: str) -> dict[str, Any]:
    """Unpublish and remove the data set or export at `place`.

    Raises InputError if there is none, or if it is still needed; ClaimedError if another process is writing it.
    """
    with claimed(place, "removed", say):
        listed = ListedExport.find(place) or ListedData.find(place)
        if listed is None:
            raise InputError(
                f"{place}: no data set or export here. extremis data list shows the data sets and exports in a folder."
            )
        url = resolve(place, ".")
        listed.require_unneeded(url, resolve(url, ".."))
        unpublish(place)
        for name in listed.folders:
            storage.remove(join(place, name), recursive=True)
        storage.remove(staging(place), recursive=True)
    say(f"{place}: removed")
    return {listed.KIND: place, "digest": listed.table.digest}


def list_all(root: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str | None, list[Grid]]:
    """Return the data versions and the exports in a folder, the current export, and tables of both."""
    listed = sorted(ListedData.below(root), key=lambda each: (each.version.number, each.table.url))
    versions = [each.to_json(root) for each in listed]
    exports = [each.to_json(root) for each in ListedExport.below(root)]
    url = find_current(root)
    current = None if url is None else relative(root, url)
    data_rows, export_rows = list[list[str]](), list[list[str]]()
    for each in versions:
        counts = [f"{count:,}" for count in (each["rows"].get("train", 0), each["labels"], each["retired"])]
        needs = "files are missing: see extremis data show" if each["fault"] else ", ".join(each["needs"]) or "nothing"
        data_rows.append([each["data"], str(each["version"]), each["part"], *counts, needs])
    for each in exports:
        name = f"{each['export']}{' (current)' if each['export'] == current else ''}"
        needs = "files are missing" if each["fault"] else ", ".join(each["needs"]) or "nothing"
        export_rows.append([name, each["part"], f"{each['labels']:,}", f"{each['bytes']:,}", needs])
    grids = [
        Grid(f"versions under {root}", ["data", "version", "part", "train", "labels", "retired", "needs"], data_rows),
        Grid(f"exports under {root}", ["export", "part", "labels", "own bytes", "needs"], export_rows),
    ]
    return versions, exports, current, [grid for grid in grids if grid.rows]


def show(url: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[Grid]]:
    """Return the facts of the data set at `url`, its parts, and a table of them. Raises InputError if there is none."""
    listed = ListedData.find(url)
    if listed is None:
        raise InputError(f"{url}: no data set here. extremis data list shows the data sets in a folder.")
    places = {**listed.needs, listed.version.part: resolve(url, ".")}
    rows: dict[str, dict[str, int]] = {part: {} for part in places}
    for name in listed.table.parents:
        if name == "labels" or name.startswith("queries/"):
            opened = Table.open(join(url, name))
            counts = {part.name: part.rows for part in opened.parts} or {listed.version.part: opened.rows}
            for part, count in counts.items():
                rows[part][name.removeprefix("queries/")] = count
    names = sorted({name for counts in rows.values() for name in counts})
    lines = [[part, places[part], *(f"{counts.get(name, 0):,}" for name in names)] for part, counts in rows.items()]
    if listed.fault:
        say(listed.fault)
    parts = [{"part": part, "data": places[part], "rows": rows[part]} for part in places]
    return listed.to_json(url), parts, [Grid(f"parts of {url}", ["part", "data", *names], lines)]
