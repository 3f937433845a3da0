"""Table of rejects, in the order of file and line, however many there are."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pipelines.common import assign
from pipelines.common.exchange import Files, Packet, SendBuffer, gather, receive
from schemas import arrow
from schemas.layout import DataLayout
from schemas.manifest import Manifest, columns_of
from schemas.shard_files import parquet

_GROUP_ROWS = 8192
_LINES = 1 << 17  # of a file, whose rejects are sorted together

Range = tuple[str, int]  # a file, and the number of its _LINES


def write_rejects(data: str, rejected: Sequence[tuple[str, Packet]], staged: Files) -> Manifest:
    """Write the rejects, a shard an input table, in the order of file and line; their manifest, unpublished.

    Those of a range of lines are brought together through `staged` and sorted, one range after the other.
    """
    by_table: dict[str, list[Packet]] = {}
    for table, packet in rejected:
        by_table.setdefault(table, []).append(packet)
    url, schema, shards = DataLayout(data).rejects, arrow.rejects(), []
    for number, table in enumerate(sorted(by_table)):
        with parquet.writing_shard(url, number, len(by_table), schema, _GROUP_ROWS) as shard:
            for _, packets in sorted(_by_range(by_table[table], staged).items()):
                shard.write(gather(packets, schema).sort_by([(name, "ascending") for name in schema.names]))
        shards.append(shard.entry)
    return Manifest(
        kind="rejects",
        columns=columns_of(schema),
        shards=tuple(shards),
        rows=sum(shard.rows for shard in shards),
        row_group_rows=_GROUP_ROWS,
        parameters={"tables": sorted(by_table)},
    )


def _by_range(packets: Sequence[Packet], staged: Files) -> dict[Range, list[Packet]]:
    """Send rejects to their ranges of lines."""
    buffer: SendBuffer[Range] = SendBuffer(staged)
    ranges: dict[Range, list[Packet]] = {}
    for batch in receive(packets):
        for place, packet in buffer.add(_ranges(batch)):
            ranges.setdefault(place, []).append(packet)
    for place, packet in buffer.send():
        ranges.setdefault(place, []).append(packet)
    return ranges


def _ranges(batch: pa.RecordBatch) -> Iterator[tuple[Range, pa.RecordBatch]]:
    """Cut rejects by file and range of lines."""
    files = batch["source"].dictionary_encode()
    names, number = files.dictionary.to_pylist(), files.indices.to_numpy()
    part = batch["line"].to_numpy() // _LINES
    for file, name in enumerate(names):
        of_file = np.flatnonzero(number == file)
        for some, rows in assign.split_by(batch.take(pa.array(of_file)), part[of_file]):
            yield (name, some), rows
