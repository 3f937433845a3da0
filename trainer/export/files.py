"""Files of an export on a local disk: where they lie, in this export or in one that it goes on from, or as copies."""

import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas import storage
from schemas.errors import TableError
from schemas.manifest import Manifest, Shard, check_shard, find_shard, read_patch, shard_url
from schemas.shard_files.shards import open_shard, read_group
from schemas.shard_files.viewed import ViewedShard
from trainer.export.vectors import map_vectors, patch_vectors

REMEDY = "Export the run again."
_HASHED = 256 << 20  # of a larger file only the length is checked; `extremis inspect --verify` reads everything
_COPY_BYTES = 1 << 20  # bytes of a copy held in memory


class Files:
    """Files of the export at `url`; those beyond a local disk are copied to TMPDIR when they are asked for."""

    def __init__(self, url: str, manifest: Manifest) -> None:
        self.url, self.manifest = url, manifest
        self._scratch: Any = None
        self._checked: set[str] = set()

    @cached_property
    def folder(self) -> Path:
        """Folder of the export's own files."""
        return Path(storage.filesystem(self.url)[1]) if storage.is_local(self.url) else self._copies

    @cached_property
    def _copies(self) -> Path:
        self._scratch = tempfile.TemporaryDirectory(prefix="extremis-export-")
        return Path(self._scratch.name)

    def of(self, part: str) -> tuple[Shard, ...]:
        """Return the files of one part of the export, in order."""
        return tuple(shard for shard in self.manifest.shards if shard.path.startswith(f"{part}/"))

    def path(self, shard: Shard) -> Path:
        """Return where a file is, checked once. Raises TableError: gone or damaged; StorageError."""
        place = shard_url(self.url, shard)
        local = storage.is_local(place)
        path = Path(storage.filesystem(place)[1]) if local else self._copies / shard.path
        if place not in self._checked:
            if not local:
                self._fetch(shard, path)
            elif shard.bytes <= _HASHED:
                check_shard(self.url, shard, REMEDY)
            else:
                find_shard(self.url, shard, REMEDY)
            self._checked.add(place)
        return path

    def check_all(self) -> None:
        """Check, or fetch, all files. Raises TableError, StorageError."""
        for shard in self.manifest.shards:
            self.path(shard)

    def vectors(self, shard: Shard) -> Any:
        """Map the rows [n, D] of a file of vectors into memory, with those that have changed since it was written."""
        rows = map_vectors(self.path(shard))
        if shard.view is not None and shard.view.changed is not None:
            patch_vectors(rows, read_patch(self.url, shard.view.changed))
        return rows

    def table(self, part: str, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of all rows of the Parquet files of `part`. Raises TableError."""
        return pa.concat_tables(self._rows(shard, columns) for shard in self.of(part)).combine_chunks()

    def _rows(self, shard: Shard, columns: tuple[str, ...]) -> pa.Table:
        path = self.path(shard)
        if shard.view is None:
            return pq.read_table(path, columns=[*columns])
        root = str(path).removesuffix(shard.path)
        with open_shard(root, shard.model_copy(update={"view": None})) as file:
            viewed = ViewedShard(file, self.url, shard.view)
            groups = [read_group(viewed, group, columns, str(path)) for group in range(viewed.num_row_groups)]
        return pa.concat_tables(groups).select([*columns])

    def _fetch(self, shard: Shard, path: Path) -> None:
        place = find_shard(self.url, shard, REMEDY)
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = storage.read_matching(lambda: _copy(place, path), lambda digest: digest == shard.sha256)
        if digest != shard.sha256:
            raise TableError(f"{place}: damaged: its SHA-256 is not that of the manifest. {REMEDY}")


def _copy(url: str, target: Path) -> str:
    """Copy a file to the local `target`, and return its SHA-256 there."""
    with storage.open_read(url) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, _COPY_BYTES)
    return storage.file_sha256(str(target))
