"""JSON lines of points in their plainest shape, read by Arrow: several times as fast as record by record.

Whatever is not of that shape (another type, a missing field, two objects in a line, bytes that are no text) is left to
`keyed_lines`, which explains it.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.json

from pipelines.formats.base import points_schema
from pipelines.formats.fields import Fields
from pipelines.formats.sparse import unite_keys

_ROW = "\x01row"  # put into each object: Arrow itself would not mind an object that ends in another line


def read_points(lines: Sequence[bytes], first_row: int, fields: Fields) -> pa.RecordBatch | None:
    """Read raw lines [B] to points with key, text and labels; None unless every line is a valid one of these alone."""
    marked = [b'{"\\u0001row":%d,%b' % (row, line[1:]) for row, line in enumerate(lines) if line[:1] == b"{"]
    if not lines or len(marked) < len(lines):
        return None
    kinds = {_ROW: pa.int64(), fields.key: pa.string(), fields.text: pa.string(), fields.title: pa.string()}
    schema = pa.schema([*kinds.items(), (fields.labels, pa.list_(pa.string()))])
    if len(schema.names) > len(set(schema.names)):
        return None
    content = b"\n".join(marked)
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(content),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(content) + 1),
            pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        ).combine_chunks()
        table.validate(full=True)
    except pa.ArrowException:
        return None
    rows, keys, texts, titles, labels = (column.combine_chunks() for column in table.select(schema.names).columns)
    count = len(lines)
    if len(rows) != count or rows.null_count or (rows.to_numpy() != np.arange(count)).any():
        return None
    named = labels.flatten()
    offsets = labels.offsets.to_numpy()
    if keys.null_count or texts.null_count or titles.null_count < count or labels.null_count or named.null_count:
        return None
    if (np.diff(offsets) == 0).any() or not _all_named(keys) or not _all_named(named):
        return None
    columns = [pa.array(np.arange(first_row, first_row + count)), keys, texts, *unite_keys(named, offsets - offsets[0])]
    return pa.record_batch(columns, schema=points_schema("label_keys", features=False))


def _all_named(column: pa.Array) -> bool:
    return bool(np.diff(np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]).all())
