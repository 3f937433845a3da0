"""Writes label and vector files of an export: complete files, or only the changes since an earlier export."""

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, shard_name
from schemas.manifest import Patch, Shard, View, describe_file
from schemas.mapped import MappedFile
from schemas.shard_files.parquet import encode, writing_shard
from schemas.shard_files.shards import iterate_shard
from schemas.shard_files.viewed import POSITION, RETIRED
from schemas.storage import join, relative, resolve
from schemas.table import Table
from schemas.version import move_view, parts_since
from trainer.checkpoints.checkpoint import save_tensors
from trainer.export.exported import KIND, LABELS, ExportVersion, require_needed_exports, resolve_export
from trainer.export.files import ExportFiles
from trainer.export.vectors import NAME, POSITIONS, Vectors, changed_rows, map_vectors

_SMALL = 8  # rows that versions added are rewritten together if fewer than 1 / _SMALL of the labels
ROWS_A_FILE = 1 << 22  # vectors in a file, and in an index
MOST_CHANGED = 4  # a file is rewritten if more than a quarter of its rows changed
_COLUMNS = ("label_id", "key", "text", "frequency")  # columns of labels
_OVER = ("frequency", RETIRED)  # columns that change for many labels at once
_PATCH_ROWS = 1 << 16  # rows in a row group


class FileRange(NamedTuple):
    """Rows [start, stop) of a part of an export; `entry`: the earlier export's file with these rows, if reused.

    `number` is the index of the file among `files` files.
    """

    start: int
    stop: int
    number: int
    files: int
    entry: Shard | None = None


@dataclass(frozen=True)
class EarlierExport:
    """An earlier export, `table`, that the export at `out` is based on."""

    table: Table
    out: str

    @classmethod
    def open(cls, onto: str, out: str, data: DataLayout) -> "EarlierExport":
        """Open the export at `onto`, or a folder's current export; the data must be `data` or an earlier version.

        If OUT is already current, return the export that OUT was based on. Raises InputError, TableError.
        """
        url = resolve(resolve_export(onto), ".")
        if url == resolve(out, "."):
            before = Table.find(out, KIND)
            place = None if before is None else ExportVersion.of(before.manifest).onto
            if place is None:
                raise InputError(f"--onto {onto}: this is OUT itself. Name an earlier export.")
            url = resolve(out, place)
        export = Table.open(url, KIND)
        require_needed_exports(export)
        if parts_since(Table.open(data.root, "data").manifest, export.parents["data"]) is None:
            raise InputError(
                f"--onto {url}: this export was built neither from {data.root} nor from an earlier version. Name an "
                "export of this data, or leave --onto out."
            )
        return cls(export, out)

    @cached_property
    def files(self) -> ExportFiles:
        """Local files of the earlier export."""
        return ExportFiles(self.table)

    @cached_property
    def version(self) -> ExportVersion:
        """Version of the earlier export."""
        return ExportVersion.of(self.table.manifest)

    def named(
        self, shard: Shard, first: int = 0, group_rows: int = 1, patches: Mapping[str, Patch] | None = None
    ) -> Shard:
        """Return the entry of an earlier file for the new manifest, with only the given `patches`.

        `first`: the file's first label; `group_rows`: number of rows per row group, if the file has row groups.
        """
        view, table = shard.view and move_view(shard.view, self.table.url, self.out), relative(self.out, self.table.url)
        view = view or View(
            table=table, part=self.version.part, first=first, rows=shard.rows, row_group_rows=group_rows
        )
        bare = view.model_copy(update={"gone": None, "columns": None, "changed": None, **(patches or {})})
        return shard.model_copy(update={"view": bare})

    def needs(self, shards: Sequence[Shard]) -> tuple[tuple[str, str, str], ...]:
        """Return (part, place, digest) of each earlier export that `shards` refer to."""
        places = {entry.view.table for entry in shards if entry.view is not None}
        own = (self.version.part, relative(self.out, self.table.url), self.table.digest)
        return tuple(each for each in (*self.version.moved(self.table.url, self.out), own) if each[1] in places)

    def ranges(self, part: str, labels: int, rows_a_file: int) -> list[FileRange]:
        """Return the files of `part` for all `labels`: earlier files that are reused, and new files for later rows."""
        kept = list(self.files.of(part))
        covered = sum(shard.rows for shard in kept)
        if self.version.onto is not None and covered < labels:
            while kept and kept[-1].view is None and _SMALL * (labels - covered + kept[-1].rows) < labels:
                covered -= kept.pop().rows
        return plan_ranges(kept, labels, rows_a_file)


def plan_ranges(kept: Sequence[Shard], labels: int, rows_a_file: int) -> list[FileRange]:
    """Return the files' ranges of labels: the ranges of `kept` files, then new files of at most `rows_a_file` rows."""
    bounds = [*itertools.accumulate((shard.rows for shard in kept), initial=0)]
    while bounds[-1] < labels or len(bounds) == 1:
        bounds.append(min(bounds[-1] + rows_a_file, labels))
    entries = [*kept, *[None] * (len(bounds) - 1 - len(kept))]
    return [FileRange(bounds[n], bounds[n + 1], n, len(entries), entry) for n, entry in enumerate(entries)]


ReadLabelRows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """Where and how vectors are written: OUT, the `dtype`, and a local folder for copies if OUT is remote.

    `earlier`: the export that OUT is based on.
    """

    out: str
    dtype: str
    scratch: Path
    earlier: EarlierExport | None = None


def write_vector_files(folder: str, labels: int, rows_of: ReadLabelRows, target: Target) -> tuple[list[Shard], Vectors]:
    """Write rows [labels, D] to files and map the files: from OUT if OUT is on a local disk, else from copies.

    `rows_of(start, stop)` returns rows [start, stop); only one range of rows is in memory at a time.
    """
    earlier = target.earlier
    ranges = plan_ranges([], labels, ROWS_A_FILE) if earlier is None else earlier.ranges(folder, labels, ROWS_A_FILE)
    shards, mapped = [], []
    for piece in ranges:
        rows = rows_of(piece.start, piece.stop).detach().to(getattr(torch, target.dtype))
        kept = _keep(folder, piece, rows.cpu().numpy(), target)
        shard, array = kept or _write(folder, piece, rows, target)
        shards.append(shard)
        mapped.append(array)
    return shards, Vectors(mapped)


def _write(folder: str, piece: FileRange, rows: torch.Tensor, target: Target) -> tuple[Shard, np.ndarray]:
    name = f"{folder}/{shard_name(piece.number, piece.files, 'safetensors')}"
    url = join(target.out, name)
    local = Path(storage.filesystem(url)[1]) if storage.is_local(url) else target.scratch / f"{folder}-{piece.number}"
    with storage.writing(url) as path:
        write_vectors(Path(path), rows, piece.start)
        shard = describe_file(path, name, len(rows))
        if not storage.is_local(url):
            shutil.copyfile(path, local)
    return shard, map_vectors(MappedFile(str(local), private=True))


def write_vectors(path: Path, rows: torch.Tensor, start: int) -> None:
    """Write `rows` [n, D], the vectors of labels [start, start + n), to a file."""
    save_tensors(str(path), {NAME: rows.detach().cpu().contiguous()}, {"start": str(start)})


def write_patch(path: Path, positions: np.ndarray, rows: np.ndarray) -> None:
    """Write `rows` [n, D], which replace the rows at `positions` int64 [n] of a file of vectors."""
    save_tensors(str(path), {POSITIONS: torch.from_numpy(positions), NAME: torch.from_numpy(rows)})


def _keep(folder: str, piece: FileRange, rows: np.ndarray, target: Target) -> tuple[Shard, np.ndarray] | None:
    """Reuse the earlier file of these rows, with a patch for changed rows; None if too many rows have changed."""
    earlier = target.earlier
    if earlier is None or piece.entry is None:
        return None
    before = map_vectors(MappedFile(str(earlier.files.path(piece.entry)), private=True))
    changed = changed_rows(before, rows)
    if changed is None or MOST_CHANGED * len(changed) > len(rows):
        return None
    patches = {}
    if len(changed):
        place = f"{folder}/_changed-{piece.number:05d}.safetensors"
        patches["changed"] = _write_patch(target.out, place, lambda path: write_patch(path, changed, rows[changed]))
        before[changed] = rows[changed]
    return earlier.named(piece.entry, piece.start, patches=patches), before


def write_label_files(data: DataLayout, out: str, earlier: EarlierExport | None) -> Iterator[Shard]:
    """Write the labels of `data` under `out`, shard by shard; with `earlier`, only new and changed labels."""
    labels = Table.open(data.labels, "labels")
    columns = (*_COLUMNS, *(name for name in labels.columns if name == RETIRED))
    if earlier is not None:
        yield from _write_changes(labels, columns, out, earlier)
        return
    for number in range(len(labels.shards)):
        groups = labels.batches_of(number, columns)
        first = next(groups, None)
        if first is None:
            continue
        group_rows = labels.manifest.group_rows(number)
        with writing_shard(join(out, LABELS), number, len(labels.shards), first.schema, group_rows) as table:
            for group in itertools.chain([first], groups):
                table.write(group)
        yield in_folder(LABELS, table.entry)


def _write_changes(labels: Table, columns: tuple[str, ...], out: str, earlier: EarlierExport) -> Iterator[Shard]:
    ranges = earlier.ranges(LABELS, labels.rows, max(1, labels.rows))
    for piece in ranges:
        table = labels.read(columns, piece.start, piece.stop)
        if piece.entry is not None:
            yield _patched(piece, table, out, earlier)
        else:
            place, size = join(out, LABELS), labels.manifest.row_group_rows or _PATCH_ROWS
            with writing_shard(place, piece.number, piece.files, table.schema, size) as writer:
                writer.write(table)
            yield in_folder(LABELS, writer.entry)


def _patched(piece: FileRange, after: pa.Table, out: str, earlier: EarlierExport) -> Shard:
    """Reuse the earlier file of these labels, with patches for the changes in `after`."""
    assert piece.entry is not None
    metadata = pq.read_metadata(earlier.files.path(piece.entry))
    size = metadata.row_group(0).num_rows if metadata.num_row_groups else 1
    bare = earlier.named(piece.entry, piece.start, size)
    before = pa.concat_tables(iterate_shard(earlier.out, bare, [*_COLUMNS, RETIRED]))
    if RETIRED not in after.column_names:
        after = after.append_column(RETIRED, pa.array(np.zeros(len(after), bool)))
    patched = {}
    if any(not np.array_equal(before[name].to_numpy(), after[name].to_numpy()) for name in _OVER):
        patched["columns"] = after.select([*_OVER])
    texts = [pc.not_equal(before[name], after[name]).combine_chunks() for name in ("key", "text")]
    changed = np.flatnonzero(pc.or_(*texts).to_numpy(zero_copy_only=False))
    if len(changed):
        patched["changed"] = after.select(["key", "text"]).take(changed).add_column(0, POSITION, pa.array(changed))
    patches = {}
    for kind, rows in patched.items():
        place, content = f"{LABELS}/_{kind}-{piece.number:05d}.parquet", encode(rows, _PATCH_ROWS)
        patches[kind] = _write_patch(out, place, partial(Path.write_bytes, data=content))
    return earlier.named(piece.entry, piece.start, size, patches)


def _write_patch(out: str, place: str, write: Callable[[Path], object]) -> Patch:
    with storage.writing(join(out, place)) as path:
        write(Path(path))
        written = describe_file(path, place, 0)
    return Patch(place=place, bytes=written.bytes, sha256=written.sha256)


def in_folder(folder: str, shard: Shard) -> Shard:
    """Return the entry of a file in a folder of the export."""
    return shard.model_copy(update={"path": f"{folder}/{shard.path}"})
