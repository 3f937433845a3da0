"""Files of vectors of an export, by label range; those of an earlier export stay where few rows have changed."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from schemas import storage
from schemas.layout import shard_name
from schemas.manifest import Patch, Shard, describe_file
from schemas.mapped import Mapped
from schemas.storage import join
from trainer.export.earlier import Earlier, Range, plan_ranges
from trainer.export.vectors import DTYPES, Vectors, changed_rows, map_vectors, write_patch, write_vectors

ROWS_A_FILE = 1 << 22  # vectors of a file, and of an index
MOST_CHANGED = 4  # of a file of which more than a quarter has changed none stays

RowsOf = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """Place of vectors: OUT, their `dtype`, and a local folder for copies of them where OUT is remote.

    `earlier`: the export that OUT goes on from.
    """

    out: str
    dtype: str
    scratch: Path
    earlier: Earlier | None = None


def write_vector_files(folder: str, labels: int, rows_of: RowsOf, target: Target) -> tuple[list[Shard], Vectors]:
    """Write files of rows [labels, D] and map them: from OUT where it is a local disk, or from copies.

    `rows_of(start, stop)` [stop - start, D]: a range of them, one held at a time.
    """
    earlier = target.earlier
    ranges = plan_ranges([], labels, ROWS_A_FILE) if earlier is None else earlier.ranges(folder, labels, ROWS_A_FILE)
    shards, mapped = [], []
    for piece in ranges:
        rows = rows_of(piece.start, piece.stop).detach().to(DTYPES[target.dtype])
        kept = _keep(folder, piece, rows.cpu().numpy(), target)
        shard, array = kept or _write(folder, piece, rows, target)
        shards.append(shard)
        mapped.append(array)
    return shards, Vectors(mapped)


def _write(folder: str, piece: Range, rows: torch.Tensor, target: Target) -> tuple[Shard, np.ndarray]:
    name = f"{folder}/{shard_name(piece.number, piece.files, 'safetensors')}"
    url = join(target.out, name)
    local = Path(storage.filesystem(url)[1]) if storage.is_local(url) else target.scratch / f"{folder}-{piece.number}"
    with storage.writing(url) as path:
        write_vectors(Path(path), rows, piece.start, target.dtype)
        shard = describe_file(path, name, len(rows))
        if not storage.is_local(url):
            shutil.copyfile(path, local)
    return shard, map_vectors(Mapped(str(local), private=True))


def _keep(folder: str, piece: Range, rows: np.ndarray, target: Target) -> tuple[Shard, np.ndarray] | None:
    """Return the earlier file of these rows with a patch over those that have changed; None where too many have."""
    earlier = target.earlier
    if earlier is None or piece.entry is None:
        return None
    before = map_vectors(Mapped(str(earlier.files.path(piece.entry)), private=True))
    if (before.shape, before.dtype) != (rows.shape, rows.dtype):
        return None
    changed = changed_rows(before, rows)
    if MOST_CHANGED * len(changed) > len(rows):
        return None
    shard = earlier.named(piece.entry, piece.start)
    if len(changed):
        place = f"{folder}/_changed-{piece.number:05d}.safetensors"
        with storage.writing(join(target.out, place)) as path:
            write_patch(Path(path), changed, rows[changed])
            written = describe_file(path, place, len(changed))
        patch = Patch(place=place, bytes=written.bytes, sha256=written.sha256)
        assert shard.view is not None
        shard = shard.model_copy(update={"view": shard.view.model_copy(update={"changed": patch})})
        before[changed] = rows[changed]
    return shard, before
