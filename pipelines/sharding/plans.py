"""Plans for a sharding run. The launching process makes each choice once, based on the counts from the first flow."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.flow import FileExchange
from pipelines.formats import base
from pipelines.formats.base import LABELS, PAIRS, Format, Inputs, Text
from pipelines.job import Summary
from pipelines.options import MIN_SHARDS, ShardOptions, default_row_group_rows, default_shards
from pipelines.progress import Meter
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import arrow, storage
from schemas.arrow import DenseModel, TextEmbedder
from schemas.errors import InputError
from schemas.layout import DataLayout, staging
from schemas.shard_files.shards import Sink
from schemas.storage import join


@dataclass(frozen=True)
class ReadPlan:
    """Plan of the first flow, which parses input files into `blocks` and `rejects`. `exchange`: within the flow."""

    form: Format
    inputs: Inputs
    text: Text
    exchange: FileExchange
    blocks: FileExchange
    rejects: FileExchange
    seed: int
    block_rows: int
    same_key: bool  # points name the label with their own key, too
    meter: Meter = field(default=Meter(), compare=False)


@dataclass(frozen=True)
class OlderShards:
    """Shards of an older table of points. A key belongs to shard hash % `count`.

    `numbers`: the position of each shard among all older shards of the split; -1 if the shard has no rows.
    """

    count: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class TablePlan:
    """Plan of a table: the fields that plans of queries and plans of labels share."""

    table: str  # URL of the output
    shards: int
    row_group_rows: int
    vocabulary: int | None  # None: no row has a text, and there are no token ids
    tokenizer: str  # URL of the sealed file in staging
    tokenizer_name: str  # name in the options
    features: bool
    dense: int  # length of a row's vector; 0: no vector
    embedder: TextEmbedder | None  # model that makes the vector from the text
    threads: int  # threads for embedding
    sources: Mapping[int, str]  # names of the input's parts, by their numbers
    sink: Sink
    exchange: FileExchange  # exchange within a flow
    files: Mapping[str, FileExchange]  # files that flows write, by kind
    meter: Meter = field(compare=False)

    @property
    def tokens(self) -> pa.DataType | None:
        """Type of a token id; None if the rows have only features or a vector."""
        alone = self.vocabulary is None and (self.features or self.dense)
        return None if alone else arrow.token_type(self.vocabulary or 0)


@dataclass(frozen=True)
class QueriesPlan(TablePlan):
    """Plan for turning the parsed blocks of one split into `queries/<split>`."""

    split: str
    source: str  # the input table: a validation split may be taken from `train`
    labels: int  # greater than every label id
    keyed: bool
    has_pairs: bool  # whether labels come from pairs
    shared_points: bool  # splits share their points: a point without a label does not belong to this split
    filters: str | None  # URL of the split's filter pairs in staging
    same_key: bool  # a label with the key of a point is the point's filter pair, unless it is a positive
    keep_text: bool
    hash_range: tuple[float, float] = (0.0, 1.0)  # [low, high) of the keys' hashes
    older: tuple[OlderShards, ...] = ()  # earlier points, which new points with the same key replace

    @property
    def name(self) -> str:
        """Path of the table in the data set."""
        return f"queries/{self.split}"

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table."""
        label, filters = arrow.label_type(self.labels), self.same_key or self.filters is not None
        given = {"text": self.keep_text, "filters": filters, "features": self.features}
        return arrow.queries(self.tokens, label, **given, dense=self.dense)

    @property
    def row_schema(self) -> pa.Schema:
        """Columns before writing: all columns except `query_id`, and extra columns for ordering and counting."""
        extra = [("truncated", pa.bool_()), ("merged", pa.int32())]
        fields = [field.with_nullable(True) for field in self.schema if field.name != "query_id"]
        return pa.schema([*_order_fields(), *extra, *fields])


@dataclass(frozen=True)
class LabelsPlan(TablePlan):
    """Plan for turning the parsed blocks of the labels into `labels`."""

    rows: int  # number of rows of the input
    keyed: bool
    shards_before: int = 0  # label shards of the earlier version

    name = LABELS  # path of the table in the data set

    @property
    def shard_rows(self) -> int:
        """Number of labels in each shard except the last, for labels whose id is their row number."""
        return -(-self.rows // self.shards) or 1

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table."""
        return arrow.labels(self.tokens, features=self.features, dense=self.dense)

    @property
    def row_schema(self) -> pa.Schema:
        """Columns before writing: all columns except `label_id` and `frequency`, and extra columns for ordering."""
        later = ("label_id", "frequency")
        fields = [field.with_nullable(True) for field in self.schema if field.name not in later]
        return pa.schema([*_order_fields(), ("truncated", pa.bool_()), *fields])

    @property
    def raw_schema(self) -> pa.Schema:
        """Columns of rows before texts are tokenized and embedded."""
        made = {"truncated", "input_ids", *(["dense"] if self.embedder else [])}
        return pa.schema([field for field in self.row_schema if field.name not in made])


def _order_fields() -> list[pa.Field]:
    names = {"hash": pa.uint64(), "content": pa.uint64(), "part": pa.int32(), "row": pa.int64()}
    return [pa.field(name, kind) for name, kind in names.items()]


# Stored bytes per unit, measured on WordPiece ids, random keys and Zipfian labels; text counts bytes before zstd.
_BYTES = {"tokens": 1.7, "key": 0.9, "mentions": 2.5, "features": 6.0, "dense": 2.0, "text": 0.5}
_BYTES_A_TOKEN = 4.5  # bytes of text


class PlanInputs(NamedTuple):
    """Information that the plans are based on: inputs, the first flow's summary, DATA, options, and the tokenizer.

    `dense`: model that computes vectors [dimension] of texts. `tables`: URL of the tables, which is DATA or a version's
    part. `labels_before`, `shards_before`: number of labels and label shards in the earlier version. `exchange`,
    `files`, `meter`, `threads`: see `TablePlan`.
    """

    inputs: Inputs
    raw: Summary
    data: str
    options: ShardOptions
    tokenizer: FrozenTokenizer | None
    dense: DenseModel | None
    dimension: int
    tables: str
    labels_before: int
    shards_before: int
    exchange: FileExchange
    files: Mapping[str, FileExchange]
    meter: Meter
    threads: int

    def dense_of(self, table: str) -> int:
        """Return the length of each row's vector in the input table `table`; 0 if rows have no vectors."""
        if self.dense is not None:
            return self.dimension if self.raw.count_input(table, "text_bytes") else 0
        return max(
            (part.contents.dense for part in self.inputs.parts_of(table) if not part.contents.derived), default=0
        )

    def table_fields(self, table: str, *sources: str) -> dict[str, Any]:
        """Return fields of `TablePlan` for the input `table` and the additional input tables `sources`."""
        rows, frozen, options = self.raw.count_input(table, "rows"), self.tokenizer, self.options
        dense = self.dense_of(table)
        return {
            "row_group_rows": options.row_group_rows or default_row_group_rows(rows),
            "vocabulary": frozen.vocabulary if frozen else None,
            "tokenizer": tokenizer_url(self.data),
            "tokenizer_name": options.tokenizer,
            "features": self.raw.count_input(table, "with_features") > 0,
            "dense": dense,
            "embedder": self.dense.embedder("labels" if table == LABELS else "queries")
            if self.dense and dense
            else None,
            "threads": self.threads,
            "sources": {n: part.name for n, part in enumerate(self.inputs.parts) if part.table in (table, *sources)},
            "keyed": self.inputs.keyed,
            "exchange": self.exchange,
            "files": self.files,
            "meter": self.meter,
        }


def plan_queries(plan_inputs: PlanInputs, filter_pairs: Mapping[str, int]) -> list[QueriesPlan]:
    """Plan each split, including splits taken from `train`. `filter_pairs`: number of filter pairs per split."""
    plans = [_plan_split(split, plan_inputs, bool(filter_pairs.get(split))) for split in plan_inputs.inputs.splits]
    options, train = plan_inputs.options, next(plan for plan in plans if plan.split == "train")
    cuts, low = list[QueriesPlan](), 0.0
    for split, share in (("val", options.validation_share), ("test", options.test_share)):
        if share:
            shards = options.shards or max(1, round(train.shards * share), min(MIN_SHARDS, train.shards))
            table = DataLayout(plan_inputs.tables).queries(split)
            cuts.append(replace(train, split=split, table=table, shards=shards, hash_range=(low, low + share)))
            low += share
    return [*cuts, *(replace(plan, hash_range=(low, 1.0)) if plan is train and low else plan for plan in plans)]


def plan_labels(plan_inputs: PlanInputs) -> LabelsPlan:
    """Plan the table of labels."""
    rows, options = plan_inputs.raw.count_input(LABELS, "rows"), plan_inputs.options
    estimate = _estimated_bytes(LABELS, plan_inputs, text=True) + 2 * rows
    shards = max(1, -(-int(estimate) // options.shard_bytes))
    if not plan_inputs.inputs.keyed:  # contiguous, non-empty ranges of ids
        shards = -(-rows // max(1, -(-rows // shards)))
    return LabelsPlan(
        table=DataLayout(plan_inputs.tables).labels,
        shards=max(1, shards),
        sink="parquet",
        rows=rows,
        shards_before=plan_inputs.shards_before,
        **plan_inputs.table_fields(LABELS),
    )


def check_inputs(inputs: Inputs, options: ShardOptions) -> None:
    """Raise InputError for problems that can be detected before any file is read."""
    cuts = {"val": options.validation_share, "test": options.test_share}
    for split, kind in (("val", "validation"), ("test", "test")):
        if cuts[split] and split in inputs.splits:
            raise InputError(f"{say_table(inputs, split)} is already a {kind} split. Remove it, or do not split train.")
    if not inputs.keyed and len(inputs.parts_of(LABELS)) != 1:
        raise InputError(
            f"{say_table(inputs, LABELS)}: a label's line number is its id, so all labels must be in a single file."
        )
    if options.same_key == "filter" and not inputs.keyed:
        raise InputError(
            f"--same-key filter: labels of the format {inputs.format} have line numbers instead of keys. Leave the "
            "option out, and list the pairs in a filter file."
        )
    for split, url in inputs.filters.items():
        if len(inputs.parts_of(split)) != 1:
            raise InputError(
                f"{url}: a filter refers to line numbers, so INPUT must have exactly one file for {split}."
            )


def stage_filters(inputs: Inputs, raw: Summary, data: str) -> dict[str, int]:
    """Check filter files and write the pairs to staging. Returns the number of pairs per split. Raises InputError."""
    counts = {}
    for split, url in inputs.filters.items():
        rows, labels = raw.count_input(split, "rows_in"), raw.count_input(LABELS, "rows_in")
        pairs = parse_filter(b"".join(base.read_chunks(url)), url, rows, labels)
        storage.write_sealed(_filter_url(data, split), pairs.tobytes())
        counts[split] = len(pairs)
    return counts


def parse_filter(content: bytes, url: str, rows: int, labels: int) -> np.ndarray:
    """Parse a filter file into distinct, sorted pairs (row, label): int64 [F, 2] in [0, rows) × [0, labels).

    `url` is used in messages. Raises InputError with the line number if a line is malformed, or if the line's point or
    label does not exist.
    """
    pairs: list[tuple[int, int]] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not all(field.isdigit() and len(field) < 19 for field in fields):
            shown = repr(line[:60].decode("utf-8", "replace"))
            raise InputError(
                f"{url}, line {number}: expected two whole numbers `row label`, got {shown}. Fix or remove the line."
            )
        row, label = int(fields[0]), int(fields[1])
        if row >= rows:
            raise InputError(
                f"{url}, line {number}: row {row} does not exist; the points have rows 0 to {rows - 1}. Does the "
                "filter belong to another split?"
            )
        if label >= labels:
            raise InputError(
                f"{url}, line {number}: label {label} does not exist; the labels are 0 to {labels - 1}. Does the "
                "filter belong to another data set?"
            )
        pairs.append((row, label))
    return np.unique(np.asarray(pairs, np.int64).reshape(-1, 2), axis=0)


def tokenizer_url(data: str) -> str:
    """Return the URL of the staged tokenizer file, which the workers open."""
    return join(staging(data), "tokenizer.json")


def say_table(inputs: Inputs, table: str) -> str:
    """Return an input table's name for messages: the file's name, or the number of files."""
    parts = inputs.parts_of(table)
    return parts[0].name if len(parts) == 1 else f"the {len(parts)} files of {table}"


def _plan_split(split: str, plan_inputs: PlanInputs, filtered: bool) -> QueriesPlan:
    inputs, raw, data, options = plan_inputs[:4]
    estimate = _estimated_bytes(split, plan_inputs, options.keep_text)
    return QueriesPlan(
        table=DataLayout(plan_inputs.tables).queries(split),
        shards=options.shards or default_shards(raw.count_input(split, "rows"), estimate, options.shard_bytes),
        sink=options.sink,
        split=split,
        source=split,
        labels=plan_inputs.labels_before + max(raw.count_input(LABELS, "rows_in"), raw.count_input(LABELS, "rows")),
        has_pairs=bool(inputs.parts_of(PAIRS + split)),
        shared_points=inputs.shared_points,
        filters=_filter_url(data, split) if filtered else None,
        same_key=options.same_key == "filter",
        keep_text=options.keep_text,
        **plan_inputs.table_fields(split, PAIRS + split),
    )


def _estimated_bytes(table: str, plan_inputs: PlanInputs, text: bool) -> float:
    """Estimate the stored size of a table in bytes, with or without the column `text`."""
    raw = plan_inputs.raw
    text_bytes = raw.count_input(table, "text_bytes")
    most = raw.count_input(table, "rows") * plan_inputs.tokenizer.max_tokens if plan_inputs.tokenizer else 0
    units = {
        "tokens": min(text_bytes / _BYTES_A_TOKEN, most),
        "key": raw.count_input(table, "key_bytes"),
        "mentions": raw.count_input(table, "mentions") + raw.count_input(PAIRS + table, "rows"),
        "features": raw.count_input(table, "features"),
        "dense": raw.count_input(table, "rows") * plan_inputs.dense_of(table),
        "text": text * text_bytes,
    }
    return sum(_BYTES[name] * n for name, n in units.items())


def _filter_url(data: str, split: str) -> str:
    return join(staging(data), f"filter-{split}.int64")
