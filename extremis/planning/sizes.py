"""Bytes on storage and in memory, summed from the own estimates of the pipelines and the trainer."""

from dataclasses import dataclass, replace

import pyarrow as pa

from extremis.planning import sample
from extremis.planning.workload import Workload
from pipelines.clustering.plan import worker_bytes
from pipelines.common import assign
from pipelines.mining.options import MineOptions
from pipelines.mining.plan import Blocks, settle, sizes_of
from pipelines.sharding.options import ShardOptions
from schemas.layout import shard_name
from schemas.manifest import Manifest, Shard
from schemas.shard_files.parquet import encode
from trainer.checkpoints.checkpoint import FILE_BYTES, row_ranges
from trainer.footprint import label_bytes, parameter_bytes
from trainer.refresh.dump import VECTOR_GROUP_ROWS, VECTOR_ROWS
from trainer.stream.dataset import WINDOWS_AHEAD

_PYTHON = {"shard": 300 << 20, "train": 450 << 20}  # a process with its libraries at work, measured
_COPIES = 3  # of a shard while it is decoded, sorted and encoded


@dataclass(frozen=True)
class TableSize:
    """Size of a table on storage; `times`: how often a run writes it."""

    rows: int
    bytes: int
    shards: int
    times: int = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of all tables on storage, peak bytes of one process of each step, and the blocks of mining."""

    tables: dict[str, TableSize]
    memory: dict[str, int]
    blocks: Blocks | None


def measure(workload: Workload, rows: dict[str, pa.Table]) -> Sizes:
    """Estimate the sizes of the whole run from `rows`, a sample of queries and of labels."""
    tables = data_tables(workload, rows)
    blocks = None
    if workload.dumps:
        tables |= source_tables("embeddings", sample.embeddings(workload, "float16"), workload, tables)
        if workload.recipe.clusters:
            tables["queries in cluster order"] = replace(tables["queries"], times=workload.dumps)
        else:
            size = int(row_bytes(sample.embeddings(workload, "float32"), VECTOR_GROUP_ROWS) * workload.labels)
            shards = -(-workload.labels // VECTOR_ROWS)
            tables["vectors"] = TableSize(workload.labels, size, shards, workload.dumps)
            blocks = mining_blocks(workload, tables)
            tables |= source_tables("negatives", sample.negatives(workload), workload, tables)
    parameters, optimizer = parameter_bytes(workload.recipe, workload.vocabulary, workload.labels)
    kept = workload.recipe.checkpoint.keep
    files = 2 + len(row_ranges(0, workload.labels, sum(label_bytes(workload.recipe))))
    tables["checkpoint"] = TableSize(workload.labels, parameters + optimizer, files, kept)
    memory = {"shard": shard_memory(workload, rows, tables)}
    if blocks is not None:
        memory["mine"] = blocks.estimate.total
    if workload.recipe.clusters and workload.dumps:
        queries = tables["queries"]
        memory["cluster"] = worker_bytes(queries.rows, workload.columns, queries.bytes / queries.rows, workload.memory)
    memory["train"] = train_memory(workload, rows, parameters + optimizer)
    return Sizes(tables, memory, blocks)


def row_bytes(table: pa.Table, row_group_rows: int) -> float:
    """Estimate the bytes on storage per row, encoded as the pipelines do, without the fixed bytes of a file."""
    footer = encode(table.slice(0, 0), row_group_rows).size
    return (encode(table, row_group_rows).size - footer) / table.num_rows


def data_tables(workload: Workload, rows: dict[str, pa.Table]) -> dict[str, TableSize]:
    """Estimate queries and labels, as `extremis shard` cuts them."""
    sizes = {}
    for name, count in (("queries", workload.queries), ("labels", workload.labels)):
        size = int(row_bytes(rows[name], assign.default_row_group_rows(count)) * count)
        sizes[name] = TableSize(count, size, assign.default_shards(count, size, ShardOptions().shard_bytes))
    return sizes


def source_tables(kind: str, rows: pa.Table, workload: Workload, data: dict[str, TableSize]) -> dict[str, TableSize]:
    """Estimate the tables of `kind`, `rows` a sample, which have a row for each of every source, of every dump."""
    each = row_bytes(rows, assign.default_row_group_rows(workload.queries))
    return {
        f"{kind} of {name}": TableSize(count, int(each * count), data[name].shards, workload.dumps)
        for name, count in workload.sources.items()
    }


def mining_blocks(workload: Workload, data: dict[str, TableSize]) -> Blocks:
    """Choose index, blocks and query batch as `extremis mine --memory` does. Raises InputError: too little memory."""
    width = workload.recipe.negatives.table_width
    options = MineOptions(memory=workload.memory)
    vectors = _planned("vectors", data["vectors"], VECTOR_GROUP_ROWS)
    points = [
        _planned(name, data[name], assign.default_row_group_rows(count)) for name, count in workload.sources.items()
    ]
    sizes = sizes_of(workload.columns, vectors, points, options, width, width)
    return settle(workload.recipe.table_facts["index"], workload.labels, workload.rows, options, sizes)


def shard_memory(workload: Workload, rows: dict[str, pa.Table], data: dict[str, TableSize]) -> int:
    """Estimate the peak of a sharding worker: the largest shard, a few times over."""
    shards = (rows[name].nbytes / rows[name].num_rows * data[name].rows / data[name].shards for name in rows)
    return _PYTHON["shard"] + int(_COPIES * max(shards))


def train_memory(workload: Workload, rows: dict[str, pa.Table], parameters: int) -> int:
    """Estimate the peak of a trainer: parameters and optimizer state, the stream's windows, a step, a checkpoint.

    One process holds all: the classifier is not split over ranks.
    """
    recipe = workload.recipe
    group = assign.default_row_group_rows(workload.queries)
    each = rows["queries"].nbytes / rows["queries"].num_rows + 6 * recipe.negatives.table_width
    windows = 2 + WINDOWS_AHEAD  # one is dealt, the others are read and concatenated
    window = recipe.order.streams * recipe.order.window_groups * group * each * windows
    batch, positives = recipe.order.batch, workload.labels_per_query
    # Rows, their gradient and optimizer state.
    step = 4 * recipe.negatives.candidates_of(batch, positives) * workload.columns * 3
    scores = 8.0 * recipe.negatives.scores(batch, positives)
    # While a checkpoint is written: a copy of all but the labels, of one file's labels, and a byte per label.
    vectors = workload.labels * sum(label_bytes(recipe))
    saved = parameters - vectors + min(vectors, FILE_BYTES) + workload.labels if recipe.checkpoint.background else 0
    return _PYTHON["train"] + int(parameters + saved + window + step + scores)


def _planned(kind: str, table: TableSize, row_group_rows: int) -> Manifest:
    """Make the manifest of a planned table, as far as mining reads it."""
    shard = Shard(path=shard_name(0, table.shards), rows=-(-table.rows // table.shards), bytes=0, sha256="0" * 64)
    return Manifest(kind=kind, shards=(shard,), rows=table.rows, row_group_rows=row_group_rows)
