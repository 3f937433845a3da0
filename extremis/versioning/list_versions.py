"""Versions under a prefix: what each adds, what it needs, and what of that is gone."""

from dataclasses import dataclass
from typing import Any

from schemas import storage
from schemas.errors import TableError
from schemas.manifest import Manifest, is_published
from schemas.storage import join
from schemas.table import Table
from schemas.versions.version import Version, require_parts
from schemas.views.relative import relative, resolve


@dataclass(frozen=True)
class Listed:
    """A data set at `url`; `fault` says what it needs and has not."""

    url: str
    manifest: Manifest
    fault: str | None

    @property
    def version(self) -> Version:
        """Its place among versions."""
        return Version.of(self.manifest)

    @property
    def needs(self) -> dict[str, str]:
        """Other data sets that it needs: URL by part, oldest first."""
        return {part: resolve(self.url, place) for part, place in self.version.needs if place != "."}

    def facts(self, root: str) -> dict[str, Any]:
        """Return what there is to say, as JSON values; places are seen from `root`."""
        version, parameters = self.version, self.manifest.parameters
        return {
            "data": relative(root, self.url),
            "version": version.number,
            "part": version.part,
            "rows": parameters["rows"],
            "labels": parameters["labels"],
            "retired": version.retired,
            "needs": [relative(root, url) for url in dict.fromkeys(self.needs.values())],
            "digest": self.manifest.digest,
            "fault": self.fault,
        }


def list_versions(root: str) -> list[Listed]:
    """Return the data sets in the folders of `root`, by version and name; unfinished ones are left out."""
    urls = [join(root, name) for name in storage.list_names(root) if not name.startswith(".")]
    listed = [opened for url in urls if (opened := open_listed(url)) is not None]
    return sorted(listed, key=lambda each: (each.version.number, each.url))


def open_listed(url: str) -> Listed | None:
    """Open the data set at `url`; None where none is."""
    if not is_published(url):
        return None
    manifest = Table.open(url).manifest
    if manifest.kind != "data":
        return None
    try:
        require_parts(url, manifest)
    except TableError as error:
        return Listed(url, manifest, str(error))
    return Listed(url, manifest, None)


def needed_by(url: str, others: list[Listed]) -> list[Listed]:
    """Return those of `others` that need the data set at `url`."""
    place = resolve(url, ".")
    return [each for each in others if resolve(each.url, ".") != place and place in map(_plain, each.needs.values())]


def _plain(url: str) -> str:
    return resolve(url, ".")
