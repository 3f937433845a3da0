"""Plans of a sharding run: the launching process makes each choice once, based on the counts from the first flow."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.flow import FileExchange
from pipelines.formats import base
from pipelines.formats.base import LABELS, PAIRS, Format, Inputs, Text
from pipelines.job import Job, Summary
from pipelines.options import MIN_SHARDS, ShardOptions, default_row_group_rows, default_shards
from pipelines.progress import Meter, Progress
from pipelines.runners.local import LocalRunner
from pipelines.sharding.earlier import EarlierData, OlderShards, older_shards
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import arrow, storage
from schemas.arrow import DenseModel, TextEmbedder
from schemas.errors import InputError, option
from schemas.layout import DataLayout, parts_prefix, staging
from schemas.process import cores
from schemas.shard_files.shards import Sink
from schemas.storage import join

# Kinds of files that phases write.
PHASE_FILES = BLOCKS, REJECTS, LABELS_DONE, IDS, ROWS = "blocks", "rejects", "labels", "ids", "rows"


@dataclass(frozen=True)
class Attempt(Job):
    """One attempt to make a data set: the input, the options, and where its files are."""

    source: str
    data: str
    form: Format
    inputs: Inputs
    options: ShardOptions
    recorded: Mapping[str, Any]
    say: Progress
    folder: Callable[[str], str]  # where this attempt writes the files of one kind
    anew: bool  # ignore the files of an earlier run
    base: EarlierData | None = None  # only for a version
    dense: DenseModel | None = None  # model for dense vectors of texts

    def files(self, kind: str) -> FileExchange:
        """Return the files of one kind that phases write; `bulk` is the exchange within a flow."""
        return FileExchange(self.folder(kind))


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
    keyed: bool  # rows have keys; else, labels have line numbers
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

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Columns of the table."""

    @property
    def row_schema(self) -> pa.Schema:
        """Columns before writing: for ordering and counting, and the table's columns but for ids and `frequency`."""
        extra = {"hash": pa.uint64(), "content": pa.uint64(), "part": pa.int32(), "row": pa.int64()}
        schema, later = self.schema, ("query_id", "label_id", "frequency")
        extra |= {"truncated": pa.bool_(), **({"merged": pa.int32()} if "label_ids" in schema.names else {})}
        fields = [each for each in schema if each.name not in later]
        return pa.schema([*extra.items(), *(each.with_nullable(True) for each in fields)])


@dataclass(frozen=True)
class QueriesPlan(TablePlan):
    """Plan for turning the parsed blocks of one split into `queries/<split>`."""

    split: str
    source: str  # the input table: a validation split may be taken from `train`
    labels: int  # greater than every label id
    has_pairs: bool  # whether labels come from pairs
    shared_points: bool  # splits share their points: a point without a label does not belong to this split
    filters: str | None  # URL of the split's filter pairs in staging
    same_key: bool  # a label with the key of a point is the point's filter pair, unless it is a positive
    keep_text: bool
    group: str  # rows that are held out together
    seed: int
    hash_range: tuple[float, float] = (0.0, 1.0)  # [low, high) of the hashes of keys or groups
    older: tuple[OlderShards, ...] = ()  # earlier points, which new points with the same key replace

    @property
    def name(self) -> str:
        """Path of the table in the data set."""
        return f"queries/{self.split}"

    @property
    def schema(self) -> pa.Schema:
        label, filters = arrow.label_type(self.labels), self.same_key or self.filters is not None
        given = {"text": self.keep_text, "filters": filters, "features": self.features}
        return arrow.queries(self.tokens, label, **given, dense=self.dense, titles=True)


@dataclass(frozen=True)
class LabelsPlan(TablePlan):
    """Plan for turning the parsed blocks of the labels into `labels`."""

    rows: int  # number of rows of the input
    shards_before: int = 0  # label shards of the earlier version

    name = source = LABELS  # path of the table in the data set, and the input table

    @property
    def shard_rows(self) -> int:
        """Number of labels in each shard except the last, for labels whose id is their row number."""
        return -(-self.rows // self.shards) or 1

    @property
    def schema(self) -> pa.Schema:
        return arrow.labels(self.tokens, features=self.features, dense=self.dense, titles=True)

    @property
    def raw_schema(self) -> pa.Schema:
        """Columns of rows before texts are tokenized and embedded."""
        made = {"truncated", "input_ids", arrow.TITLES, *(["dense"] if self.embedder else [])}
        return pa.schema([field for field in self.row_schema if field.name not in made])


# Stored bytes per unit, measured on WordPiece ids, random keys and Zipfian labels; text counts bytes before zstd.
_BYTES = {"tokens": 1.7, "key": 0.9, "mentions": 2.5, "features": 6.0, "dense": 2.0, "text": 0.5}
_BYTES_A_TOKEN = 4.5  # bytes of text


class PlanInputs(NamedTuple):
    """What plans of tables are based on: the attempt, the counts of the first flow, and the tokenizer.

    `dimension`: length of the vectors that a model computes from texts; 0 without a model.
    """

    attempt: Attempt
    raw: Summary
    tokenizer: FrozenTokenizer | None
    dimension: int

    def plan(self, filter_pairs: Mapping[str, int]) -> "TablePlans":
        """Plan all tables, including splits taken from `train`. `filter_pairs`: number of filter pairs per split."""
        attempt, raw, options, base = self.attempt, self.raw, self.attempt.options, self.attempt.base
        tables = attempt.build.url if base is None else join(attempt.build.url, parts_prefix(base.part))
        layout, before = DataLayout(tables), base.views[LABELS] if base else ()
        rows = raw.count_input(LABELS, "rows")
        shards = max(1, -(-int(self._estimated_bytes(LABELS, text=True) + 2 * rows) // options.shard_bytes))
        if not attempt.inputs.keyed:  # contiguous, non-empty ranges of ids
            shards = max(1, -(-rows // max(1, -(-rows // shards))))
        fields = self._table_fields(LABELS)
        labels = LabelsPlan(layout.labels, shards, sink="parquet", rows=rows, shards_before=len(before), **fields)
        queries = {}
        for split in attempt.inputs.splits:
            estimate = self._estimated_bytes(split, options.keep_text)
            queries[split] = QueriesPlan(
                layout.queries(split),
                options.shards or default_shards(raw.count_input(split, "rows"), estimate, options.shard_bytes),
                sink=options.sink,
                split=split,
                source=split,
                labels=(base.labels if base else 0) + max(raw.count_input(LABELS, "rows_in"), rows),
                has_pairs=bool(attempt.inputs.parts_of(PAIRS + split)),
                shared_points=attempt.inputs.shared_points,
                filters=_filter_url(attempt.build.url, split) if filter_pairs.get(split) else None,
                same_key=options.same_key == "filter",
                keep_text=options.keep_text,
                group=options.group,
                seed=options.seed,
                **self._table_fields(split, PAIRS + split),
            )
        train, cuts, low = queries["train"], list[QueriesPlan](), 0.0
        for split, share in (("val", options.validation_share), ("test", options.test_share)):
            if share:
                shards = options.shards or max(1, round(train.shards * share), min(MIN_SHARDS, train.shards))
                own = (low, low + share)
                cuts.append(replace(train, split=split, table=layout.queries(split), shards=shards, hash_range=own))
                low += share
        if low:
            queries["train"] = replace(train, hash_range=(low, 1.0))
        plans = [*cuts, *queries.values()]
        if base is not None and base.again != "keep":
            plans = [replace(plan, older=older_shards(base.views[plan.name])) for plan in plans]
        return TablePlans(plans, labels)

    def _table_fields(self, table: str, *sources: str) -> dict[str, Any]:
        """Return fields of `TablePlan` for the input `table` and the additional input tables `sources`."""
        attempt, runner, frozen = self.attempt, self.attempt.runner, self.tokenizer
        rows, dense, model = self.raw.count_input(table, "rows"), self._dense_of(table), attempt.dense
        parts = enumerate(attempt.inputs.parts)
        return {
            "row_group_rows": attempt.options.row_group_rows or default_row_group_rows(rows),
            "vocabulary": frozen.vocabulary if frozen else None,
            "tokenizer": tokenizer_url(attempt.build.url),
            "tokenizer_name": attempt.options.tokenizer,
            "features": self.raw.count_input(table, "with_features") > 0,
            "dense": dense,
            "embedder": model.embedder("labels" if table == LABELS else "queries") if model and dense else None,
            "threads": cores() if isinstance(runner, LocalRunner) and runner.in_process else 1,
            "sources": {number: part.name for number, part in parts if part.table in (table, *sources)},
            "keyed": attempt.inputs.keyed,
            "exchange": attempt.files("bulk"),
            "files": {kind: attempt.files(kind) for kind in PHASE_FILES},
            "meter": attempt.watch.meter,
        }

    def _dense_of(self, table: str) -> int:
        """Return the length of each row's vector in the input table `table`; 0 if rows have no vectors."""
        if self.dimension:
            return self.dimension if self.raw.count_input(table, "text_bytes") else 0
        parts = self.attempt.inputs.parts_of(table)
        return max((part.contents.dense for part in parts if not part.contents.derived), default=0)

    def _estimated_bytes(self, table: str, text: bool) -> float:
        """Estimate the stored size of a table in bytes, with or without the column `text`."""
        text_bytes, rows = (self.raw.count_input(table, name) for name in ("text_bytes", "rows"))
        units = {
            "tokens": min(text_bytes / _BYTES_A_TOKEN, rows * self.tokenizer.max_tokens if self.tokenizer else 0),
            "key": self.raw.count_input(table, "key_bytes"),
            "mentions": self.raw.count_input(table, "mentions") + self.raw.count_input(PAIRS + table, "rows"),
            "features": self.raw.count_input(table, "features"),
            "dense": rows * self._dense_of(table),
            "text": text * text_bytes,
        }
        return sum(_BYTES[name] * n for name, n in units.items())


class TablePlans(NamedTuple):
    """Plans of all tables."""

    queries: Sequence[QueriesPlan]
    labels: LabelsPlan


def check_inputs(inputs: Inputs, options: ShardOptions) -> None:
    """Raise InputError for problems that can be detected before any file is read."""
    cuts = {"val": options.validation_share, "test": options.test_share}
    for split, kind in (("val", "validation"), ("test", "test")):
        if cuts[split] and split in inputs.splits:
            raise InputError(f"{inputs.shown(split)} is already a {kind} split. Remove it, or do not split train.")
    if options.group != "off" and (options.onto or any(part.table.startswith(PAIRS) for part in inputs.parts)):
        expected = "off, because a row of a new version can replace one of another split, and pairs have no text"
        raise InputError(parameter="group", got=options.group, expected=expected)
    if not inputs.keyed and len(inputs.parts_of(LABELS)) != 1:
        raise InputError(
            f"{inputs.shown(LABELS)}: a label's line number is its id, so all labels must be in a single file."
        )
    if options.same_key == "filter" and not inputs.keyed:
        raise InputError(
            f"{option('same_key', 'filter')}: labels of the format {inputs.format} have line numbers instead of keys. "
            "Leave the option out, and list the pairs in a filter file."
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


def _filter_url(data: str, split: str) -> str:
    return join(staging(data), f"filter-{split}.int64")
