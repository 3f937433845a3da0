"""Formulas for the bytes and memory of a run, based on its size. All measured constants are below."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.clustering.plan import worker_bytes
from pipelines.mining.memory import BlockPlan, plan_blocks, sizes_of
from pipelines.options import MineOptions, ShardOptions, default_row_group_rows, default_shards
from schemas import arrow
from schemas.errors import InputError
from schemas.layout import DataLayout, shard_name
from schemas.manifest import Manifest, Shard
from schemas.table import Table
from schemas.text_model import DENSE
from trainer.checkpoints.checkpoint import FILE_BYTES, row_ranges
from trainer.footprint import label_bytes, parameter_bytes
from trainer.methods.recipe import Recipe
from trainer.model import has_bias
from trainer.refresh.dump import VECTOR_GROUP_ROWS, VECTOR_ROWS
from trainer.stream.dataset import WINDOWS_AHEAD

# Bytes on storage, measured on shards of the pipelines. Ids follow Zipf's law; a page takes a bit more than their
# entropy.
_TOKEN_FACTOR = 1.3  # relative to the entropy: 1.1 for titles (Tate), 1.6 for random words
_LABEL_FACTOR = 1.7  # 1.7 for Tate, 2.0 if labels are independent
_NEGATIVE_FACTOR = 1.3  # for mined tables: 1.0 to 1.6, rising during a run
_SCORE_BYTES = 2.5  # for a float32 score in a table of negatives, sorted
_VECTOR_FACTOR = 0.925  # for a vector, relative to its bytes in memory: float16 and float32, D from 24 to 256
_CHARACTER_BYTES = 0.7  # for keys and texts: 0.4 to 0.8 on Tate and made-up keys
_ROW_ID_BYTES = 2.5  # for a row's ids and frequency: 1.1 for queries, 3.3 for labels
# Bytes in memory of working processes.
_PROCESS_BYTES = {"shard": 300 << 20, "train": 450 << 20}
_SHARD_COPIES = 3  # copies of a shard while it is decoded, sorted and encoded
# Bytes per line of JSON, with names of fields and quotes: 4.2 to 5.2 characters per token on four data sets.
_JSON_TOKEN, _JSON_POINT, _JSON_LABEL, _JSON_REFERENCE = 4.7, 40, 25, 4

_SAMPLED_ROWS = 1 << 13  # rows of DATA for averages


@dataclass(frozen=True)
class Workload:
    """Size of the data, recipe, and machines. Numbers per query or label are averages. Raises InputError.

    `stored`: bytes per row of queries and of labels, if DATA contains samples.
    """

    queries: int
    labels: int
    recipe: Recipe
    tokens: float = 32.0  # per query
    label_tokens: float = 8.0
    labels_per_query: float = 5.0
    key_bytes: float = 12.0
    text_bytes: float = 40.0  # per label text
    vocabulary: int = 30_000
    dense: int = 0  # numbers per row vector
    ranks: int = 1
    workers: int = 1  # pipeline workers with one core each
    memory: int = 8 << 30  # bytes per process
    stored: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("queries", "labels", "ranks", "workers", "memory"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1; got {getattr(self, name):,}.")
        if self.recipe.data.mix:
            raise InputError(
                "data.mix: plan does not support data.mix. Plan with data.split and data.label_texts instead."
            )
        for name in ("tokens", "label_tokens", "labels_per_query", "key_bytes", "text_bytes"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"--{name.replace('_', '-')} must be above 0; got {getattr(self, name):g}.")
        if self.labels_per_query > self.labels:
            raise InputError(
                f"--labels-per-query {self.labels_per_query:g}: expected at most {self.labels:,}, the number of labels."
            )

    @property
    def columns(self) -> int:
        """Number of columns of embeddings and vectors: D, plus one if there is a bias."""
        return self.recipe.encoder.dimension + int(has_bias(self.recipe))

    @property
    def searched(self) -> str:
        """Name of the table that contains the vectors for mining."""
        return "embeddings of queries" if self.recipe.table_parameters.get("by") == "points" else "vectors"

    @property
    def sources(self) -> dict[str, int]:
        """Number of rows in dumps and negative tables, by source."""
        return {"queries": self.queries, **({"labels": self.labels} if self.recipe.data.label_texts else {})}

    @property
    def trained_queries(self) -> int:
        """Number of training queries, without held-out queries."""
        return round(self.queries * self.recipe.data.training_rows.stop)

    @property
    def rows(self) -> int:
        """Number of rows of all sources."""
        return sum(self.sources.values())

    @property
    def steps(self) -> int:
        """Number of steps in the whole run."""
        rows = self.trained_queries + self.sources.get("labels", 0)
        return -(-rows // self.recipe.order.batch) * self.recipe.train.epochs

    @property
    def dumps(self) -> int:
        """Number of dumps in the whole run; one table is mined or clustered from each dump."""
        return len(self.recipe.table_epochs())

    @property
    def input_bytes(self) -> int:
        """Estimated bytes of the input as uncompressed JSON lines."""
        reference = self.key_bytes + _JSON_REFERENCE
        point = _JSON_TOKEN * self.tokens + self.key_bytes + self.labels_per_query * reference + _JSON_POINT
        return int(self.queries * point + self.labels * (self.text_bytes + self.key_bytes + _JSON_LABEL))

    @property
    def row_bytes(self) -> dict[str, float]:
        """Estimated bytes in memory per row, for queries and for labels."""
        token = arrow.token_type(self.vocabulary).bit_width / 8
        label = arrow.label_type(self.labels).bit_width / 8
        return {
            "queries": 20 + self.key_bytes + token * self.tokens + 2 * self.dense + label * self.labels_per_query,
            "labels": 28 + 2 * self.dense + self.key_bytes + self.text_bytes + token * self.label_tokens,
        }

    def with_averages_of(self, data: str) -> "Workload":
        """Return the workload with averages measured on DATA. Raises TableError."""
        layout = DataLayout(data)
        queries, queries_bytes = _sample(Table.open(layout.queries("train"), "queries"))
        labels, labels_bytes = _sample(Table.open(layout.labels, "labels"))
        return replace(
            self,
            tokens=_mean(pc.list_value_length(queries["input_ids"])),
            label_tokens=_mean(pc.list_value_length(labels["input_ids"])),
            labels_per_query=_mean(pc.list_value_length(queries["label_ids"])),
            key_bytes=_mean(pc.binary_length(queries["key"])),
            text_bytes=_mean(pc.binary_length(labels["text"])),
            vocabulary=int(Table.open(layout.tokenizer, "tokenizer").parameters["vocabulary"]),
            dense=int(Table.open(data, "data").parameters.get(DENSE) or 0),
            stored={"queries": queries_bytes, "labels": labels_bytes},
        )


@dataclass(frozen=True)
class TableSize:
    """Size of a table in storage. `times`: how many times a run writes the table."""

    rows: int
    bytes: int
    shards: int
    times: int = 1


@dataclass(frozen=True)
class Estimate:
    """Sizes of all tables in storage, peak bytes of a process for each step, and the blocks of mining."""

    tables: dict[str, TableSize]
    memory: dict[str, int]
    blocks: BlockPlan | None


def estimate(workload: Workload) -> Estimate:
    """Estimate the whole run. Raises InputError if mining needs more memory."""
    recipe = workload.recipe
    sizes = dict(_data_tables(workload))
    blocks = None
    if workload.dumps:
        sizes |= _source_tables("embeddings", _VECTOR_FACTOR * 2 * workload.columns, workload, sizes)
        if recipe.is_clustered:
            sizes["queries in cluster order"] = replace(sizes["queries"], times=workload.dumps)
        else:
            rows = workload.labels
            size = int(rows * (_ROW_ID_BYTES + _VECTOR_FACTOR * 4 * workload.columns))
            sizes["vectors"] = TableSize(rows, size, -(-rows // VECTOR_ROWS), workload.dumps)
            blocks = _mining_blocks(workload, sizes)
            each = _NEGATIVE_FACTOR * _entropy(sizes[workload.searched].rows) + _SCORE_BYTES
            sizes |= _source_tables("negatives", each * recipe.table_parameters["table_width"], workload, sizes)
            needs = blocks.needs(workload.rows)
            if scratch := needs.get("candidates", 0) + needs.get("indexes", 0):  # only one mining runs at a time
                sizes["candidates and indexes of mining"] = TableSize(workload.rows, scratch, 0)
    parameters, optimizer = parameter_bytes(recipe, workload.vocabulary, workload.labels, workload.dense)
    files = 2 + len(row_ranges(0, workload.labels, sum(label_bytes(recipe))))
    sizes["checkpoint"] = TableSize(workload.labels, parameters + optimizer, files, recipe.checkpoint.keep)
    # A sharding worker holds a few copies of the largest shard.
    shards = (each * sizes[name].rows / sizes[name].shards for name, each in workload.row_bytes.items())
    memory = {"shard": _PROCESS_BYTES["shard"] + int(_SHARD_COPIES * max(shards))}
    if blocks is not None:
        memory["mine"] = blocks.estimate.total
    if recipe.is_clustered and workload.dumps:
        queries = sizes["queries"]
        memory["cluster"] = worker_bytes(queries.rows, workload.columns, queries.bytes / queries.rows, workload.memory)
    memory["train"] = _train_memory(workload)
    return Estimate(sizes, memory, blocks)


def _entropy(count: int) -> float:
    """Return the entropy in bytes of an id in [0, n) that follows Zipf's law: (log2(n) / 2 + log2(ln n)) / 8."""
    count = max(count, 8)
    return (math.log2(count) / 2 + math.log2(math.log(count))) / 8


def _data_tables(workload: Workload) -> Iterator[tuple[str, TableSize]]:
    """Estimate the tables of queries and labels, with the number of shards that `extremis shard` would choose."""
    token, label = _TOKEN_FACTOR * _entropy(workload.vocabulary), _LABEL_FACTOR * _entropy(workload.labels)
    key = _ROW_ID_BYTES + _CHARACTER_BYTES * workload.key_bytes
    stored = {
        "queries": key + token * workload.tokens + label * workload.labels_per_query,
        "labels": key + token * workload.label_tokens + _CHARACTER_BYTES * workload.text_bytes,
        **workload.stored,
    }
    for name, rows in (("queries", workload.queries), ("labels", workload.labels)):
        size = int(stored[name] * rows)
        yield name, TableSize(rows, size, default_shards(rows, size, ShardOptions().shard_bytes))


def _source_tables(kind: str, each: float, workload: Workload, data: dict[str, TableSize]) -> dict[str, TableSize]:
    """Estimate the tables of `kind`, with `each` bytes per row. Each dump contains one table per source."""
    return {
        f"{kind} of {name}": TableSize(rows, int((_ROW_ID_BYTES + each) * rows), data[name].shards, workload.dumps)
        for name, rows in workload.sources.items()
    }


def _mining_blocks(workload: Workload, data: dict[str, TableSize]) -> BlockPlan:
    """Choose index, blocks and query batch as `extremis mine --memory` does. Raises InputError if memory is short."""
    facts, searched = workload.recipe.table_parameters, data[workload.searched]
    options = MineOptions(memory=workload.memory)
    vectors = _planned_manifest("vectors", searched, VECTOR_GROUP_ROWS)
    points = [_planned_manifest(name, data[name], default_row_group_rows(n)) for name, n in workload.sources.items()]
    sizes = sizes_of(workload.columns, vectors, points, options, facts["table_width"], facts["table_width"])
    return plan_blocks(facts["index"], searched.rows, workload.rows, options, sizes)


def _planned_manifest(kind: str, table: TableSize, row_group_rows: int) -> Manifest:
    """Build a manifest for a planned table, with the fields that mining reads."""
    shard = Shard(path=shard_name(0, table.shards), rows=-(-table.rows // table.shards), bytes=0, sha256="0" * 64)
    return Manifest(kind=kind, shards=(shard,), rows=table.rows, row_group_rows=row_group_rows)


def saved_bytes(workload: Workload) -> tuple[int, int]:
    """Return the bytes of a checkpoint: (encoder, which rank 0 writes; the labels of one rank)."""
    vectors = -(-workload.labels // workload.ranks) * sum(label_bytes(workload.recipe))
    return sum(parameter_bytes(workload.recipe, workload.vocabulary, 0, workload.dense)), vectors


def _train_memory(workload: Workload) -> int:
    """Estimate a rank's peak bytes: parameters, optimizer state, windows of the stream, one step, one checkpoint."""
    recipe = workload.recipe
    group = default_row_group_rows(workload.queries)
    width = recipe.table_parameters.get("table_width", 0) if workload.dumps else 0
    each = workload.row_bytes["queries"] + 6 * width
    windows = 2 + WINDOWS_AHEAD  # one window is in use, the others are being read and concatenated
    streams = -(-recipe.order.streams // workload.ranks)
    window = streams * recipe.order.window_groups * group * each * windows
    batch, positives = recipe.order.batch, workload.labels_per_query
    candidates = recipe.negatives.candidates_of(batch, positives)
    step = 4 * candidates * workload.columns * 3  # rows, their gradients and optimizer state
    scores = 8.0 * recipe.negatives.scores(batch, positives)
    # While a checkpoint is written: a copy of all but the labels, a copy of one file's labels, a byte per label.
    encoder, vectors = saved_bytes(workload)
    saved = (
        encoder + min(vectors, FILE_BYTES) + workload.labels // workload.ranks if recipe.checkpoint.background else 0
    )
    counts = 12 * workload.labels if recipe.train.positive_weight else 0  # frequencies and weights of labels
    return _PROCESS_BYTES["train"] + int(encoder + vectors + saved + window + step + scores + counts)


def _sample(table: Table) -> tuple[pa.Table, float]:
    """Return the first rows of a table, and the table's stored bytes per row."""
    return table.read(stop=_SAMPLED_ROWS), sum(shard.bytes for shard in table.shards) / table.rows


def _mean(lengths: Any) -> float:
    return pc.mean(lengths).as_py() or 0.0
