"""Plans of a sharding run, settled before a worker starts: source, place and cut of each table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from pipelines.common.meter import Meter
from pipelines.formats.base import Format, Inputs, Text
from schemas import arrow
from schemas.shard_files.shards import Sink


@dataclass(frozen=True)
class ReadPlan:
    """Plan of the first pipeline: input files to parsed blocks below `staging`, and rejects below `rejects`."""

    form: Format
    inputs: Inputs
    text: Text
    staging: str
    rejects: str
    seed: int
    block_rows: int
    meter: Meter = field(default=Meter(), compare=False)


@dataclass(frozen=True)
class OlderShards:
    """Shards of an older table of points, which the hash of a key names: hash % `count` is the place in `numbers`.

    `numbers`: where each is among all older shards of the split; -1 where it has no rows.
    """

    count: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class TablePlan:
    """Plan of a table: what queries and labels share."""

    table: str  # where to, a URL
    shards: int
    row_group_rows: int
    vocabulary: int | None  # None: nothing has a text, and there are no token ids
    tokenizer: str  # URL of the file in staging, sealed
    tokenizer_name: str  # as the options have it
    features: bool
    sources: Mapping[int, str]  # names of the input's parts, by their numbers
    sink: Sink
    meter: Meter = field(default=Meter(), compare=False, kw_only=True)

    @property
    def tokens(self) -> pa.DataType | None:
        """The type of a token id; None where the rows have features alone."""
        return None if self.vocabulary is None and self.features else arrow.token_type(self.vocabulary or 0)


@dataclass(frozen=True)
class QueriesPlan(TablePlan):
    """Plan of one split: parsed blocks to `queries/<split>`."""

    split: str
    source: str  # the input table: a validation split may be cut out of `train`
    labels: int  # more than any label id
    keyed: bool
    pairs: bool  # whether labels come from pairs
    shared: bool  # the split's points are among those of others: one without a label is not of this split
    filters: str | None  # URL of the split's filter pairs in staging
    keep_text: bool
    share: tuple[float, float] = (0.0, 1.0)  # [low, high) of the keys' hashes
    older: "tuple[OlderShards, ...]" = ()  # tables of points that those of the same key replace

    @property
    def name(self) -> str:
        """Path of the table in the data set."""
        return f"queries/{self.split}"

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table."""
        return arrow.queries(
            self.tokens,
            arrow.label_type(self.labels),
            text=self.keep_text,
            filters=self.filters is not None,
            features=self.features,
        )

    @property
    def row_schema(self) -> pa.Schema:
        """Columns on the way: those of the table without `query_id`, and what ordering and counting need."""
        extra = [("truncated", pa.bool_()), ("merged", pa.int32())]
        fields = [field.with_nullable(True) for field in self.schema if field.name != "query_id"]
        return pa.schema([*_place(), *extra, *fields])


@dataclass(frozen=True)
class LabelsPlan(TablePlan):
    """Plan of the labels: parsed blocks to `labels`."""

    rows: int  # of the input
    keyed: bool
    shards_before: int = 0  # of labels that a version has already

    @property
    def name(self) -> str:
        """Path of the table in the data set."""
        return "labels"

    @property
    def shard_rows(self) -> int:
        """Labels of each shard but the last, where a label's id is its row."""
        return -(-self.rows // self.shards) or 1

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table."""
        return arrow.labels(self.tokens, features=self.features)

    @property
    def row_schema(self) -> pa.Schema:
        """Columns on the way: those of the table without what is counted later, and what ordering needs."""
        later = ("label_id", "frequency")
        fields = [field.with_nullable(True) for field in self.schema if field.name not in later]
        return pa.schema([*_place(), ("truncated", pa.bool_()), *fields])

    @property
    def raw_schema(self) -> pa.Schema:
        """Columns before tokens are made."""
        return pa.schema([field for field in self.row_schema if field.name not in ("truncated", "input_ids")])


def _place() -> list[pa.Field]:
    names = {"hash": pa.uint64(), "content": pa.uint64(), "part": pa.int32(), "row": pa.int64()}
    return [pa.field(name, kind) for name, kind in names.items()]
