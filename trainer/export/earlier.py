"""The export that a version goes on from: its files as the new one names them, and which of them stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, View
from schemas.storage import relative, resolve
from schemas.table import Table
from schemas.version import ExportVersion, follow, moved, parts_since, require_needed
from trainer.export.exported import KIND
from trainer.export.files import Files

_SMALL = 8  # of the labels: what versions have added is written anew with what this one adds while it is less


class Range(NamedTuple):
    """Rows [start, stop) of a part of an export; `entry`: the file of the earlier export with these rows, if it stays.

    `number` is its place among the files, of which there are `files`.
    """

    start: int
    stop: int
    number: int
    files: int
    entry: Shard | None = None


@dataclass(frozen=True)
class Earlier:
    """The export at `url`, which the one at `out` goes on from."""

    url: str
    out: str
    manifest: Manifest

    @classmethod
    def open(cls, onto: str, out: str, data: DataLayout) -> "Earlier":
        """Open the export at `onto`, or the current one of a folder; made from `data` or a version before it.

        Where OUT is current already, it is the one that OUT went on from. Raises InputError, TableError.
        """
        url = resolve(follow(onto), ".")
        if url == resolve(out, "."):
            before = Table.find(out, KIND)
            place = None if before is None else ExportVersion.of(before.manifest).onto
            if place is None:
                raise InputError(f"--onto {onto}: this is OUT itself. Name the export to go on from.")
            url = resolve(out, place)
        export = Table.open(url, KIND)
        require_needed(export)
        if parts_since(Table.open(data.root, "data").manifest, export.parents["data"]) is None:
            raise InputError(
                f"--onto {url}: made from other data than {data.root} or a version before it. Name an export of these, "
                "or leave --onto out."
            )
        return cls(url, out, export.manifest)

    @cached_property
    def files(self) -> Files:
        """Its files on a local disk."""
        return Files(self.url, self.manifest)

    @cached_property
    def version(self) -> ExportVersion:
        """Its place among versions."""
        return ExportVersion.of(self.manifest)

    def named(self, shard: Shard, first: int = 0, group_rows: int = 1) -> Shard:
        """Return one of its files as the new export names it, without patches.

        `first`: its first label; `group_rows`: rows of its row groups, where it has any.
        """
        view = shard.view and moved(shard.view, self.url, self.out)
        view = view or View(
            table=relative(self.out, self.url),
            part=self.version.part,
            first=first,
            rows=shard.rows,
            row_group_rows=group_rows,
        )
        bare = view.model_copy(update={"gone": None, "columns": None, "changed": None})
        return shard.model_copy(update={"view": bare})

    def needs(self, shards: Sequence[Shard]) -> tuple[tuple[str, str, str], ...]:
        """Return (part, place, digest) of the exports whose files are among `shards`."""
        places = {entry.view.table for entry in shards if entry.view is not None}
        own = (self.version.part, relative(self.out, self.url), self.manifest.digest)
        return tuple(each for each in (*self.version.moved(self.url, self.out), own) if each[1] in places)

    def ranges(self, part: str, labels: int, rows_a_file: int) -> list[Range]:
        """Return the files of `part` over all `labels`: its own that stay, and new ones over what versions added."""
        kept = list(self.files.of(part))
        covered = sum(shard.rows for shard in kept)
        if self.version.onto is not None and covered < labels:
            while kept and kept[-1].view is None and _SMALL * (labels - covered + kept[-1].rows) < labels:
                covered -= kept.pop().rows
        return plan_ranges(kept, labels, rows_a_file)


def plan_ranges(kept: Sequence[Shard], labels: int, rows_a_file: int) -> list[Range]:
    """Return the ranges of files over `labels`: those of `kept`, and files of at most `rows_a_file` rows behind."""
    bounds = [0]
    for shard in kept:
        bounds.append(bounds[-1] + shard.rows)
    while bounds[-1] < labels or len(bounds) == 1:
        bounds.append(min(bounds[-1] + rows_a_file, labels))
    entries = [*kept, *[None] * (len(bounds) - 1 - len(kept))]
    return [Range(bounds[n], bounds[n + 1], n, len(entries), entry) for n, entry in enumerate(entries)]
