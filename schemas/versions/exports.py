"""Versions of an export: what a manifest says about them, and whether all that one needs is still there."""

from dataclasses import asdict, dataclass
from typing import Any

from schemas.errors import TableError
from schemas.manifest import Manifest
from schemas.versions.version import VERSION, fault_of, part_name
from schemas.views.relative import relative, resolve


@dataclass(frozen=True)
class ExportVersion:
    """Place of an export among versions: the part of the data that it was made with, and the export it goes on from.

    `onto`: place of that export, with its `digest`; None: it goes on from none. `needs`: (part, place, digest) of all
    exports whose files it names.
    """

    part: str
    onto: str | None = None
    digest: str | None = None
    needs: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> "ExportVersion":
        """Read it from an export's manifest."""
        stated = manifest.parameters.get(VERSION)
        if stated is None:
            return cls(part_name(1))
        return cls(**{**stated, "needs": tuple((part, place, digest) for part, place, digest in stated["needs"])})

    def stated(self) -> dict[str, Any]:
        """Return it as the manifest states it."""
        return asdict(self)

    def moved(self, before: str, after: str) -> tuple[tuple[str, str, str], ...]:
        """Return what the export at `before` needs, as seen from `after`."""
        return tuple((part, relative(after, resolve(before, place)), digest) for part, place, digest in self.needs)


def require_needed(url: str, manifest: Manifest) -> None:
    """Raise TableError that names the exports that the one at `url` needs, and that are gone or made again."""
    needs = ExportVersion.of(manifest).needs
    faults = [fault for part, place, digest in needs if (fault := fault_of((resolve(url, place), digest), part))]
    if faults:
        raise TableError(
            f"{url}: needs what is not there: {'; '.join(faults)}. Put it back, use another version, or export the run "
            "again without --onto."
        )
