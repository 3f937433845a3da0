"""Exports under a prefix: which is current, what each needs, and what of that is gone."""

from dataclasses import dataclass
from typing import Any

from schemas import storage
from schemas.errors import TableError
from schemas.manifest import Manifest, is_published
from schemas.storage import join
from schemas.table import Table
from schemas.versions.current import find_current
from schemas.versions.exports import ExportVersion, require_needed
from schemas.views.relative import relative, resolve


@dataclass(frozen=True)
class ListedExport:
    """An export at `url`; `fault` says what it needs and has not."""

    url: str
    manifest: Manifest
    fault: str | None

    @property
    def needs(self) -> list[str]:
        """URLs of the exports whose files it names."""
        return [resolve(self.url, place) for _, place, _ in ExportVersion.of(self.manifest).needs]

    def facts(self, root: str) -> dict[str, Any]:
        """Return what there is to say, as JSON values; places are seen from `root`."""
        return {
            "export": relative(root, self.url),
            "part": ExportVersion.of(self.manifest).part,
            "labels": self.manifest.rows,
            "step": self.manifest.parameters.get("step"),
            "bytes": self._own_bytes,
            "needs": [relative(root, url) for url in self.needs],
            "digest": self.manifest.digest,
            "fault": self.fault,
        }

    @property
    def _own_bytes(self) -> int:
        entries = self.manifest.shards
        patches = [patch.bytes for entry in entries if entry.view for patch in entry.view.patches]
        return sum(entry.bytes for entry in entries if entry.view is None) + sum(patches)


def list_exports(root: str) -> list[ListedExport]:
    """Return the exports in the folders of `root`, by name; unfinished ones are left out."""
    urls = [join(root, name) for name in storage.list_names(root) if not name.startswith(".")]
    return [listed for url in urls if (listed := open_listed_export(url)) is not None]


def open_listed_export(url: str) -> ListedExport | None:
    """Open the export at `url`; None where none is."""
    if not is_published(url) or (manifest := Table.open(url).manifest).kind != "export":
        return None
    try:
        require_needed(url, manifest)
    except TableError as error:
        return ListedExport(url, manifest, str(error))
    return ListedExport(url, manifest, None)


def name_current(root: str) -> str | None:
    """Return the name of the current export of the folder `root`; None where it has none."""
    url = find_current(root)
    return None if url is None else relative(root, url)
