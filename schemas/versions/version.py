"""Versions of a data set: what a manifest says about them, and whether all that one needs is still there."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from schemas.errors import TableError
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.storage import join
from schemas.table import Table
from schemas.views.relative import relative, resolve
from schemas.views.view import View

VERSION = "version"  # parameter of a data set
_THREADS = 16


@dataclass(frozen=True)
class Version:
    """Place of a data set among versions: the one it goes on from, by place and digest, and its part's name.

    `number` counts from 1; a data set that goes on from none is 1. `needs`: (part, place of its data set) of all parts,
    oldest first. `retired`: labels that are no candidates. `lineage`: digests of the versions before, the first one's
    first. `choices`: what decides its content besides its input and options.
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
        """Read it from a data set's manifest."""
        stated = manifest.parameters.get(VERSION)
        if stated is not None:
            return cls(**{**stated, "needs": [(part, place) for part, place in stated["needs"]]})
        part = manifest.parameters.get("part") or part_name(1)
        return cls(1, part, None, None, [(part, ".")], 0, [], {})

    @property
    def parts(self) -> list[str]:
        """Names of all parts, oldest first."""
        return [part for part, _ in self.needs]

    def stated(self) -> dict[str, Any]:
        """Return it as the manifest states it."""
        return asdict(self)


def parts_since(data: Manifest, digest: str) -> list[str] | None:
    """Return the parts of `data` that the version of `digest` had not; None where this is none of its versions."""
    version = Version.of(data)
    lineage = [*version.lineage, data.digest]
    return version.parts[lineage.index(digest) + 1 :] if digest in lineage else None


def part_name(number: int) -> str:
    """Return the name of the part of version `number` where nobody gives one."""
    return f"{number:04d}"


def own_digest(data: str) -> str:
    """Return the digest of the data set at `data`, all whose tables and parts have to be there.

    Raises TableError that names what is gone or another.
    """
    manifest = Table.open(data, "data").manifest
    for name, digest in manifest.parents.items():
        if Table.open(join(data, name)).digest != digest:
            raise TableError(f"{join(data, name)}: not the table that {data} was published with. Shard the data again.")
    require_parts(data, manifest)
    return manifest.digest


def require_parts(data: str, manifest: Manifest) -> None:
    """Raise TableError that names the parts of the version at `data` that are gone, or others than it was made of."""
    if VERSION not in manifest.parameters:
        return
    layout = DataLayout(data)
    tables = {name: join(data, name) for name in manifest.parents if name.startswith("queries/")}
    tables["labels"] = layout.labels
    needed = {
        (resolve(url, part.table), part.digest): part.name for url in tables.values() for part in Table.open(url).parts
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = [fault for fault in pool.map(fault_of, needed, needed.values()) if fault]
    if faults:
        raise TableError(
            f"{data}: needs what is not there: {'; '.join(faults)}. Put it back, or use a version without this part."
        )


def fault_of(needed: tuple[str, str], part: str) -> str | None:
    """Say that the table (URL, digest) of a part is gone, or another one; None: it is there."""
    url, digest = needed
    try:
        same = Table.open(url).digest == digest
    except TableError:
        return f"part {part} ({url}) is gone"
    return None if same else f"part {part} ({url}) was made again since"


def moved(view: View, before: str, after: str) -> View:
    """Return a view of the table at `before` as one of the table at `after`."""
    patches = {
        name: patch.model_copy(update={"place": relative(after, resolve(before, patch.place))})
        for name in ("gone", "columns", "changed")
        if (patch := getattr(view, name)) is not None
    }
    return view.model_copy(update={"table": relative(after, resolve(before, view.table)), **patches})
