"""Raw files into Beam: blocks of lines and of filter pairs under one block number, so that they can be joined."""

from collections.abc import Iterator

import apache_beam as beam
import pyarrow as pa

from pipelines.sharding import assign, filters, lines
from schemas import storage


class ReadLines(beam.DoFn):
    """URL of a gzip file to (block number, raw lines)."""

    def __init__(self, block_lines: int) -> None:
        self._block_lines = block_lines

    def process(self, element: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        return enumerate(lines.read_blocks(element, self._block_lines))


class ReadPairs(beam.DoFn):
    """URL of a filter file to (block number, its pairs: columns `row` and `label_id`)."""

    def __init__(self, rows: int, labels: int, block_lines: int) -> None:
        self._rows, self._labels, self._block_lines = rows, labels, block_lines

    def process(self, element: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        pairs = filters.parse_pairs(storage.read_bytes(element), element, self._rows, self._labels)
        batch = pa.record_batch({"row": pa.array(pairs[:, 0]), "label_id": pa.array(pairs[:, 1])})
        return assign.split_by(batch, pairs[:, 0] // self._block_lines)
