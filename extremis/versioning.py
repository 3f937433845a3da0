"""Versions of data and exports in a folder: lists versions, their dependencies, and the files of each."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from extremis.console import say
from extremis.result import Grid
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import MANIFEST, DataLayout
from schemas.storage import join, relative, resolve
from schemas.table import Table
from schemas.versions import Version, require_parts
from scoring.export_versions import REPLACED, ExportVersion, find_current, require_needed_exports


@dataclass(frozen=True)
class _Listed:
    """A data set or export; `needs`: URLs of the others whose files it uses; `names` of its files, the first first."""

    table: Table

    KIND: ClassVar[str]

    @classmethod
    def find(cls, url: str) -> Self | None:
        """Open the item at `url`; None if there is no item of this kind."""
        table = Table.find(url)
        return None if table is None or table.kind != cls.KIND else cls(table)

    @functools.cached_property
    def fault(self) -> str | None:
        """Description of files that the item needs but that are missing."""
        try:
            (require_parts if self.KIND == "data" else require_needed_exports)(self.table)
        except TableError as error:
            return str(error)
        return None

    @property
    def url(self) -> str:
        """The item's URL, which no other one has."""
        return resolve(self.table.url, ".")

    @classmethod
    def below(cls, root: str) -> list[Self]:
        """Return the finished items in the folders of `root`, sorted by name."""
        names = (name for name in storage.list_names(root) if not name.startswith("."))
        return [found for name in names if (found := cls.find(join(root, name))) is not None]


class ListedData(_Listed):
    KIND = "data"
    names = (MANIFEST, *DataLayout.FOLDERS, ".staging")

    @functools.cached_property
    def version(self) -> Version:
        return Version.of(self.table.manifest)

    @property
    def family(self) -> str:
        """Digest of the first version, which all its later versions share."""
        return (self.version.lineage or [self.table.digest])[0]

    @property
    def parts(self) -> dict[str, str]:
        """The URL of the data set with each part, oldest first."""
        return {part: resolve(self.table.url, place) for part, place in self.version.needs}

    @property
    def needs(self) -> list[str]:
        return [url for url in dict.fromkeys(self.parts.values()) if url != self.url]

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
            "needs": [relative(root, url) for url in self.needs],
            "digest": self.table.digest,
            "fault": self.fault,
        }


class ListedExport(_Listed):
    KIND = "export"

    @property
    def names(self) -> list[str]:
        return [MANIFEST, *sorted({path.partition("/")[0] for path in self.table.manifest.files}), REPLACED, ".staging"]

    @property
    def needs(self) -> list[str]:
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


Listed = ListedData | ListedExport


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
    places = listed.parts
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
