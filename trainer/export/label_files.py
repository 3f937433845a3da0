"""Files of labels of an export: key, text and training frequency of each; those of an earlier export stay."""

import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas import storage
from schemas.layout import DataLayout
from schemas.manifest import Patch, Shard
from schemas.shard_files.parquet import encode, writing_shard
from schemas.shard_files.shards import iterate_shard
from schemas.shard_files.viewed import POSITION, RETIRED
from schemas.storage import join
from schemas.table import Table
from trainer.export.earlier import Earlier, Range
from trainer.export.exported import LABELS

_COLUMNS = ("label_id", "key", "text", "frequency")
_OVER = ("frequency", RETIRED)  # columns that change for many labels at once
_PATCH_ROWS = 1 << 16  # of a row group


def write_label_files(data: DataLayout, out: str, earlier: Earlier | None) -> Iterator[Shard]:
    """Write the labels of `data` under `out`, shard by shard; with `earlier` what is new or has changed alone."""
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
        yield _in_folder(table.entry)


def _write_changes(labels: Table, columns: tuple[str, ...], out: str, earlier: Earlier) -> Iterator[Shard]:
    ranges = earlier.ranges(LABELS, labels.rows, max(1, labels.rows))
    for piece, table in zip(ranges, _cut(labels.batches(columns), ranges), strict=True):
        if piece.entry is not None:
            yield _patched(piece, table, out, earlier)
        elif table.num_rows:
            place, size = join(out, LABELS), labels.manifest.row_group_rows or _PATCH_ROWS
            with writing_shard(place, piece.number, piece.files, table.schema, size) as writer:
                writer.write(table)
            yield _in_folder(writer.entry)


def _patched(piece: Range, after: pa.Table, out: str, earlier: Earlier) -> Shard:
    """Return the earlier file of these labels, with patches over what has changed in `after` since it was written."""
    assert piece.entry is not None
    metadata = pq.read_metadata(earlier.files.path(piece.entry))
    size = metadata.row_group(0).num_rows if metadata.num_row_groups else 1
    shard = earlier.named(piece.entry, piece.start, size)
    before = pa.concat_tables(iterate_shard(earlier.out, shard, [*_COLUMNS, RETIRED]))
    if RETIRED not in after.column_names:
        after = after.append_column(RETIRED, pa.array(np.zeros(len(after), bool)))
    patches = {}
    if any(not np.array_equal(before[name].to_numpy(), after[name].to_numpy()) for name in _OVER):
        patches["columns"] = _write_patch(piece, "columns", after.select([*_OVER]), out)
    texts = [pc.not_equal(before[name], after[name]).combine_chunks() for name in ("key", "text")]
    changed = np.flatnonzero(pc.or_(*texts).to_numpy(zero_copy_only=False))
    if len(changed):
        rows = after.select(["key", "text"]).take(changed).add_column(0, POSITION, pa.array(changed))
        patches["changed"] = _write_patch(piece, "changed", rows, out)
    assert shard.view is not None
    return shard.model_copy(update={"view": shard.view.model_copy(update=patches)})


def _write_patch(piece: Range, kind: str, rows: pa.Table, out: str) -> Patch:
    place, content = f"{LABELS}/_{kind}-{piece.number:05d}.parquet", memoryview(encode(rows, _PATCH_ROWS))
    storage.write_bytes(join(out, place), content)
    return Patch(place=place, bytes=len(content), sha256=storage.sha256(content))


def _cut(groups: Iterator[pa.Table], ranges: list[Range]) -> Iterator[pa.Table]:
    """Yield the rows of each range."""
    pending = next(groups, None)
    for piece in ranges:
        size = piece.stop - piece.start
        while pending is not None and len(pending) < size:
            pending = pa.concat_tables([pending, next(groups)])
        if pending is not None:
            yield pending.slice(0, size)
            pending = pending.slice(size)


def _in_folder(shard: Shard) -> Shard:
    return shard.model_copy(update={"path": f"{LABELS}/{shard.path}"})
