"""Local files of an export: its own files, files shared with an earlier export, or downloaded copies."""

import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas import storage
from schemas.errors import TableError
from schemas.manifest import Shard, find_shard, read_patch, shard_url, verify_shard
from schemas.mapped import MappedFile, file_stamp
from schemas.shard_files.shards import open_shard, read_group
from schemas.shard_files.viewed import ViewedShard
from schemas.sizes import require_room
from schemas.storage import join
from schemas.table import Table
from trainer.export.vectors import map_vectors, patch_vectors

REMEDY = "Export the run again."
_HASHED = 256 << 20  # only the length of a larger file is checked; `extremis inspect --verify` reads everything
_COPY_BYTES = 1 << 20  # bytes of a copy in memory at a time


class ExportFiles:
    """Files of the export `table`; remote files are copied to TMPDIR on demand.

    Every file is checked before the first read; reads raise TableError if a file was overwritten.
    """

    def __init__(self, table: Table) -> None:
        self.table, self.url = table, table.url
        self._checked: dict[str, tuple[int, int, int]] = {}
        self._mapped: list[MappedFile] = []

    @cached_property
    def folder(self) -> Path:
        """Folder of the export's own files."""
        return Path(storage.filesystem(self.url)[1] if storage.is_local(self.url) else self._copies.name)

    @cached_property
    def _copies(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(prefix="extremis-export-")

    def of(self, part: str) -> tuple[Shard, ...]:
        """Return the files of one part of the export, in order."""
        return tuple(shard for shard in self.table.shards if shard.path.startswith(f"{part}/"))

    def path(self, shard: Shard) -> Path:
        """Check a file once, and return the path.

        Raises TableError if the file is missing, damaged or changed. Raises StorageError.
        """
        path, local = self._place(shard)
        if path in self._checked:
            if file_stamp(path) != self._checked[path]:
                raise _changed(path)
            return Path(path)
        if not local:
            self._fetch(shard, Path(path))
        before = file_stamp(path)
        if local:
            if shard.bytes <= _HASHED:
                verify_shard(self.url, shard, remedy=REMEDY)
            else:
                find_shard(self.url, shard, REMEDY)
        self._checked[path] = before
        return Path(path)

    def check_all(self) -> None:
        """Check, or download, all files; a second call checks that no file changed. Raises TableError, StorageError."""
        for shard in self.table.shards:
            self.path(shard)

    def require_unchanged(self) -> None:
        """Raise TableError if a mapped file was overwritten, because the mapped rows would then mix two exports."""
        for file in self._mapped:
            if file.has_changed():
                raise _changed(file.path)

    def map(self, name: str) -> MappedFile:
        """Map a file, and let `require_unchanged` check the file. Changes to the mapped bytes stay in memory."""
        shard = next((shard for shard in self.table.shards if shard.path == name), None)
        if shard is None:
            raise TableError(f"{self.url}: this export contains no {name}. {REMEDY}")
        self._mapped.append(MappedFile(str(self.path(shard)), shard.bytes, private=True))
        return self._mapped[-1]

    def watch(self, file: MappedFile | None) -> None:
        """Let `require_unchanged` also check a file that was mapped elsewhere."""
        self._mapped += [file] if file else []

    def vectors(self, shard: Shard) -> Any:
        """Return the rows [n, D] of a mapped file of vectors, after later changes to rows are applied."""
        rows = map_vectors(self.map(shard.path))
        if shard.view is not None and shard.view.changed is not None:
            patch_vectors(rows, read_patch(self.url, shard.view.changed))
        return rows

    def read(self, part: str, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of all rows of the Parquet files of `part`. Raises TableError."""
        rows = pa.concat_tables(self._rows(shard, columns) for shard in self.of(part)).combine_chunks()
        for shard in self.of(part):
            self.path(shard)  # checks that the file has not changed
        return rows

    def _rows(self, shard: Shard, columns: tuple[str, ...]) -> pa.Table:
        path = self.path(shard)
        if shard.view is None:
            return pq.ParquetFile(path).read([*columns])
        root = str(path).removesuffix(shard.path)
        with open_shard(root, shard.model_copy(update={"view": None})) as file:
            viewed = ViewedShard(file, self.url, shard.view)
            groups = [read_group(viewed, group, columns, str(path)) for group in range(viewed.num_row_groups)]
        return pa.concat_tables(groups).select([*columns])

    def _place(self, shard: Shard) -> tuple[str, bool]:
        """Return the local path of a file, and whether the file is the original, not a copy."""
        place = shard_url(self.url, shard)
        local = storage.is_local(place)
        return storage.filesystem(place)[1] if local else join(self._copies.name, shard.path), local

    def _fetch(self, shard: Shard, path: Path) -> None:
        place = find_shard(self.url, shard, REMEDY)
        require_room(str(path.parent), {f"copies of {self.url}": shard.bytes}, "Set TMPDIR to a folder with more room.")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = storage.read_matching(lambda: _copy(place, path), lambda digest: digest == shard.sha256)
        if digest != shard.sha256:
            raise TableError(f"{place}: damaged: the SHA-256 does not match the manifest. {REMEDY}")


def _changed(path: str) -> TableError:
    return TableError(
        f"{path}: changed since the export was opened. Open the export again. Write each new export to a new folder, "
        "and switch to it with --current, instead of overwriting files in use."
    )


def _copy(url: str, target: Path) -> str:
    """Copy a file to the local `target`, and return the SHA-256 of the copy."""
    with storage.open_read(url) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, _COPY_BYTES)
    return storage.file_sha256(str(target))
