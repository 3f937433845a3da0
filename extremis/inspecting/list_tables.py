"""The tables below a prefix, finished and not, and whether they fit together."""

from collections.abc import Iterator
from dataclasses import dataclass

from schemas import storage
from schemas.errors import TableError
from schemas.layout import MANIFEST
from schemas.manifest import Manifest, open_manifest
from schemas.storage import join

DEPTH = 3  # folders below a prefix where tables are looked for
FOLDERS = 10_000  # no further folders are looked into after so many


@dataclass(frozen=True)
class Found:
    """A table below a prefix: its manifest, or what is wrong with it."""

    name: str
    url: str
    manifest: Manifest | None
    wrong: str = ""

    @property
    def bytes(self) -> int:
        return 0 if self.manifest is None else sum(shard.bytes for shard in self.manifest.shards)


def tables_below(url: str) -> list[Found]:
    """Every table below the prefix `url`, and every folder with shards that no manifest names, in order of names."""
    folders = 0

    def walk(place: str, name: str, depth: int) -> Iterator[Found]:
        nonlocal folders
        names = storage.list_names(place)
        folders += 1
        if name and MANIFEST in names:
            yield _open(name, place)
        elif any(one.startswith("part-") for one in names):
            yield Found(name, place, None, f"unfinished: {len(names)} file(s) and no {MANIFEST}")
        elif depth:
            for one in names:
                if "." not in one and one != "tensorboard" and folders < FOLDERS:
                    yield from walk(join(place, one), f"{name}/{one}".strip("/"), depth - 1)

    return list(walk(url, "", DEPTH))


def _open(name: str, url: str) -> Found:
    try:
        return Found(name, url, open_manifest(url))
    except TableError as error:
        return Found(name, url, None, str(error))


def misfits(whole: Manifest | None, found: list[Found]) -> dict[str, list[str]]:
    """What does not fit together, by table: parts of DATA by their digests, and tables that cannot be read."""
    wrong: dict[str, list[str]] = {one.name: [one.wrong] for one in found if one.wrong}
    here = {one.name: one.manifest.digest for one in found if one.manifest is not None}
    for name, digest in (whole.parents if whole is not None else {}).items():
        if name not in here and name not in wrong:
            wrong[name] = ["named by the data's manifest, and not here: shard again"]
        elif name in here and here[name] != digest:
            wrong[name] = [
                f"digest {here[name][:12]}…, the data's manifest names {digest[:12]}…: it was replaced; shard again"
            ]
    return wrong
