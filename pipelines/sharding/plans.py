"""What is settled before a worker starts: where each table comes from, where it goes, and how it is cut."""

from dataclasses import dataclass

import pyarrow as pa

from pipelines.sharding import assign
from schemas import tables

SHARD_LABELS = 1 << 16  # also the block in which frequencies are counted


@dataclass(frozen=True)
class QueriesPlan:
    """One split: raw file to `queries/<split>`."""

    split: str
    file: str  # the input's name, for messages
    source: str  # its URL
    filter_source: str | None  # only where the filter file holds a pair
    rows: int  # lines of the file
    labels: int
    vocabulary: int
    tokenizer: str
    table: str
    shards: int
    row_group_rows: int
    seed: int
    text: str
    keep_text: bool
    share: tuple[float, float] = (0.0, 1.0)  # [low, high) of the keys' hashes: two splits may share a file
    reports: bool = True  # whether this split, of those that share its file, reports the rejected lines

    @property
    def name(self) -> str:
        return f"queries/{self.split}"

    @property
    def block_lines(self) -> int:
        return assign.block_lines(self.shards)

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return tables.queries(
            tables.token_type(self.vocabulary),
            tables.label_type(self.labels),
            text=self.keep_text,
            filters=self.filter_source is not None,
        )

    @property
    def row_schema(self) -> pa.Schema:
        """Columns on the way: those of the table without `query_id`, and what ordering and counting need."""
        extra = [("hash", pa.uint64()), ("row", pa.int64()), ("truncated", pa.bool_()), ("merged", pa.int32())]
        return pa.schema([*extra, *(field.with_nullable(True) for field in self.schema if field.name != "query_id")])


@dataclass(frozen=True)
class LabelsPlan:
    """The labels: raw file to `labels`."""

    file: str
    source: str
    labels: int
    vocabulary: int
    tokenizer: str
    table: str
    row_group_rows: int
    text: str
    shard_labels: int = SHARD_LABELS

    @property
    def name(self) -> str:
        return "labels"

    @property
    def shards(self) -> int:
        return -(-self.labels // self.shard_labels)

    @property
    def schema(self) -> pa.Schema:
        return tables.labels(tables.token_type(self.vocabulary))
