"""List of the tables below a prefix, finished or not, and the check that they fit together."""

from collections.abc import Iterator
from dataclasses import dataclass

from schemas import storage
from schemas.errors import TableError
from schemas.layout import MANIFEST
from schemas.manifest import Manifest, names_manifest
from schemas.storage import join
from schemas.table import Table

DEPTH = 4  # levels of folders that are searched
FOLDERS = 10_000  # most folders that are searched


@dataclass(frozen=True)
class ListedTable:
    """A table below a prefix: its manifest, or its fault."""

    name: str
    url: str
    manifest: Manifest | None
    fault: str = ""

    @property
    def bytes(self) -> int:
        return 0 if self.manifest is None else sum(shard.bytes for shard in self.manifest.shards)


def list_tables(url: str) -> list[ListedTable]:
    """List every table below the prefix `url`, and every folder of shards without a manifest, in order of names."""
    folders = 0

    def walk(place: str, name: str, depth: int) -> Iterator[ListedTable]:
        nonlocal folders
        entries = storage.list_names(place)
        folders += 1
        if name and names_manifest(entries):
            yield _open(name, place)
        elif any(entry.startswith("part-") for entry in entries):
            yield ListedTable(name, place, None, f"unfinished: {len(entries)} file(s) and no {MANIFEST}")
        elif depth:
            for entry in entries:
                if "." not in entry and entry != "tensorboard" and folders < FOLDERS:
                    yield from walk(join(place, entry), f"{name}/{entry}".strip("/"), depth - 1)

    return list(walk(url, "", DEPTH))


def _open(name: str, url: str) -> ListedTable:
    try:
        return ListedTable(name, url, Table.open(url).manifest)
    except TableError as error:
        return ListedTable(name, url, None, str(error))


def find_mismatches(data: Manifest | None, tables: list[ListedTable]) -> dict[str, list[str]]:
    """Find tables that cannot be read, and parts of DATA that have another digest than its manifest says, by name."""
    faults = {item.name: [item.fault] for item in tables if item.fault}
    digests = {item.name: item.manifest.digest for item in tables if item.manifest is not None}
    for name, digest in (data.parents if data is not None else {}).items():
        if name not in digests and name not in faults:
            faults[name] = ["missing, though the data's manifest names it: shard again"]
        elif name in digests and digests[name] != digest:
            faults[name] = [
                f"digest {digests[name][:12]}…, the data's manifest names {digest[:12]}…: it was replaced; shard again"
            ]
    return faults
