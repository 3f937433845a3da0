"""Bytes, memory and seconds of a run from formulas of its size; every measured figure stands in the table below."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.clustering.plan import worker_bytes
from pipelines.mining.memory import Blocks, settle, sizes_of
from pipelines.options import MineOptions, ShardOptions, default_row_group_rows, default_shards
from schemas import arrow
from schemas.errors import InputError
from schemas.layout import DataLayout, shard_name
from schemas.manifest import Manifest, Shard
from schemas.table import Table
from search.factory import EXACT, Factory
from trainer.checkpoints.checkpoint import FILE_BYTES, row_ranges
from trainer.config import Recipe
from trainer.footprint import label_bytes, parameter_bytes
from trainer.model import has_bias
from trainer.refresh.dump import VECTOR_GROUP_ROWS, VECTOR_ROWS
from trainer.stream.dataset import WINDOWS_AHEAD

# Bytes on storage, of shards that the pipelines wrote. Ids by Zipf's law have an entropy; a page takes some more.
_TOKENS = 1.3  # times their entropy: 1.1 of titles (Tate), 1.6 of made-up words in any order
_LABELS = 1.7  # 1.7 of Tate, 2.0 where no label follows another
_NEGATIVES = 1.3  # of mined tables: 1.0 to 1.6, the more the later in a run
_SCORE = 1.5  # a float16 of a table of negatives, in order
_FLOATS = 0.925  # of a vector, over its bytes in memory: float16 and float32, D from 24 to 256
_CHARACTER = 0.7  # of keys and of texts: 0.4 to 0.8 on Tate and made-up keys
_NUMBERS = 2.5  # a row's ids and frequency: 1.1 of queries, 3.3 of labels
# Bytes in memory, of processes at work.
_PYTHON = {"shard": 300 << 20, "train": 450 << 20}
_COPIES = 3  # of a shard while it is decoded, sorted and encoded
# Bytes of a line of JSON: four sets have 4.2 to 5.2 characters a token, names of fields and quotes around them.
_TOKEN, _POINT, _LABEL, _REFERENCE = 4.7, 40, 25, 4
# Seconds of one core (docs/results.md: "Sharding", "Mining", "The classifier's part of a step"), and of training Tate
# with D of 64 and 512, hard and random negatives of 10 to 3,200, and with all labels.
_PER_BYTE = 120e-9  # sharding: 17.4 s for 1,000,000 lines of JSON, 3,262 s for 110,000,000 of 23.6 GB
_START = 3.0  # of the processes of a pipeline, where they start on this machine, and of a trainer
_PER_PRODUCT = 14e-12  # mining, a multiplication: exact, and 1M labels, 200,000 queries, IVF1024,PQ32x4fs
_STEP = 2e-3  # training: a step, whatever it has
_PER_FEATURE = 2.5e-9  # a number of a row that the bag sums and learns; n-grams are rows too
_PER_WEIGHT = 0.12e-9  # a weight of another encoder, for a token; and a number of a score in a matrix product
_PER_PAIR = 1.1e-9  # a number of a label's row that one query gathers alone

_SAMPLE = 1 << 13  # rows of DATA that averages are taken over


@dataclass(frozen=True)
class Workload:
    """Size of the data, recipe and machines. Tokens, characters and labels are averages. Raises InputError.

    `stored`: bytes of a row of queries and of labels, where there is a sample of both.
    """

    queries: int
    labels: int
    recipe: Recipe
    tokens: float = 32.0  # per query
    label_tokens: float = 8.0
    labels_per_query: float = 5.0
    key_bytes: float = 12.0
    text_bytes: float = 40.0  # of a label's text
    vocabulary: int = 30_000
    ranks: int = 1
    workers: int = 1  # pipeline workers, of one core each
    memory: int = 8 << 30  # bytes of each process
    stored: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("queries", "labels", "ranks", "workers", "memory"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1; got {getattr(self, name):,}.")
        if self.recipe.data.mix:
            raise InputError("data.mix: a mix cannot be planned; plan with data.split and data.label_texts instead.")
        for name in ("tokens", "label_tokens", "labels_per_query", "key_bytes", "text_bytes"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"--{name.replace('_', '-')} must be above 0; got {getattr(self, name):g}.")
        if self.labels_per_query > self.labels:
            raise InputError(f"--labels-per-query {self.labels_per_query:g}: there are only {self.labels:,} labels.")

    @property
    def columns(self) -> int:
        """Count the columns of embeddings and vectors: D, and one for a bias."""
        return self.recipe.encoder.dimension + int(has_bias(self.recipe))

    @property
    def sources(self) -> dict[str, int]:
        """Count the rows of dumps and negative tables, by source."""
        return {"queries": self.queries, **({"labels": self.labels} if self.recipe.data.label_texts else {})}

    @property
    def trained_queries(self) -> int:
        """Count the queries to train on, without those held out."""
        return self.recipe.data.trained.rows(self.queries)

    @property
    def rows(self) -> int:
        """Count the rows of all sources."""
        return sum(self.sources.values())

    @property
    def steps(self) -> int:
        """Count the steps of the whole run."""
        rows = self.trained_queries + self.sources.get("labels", 0)
        return -(-rows // self.recipe.order.batch) * self.recipe.train.epochs

    @property
    def dumps(self) -> int:
        """Count the dumps of the whole run, and the tables mined from them or put into cluster order by them."""
        return len(self.recipe.table_epochs())

    @property
    def input_bytes(self) -> int:
        """Estimate the bytes of the input as lines of JSON, uncompressed."""
        reference = self.key_bytes + _REFERENCE
        point = _TOKEN * self.tokens + self.key_bytes + self.labels_per_query * reference + _POINT
        return int(self.queries * point + self.labels * (self.text_bytes + self.key_bytes + _LABEL))

    @property
    def row_bytes(self) -> dict[str, float]:
        """Estimate the bytes of a row of queries and of labels in memory."""
        token = arrow.token_type(self.vocabulary).bit_width / 8
        label = arrow.label_type(self.labels).bit_width / 8
        return {
            "queries": 20 + self.key_bytes + token * self.tokens + label * self.labels_per_query,
            "labels": 28 + self.key_bytes + self.text_bytes + token * self.label_tokens,
        }

    def like(self, data: str) -> "Workload":
        """Return the workload with the averages of DATA. Raises TableError."""
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
            stored={"queries": queries_bytes, "labels": labels_bytes},
        )


@dataclass(frozen=True)
class TableSize:
    """Size of a table on storage; `times`: how often a run writes it."""

    rows: int
    bytes: int
    shards: int
    times: int = 1


@dataclass(frozen=True)
class Estimate:
    """Sizes of all tables on storage, peak bytes of one process and seconds of each step, and the blocks of mining."""

    tables: dict[str, TableSize]
    memory: dict[str, int]
    seconds: dict[str, float]
    blocks: Blocks | None


def estimate(workload: Workload) -> Estimate:
    """Estimate the whole run. Raises InputError: too little memory for mining."""
    recipe = workload.recipe
    sizes = dict(_data_tables(workload))
    blocks = None
    if workload.dumps:
        sizes |= _source_tables("embeddings", _FLOATS * 2 * workload.columns, workload, sizes)
        if recipe.clusters:
            sizes["queries in cluster order"] = replace(sizes["queries"], times=workload.dumps)
        else:
            rows = workload.labels
            size = int(rows * (_NUMBERS + _FLOATS * 4 * workload.columns))
            sizes["vectors"] = TableSize(rows, size, -(-rows // VECTOR_ROWS), workload.dumps)
            blocks = _mining_blocks(workload, sizes)
            each = _NEGATIVES * _entropy(rows) + _SCORE
            sizes |= _source_tables("negatives", each * recipe.negatives.table_width, workload, sizes)
    parameters, optimizer = parameter_bytes(recipe, workload.vocabulary, workload.labels)
    files = 2 + len(row_ranges(0, workload.labels, sum(label_bytes(recipe))))
    sizes["checkpoint"] = TableSize(workload.labels, parameters + optimizer, files, recipe.checkpoint.keep)
    encoder = parameters - workload.labels * label_bytes(recipe).parameters
    memory = {"shard": _shard_memory(workload, sizes)}
    seconds = {"shard": _START + _PER_BYTE * workload.input_bytes / workload.workers}
    if blocks is not None:
        memory["mine"] = blocks.estimate.total
        seconds["mine"] = workload.dumps * (_START + _mine_seconds(workload, blocks) / workload.workers)
    if recipe.clusters and workload.dumps:
        queries = sizes["queries"]
        memory["cluster"] = worker_bytes(queries.rows, workload.columns, queries.bytes / queries.rows, workload.memory)
    memory["train"] = _train_memory(workload, parameters + optimizer)
    seconds["train"] = _START + workload.steps * _step_seconds(workload, encoder) / workload.ranks
    return Estimate(sizes, memory, seconds, blocks)


def _entropy(count: int) -> float:
    """Return the bytes of an id of [0, count) by Zipf's law: (log2(n) / 2 + log2(ln n)) / 8."""
    count = max(count, 8)
    return (math.log2(count) / 2 + math.log2(math.log(count))) / 8


def _data_tables(workload: Workload) -> Iterator[tuple[str, TableSize]]:
    """Estimate queries and labels, as `extremis shard` cuts them."""
    token, label = _TOKENS * _entropy(workload.vocabulary), _LABELS * _entropy(workload.labels)
    key = _NUMBERS + _CHARACTER * workload.key_bytes
    stored = {
        "queries": key + token * workload.tokens + label * workload.labels_per_query,
        "labels": key + token * workload.label_tokens + _CHARACTER * workload.text_bytes,
        **workload.stored,
    }
    for name, rows in (("queries", workload.queries), ("labels", workload.labels)):
        size = int(stored[name] * rows)
        yield name, TableSize(rows, size, default_shards(rows, size, ShardOptions().shard_bytes))


def _source_tables(kind: str, each: float, workload: Workload, data: dict[str, TableSize]) -> dict[str, TableSize]:
    """Estimate the tables of `kind`, `each` bytes a row, which have a row for each of every source, of every dump."""
    return {
        f"{kind} of {name}": TableSize(rows, int((_NUMBERS + each) * rows), data[name].shards, workload.dumps)
        for name, rows in workload.sources.items()
    }


def _mining_blocks(workload: Workload, data: dict[str, TableSize]) -> Blocks:
    """Choose index, blocks and query batch as `extremis mine --memory` does. Raises InputError: too little memory."""
    width = workload.recipe.negatives.table_width
    options = MineOptions(memory=workload.memory)
    vectors = _planned("vectors", data["vectors"], VECTOR_GROUP_ROWS)
    points = [_planned(name, data[name], default_row_group_rows(n)) for name, n in workload.sources.items()]
    sizes = sizes_of(workload.columns, vectors, points, options, width, width)
    return settle(workload.recipe.table_facts["index"], workload.labels, workload.rows, options, sizes)


def _planned(kind: str, table: TableSize, row_group_rows: int) -> Manifest:
    """Make the manifest of a planned table, as far as mining reads it."""
    shard = Shard(path=shard_name(0, table.shards), rows=-(-table.rows // table.shards), bytes=0, sha256="0" * 64)
    return Manifest(kind=kind, shards=(shard,), rows=table.rows, row_group_rows=row_group_rows)


def _shard_memory(workload: Workload, data: dict[str, TableSize]) -> int:
    """Estimate the peak of a sharding worker: the largest shard, a few times over."""
    shards = (each * data[name].rows / data[name].shards for name, each in workload.row_bytes.items())
    return _PYTHON["shard"] + int(_COPIES * max(shards))


def _train_memory(workload: Workload, parameters: int) -> int:
    """Estimate the peak of a trainer: parameters and optimizer state, the stream's windows, a step, a checkpoint.

    One process holds all: the classifier is not split over ranks.
    """
    recipe = workload.recipe
    group = default_row_group_rows(workload.queries)
    each = workload.row_bytes["queries"] + 6 * recipe.negatives.table_width
    windows = 2 + WINDOWS_AHEAD  # one is dealt, the others are read and concatenated
    window = recipe.order.streams * recipe.order.window_groups * group * each * windows
    batch, positives = recipe.order.batch, workload.labels_per_query
    candidates = recipe.negatives.candidates_of(batch, positives)
    step = 4 * candidates * workload.columns * 3  # rows, their gradient and optimizer state
    scores = 8.0 * recipe.negatives.scores(batch, positives)
    # While a checkpoint is written: a copy of all but the labels, of one file's labels, and a byte per label.
    vectors = workload.labels * sum(label_bytes(recipe))
    saved = parameters - vectors + min(vectors, FILE_BYTES) + workload.labels if recipe.checkpoint.background else 0
    return _PYTHON["train"] + int(parameters + saved + window + step + scores)


def _mine_seconds(workload: Workload, blocks: Blocks) -> float:
    """Estimate one refresh by mining's own estimate of cost; a graph costs at most what exact search does."""
    rows, count, factory = max(stop - start for start, stop in blocks.bounds), len(blocks.bounds), blocks.factory
    priced = factory if factory.lists else Factory(EXACT)
    sizes = workload.rows, workload.recipe.negatives.table_width, None, workload.columns
    fixed = priced.cost(rows, 0, *sizes)  # what speaks against an index, and takes no time
    return _PER_PRODUCT * (priced.cost(rows, count, *sizes) - fixed)


def _step_seconds(workload: Workload, encoder_bytes: int) -> float:
    """Estimate a step: the texts that are encoded, the rows that queries gather, and the products of the pool."""
    recipe, columns = workload.recipe, workload.columns
    negatives, batch = recipe.negatives, recipe.order.batch
    pool = negatives.pool_size(batch, workload.labels_per_query, workload.labels)
    own = batch * (workload.labels_per_query + negatives.most_hard) + (0 if pool else negatives.draws(batch))
    tokens = batch * workload.tokens
    if recipe.encodes_labels:
        tokens += min(own + pool, workload.labels) * workload.label_tokens
    rows = recipe.encoder.model_dump().get("ngrams", 0)  # of a bag, a token; another encoder multiplies its weights
    encoded = tokens * (_PER_FEATURE * rows * columns if rows else _PER_WEIGHT * encoder_bytes / 4)
    return _STEP + encoded + columns * (_PER_PAIR * own + _PER_WEIGHT * batch * pool)


def _sample(table: Table) -> tuple[pa.Table, float]:
    """Return the first rows of a table, and the bytes of a row on storage."""
    rows = pa.concat_tables(table.batches(stop=_SAMPLE))
    return rows, sum(shard.bytes for shard in table.shards) / table.rows


def _mean(lengths: Any) -> float:
    return pc.mean(lengths).as_py() or 0.0
