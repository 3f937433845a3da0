"""Sizes of data, run and miner by formulas.

A `Workload` is described, `estimate` sizes its tables and processes, `plan` makes one JSON object of all sizes.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow.compute as pc

from extremis.result import Grid
from pipelines.cluster import worker_bytes
from pipelines.mining.plan import BlockPlan, plan_blocks, sizes_of
from pipelines.options import MineOptions, ShardOptions, default_row_group_rows, default_shards, shard_worker_bytes
from schemas import arrow
from schemas.arrow import DENSE
from schemas.errors import InputError, option
from schemas.layout import DataLayout, shard_name
from schemas.manifest import Manifest, Shard
from schemas.shares import ALL_ROWS
from schemas.sizes import say_bytes
from schemas.table import Table
from schemas.waits import Say
from scoring.memory import plan_index
from trainer.checkpoints import FILE_BYTES, row_ranges
from trainer.methods.recipe import Recipe
from trainer.methods.settling import NOMINAL, DataStatistics, settle
from trainer.model import has_bias
from trainer.recipe_files import read_recipe
from trainer.refresh.dump import VECTOR_GROUP_ROWS, VECTOR_ROWS
from trainer.settings.data_statistics import HEAPS, measure
from trainer.settings.resolve import Resolved
from trainer.sizes import PROCESS_BYTES, label_bytes, parameter_bytes
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
# Bytes per line of JSON, with names of fields and quotes: 4.2 to 5.2 characters per token on four data sets.
_JSON_TOKEN, _JSON_POINT, _JSON_LABEL, _JSON_REFERENCE = 4.7, 40, 25, 4

AVERAGES = ("tokens", "label_tokens", "labels_per_query", "key_bytes", "text_bytes")


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
        for name in AVERAGES:
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"--{name.replace('_', '-')} must be above 0; got {getattr(self, name):g}.")
        if self.labels_per_query > self.labels:
            raise InputError(
                parameter="labels_per_query",
                got=f"{self.labels_per_query:g}",
                expected=f"at most {self.labels:,}, the number of labels",
            )

    @property
    def columns(self) -> int:
        """Number of columns of embeddings and vectors: D, plus one if there is a bias."""
        return self.recipe.encoder.dimension + int(has_bias(self.recipe))

    @property
    def searched(self) -> str:
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
        return sum(self.sources.values())

    @property
    def steps(self) -> int:
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


@dataclass(frozen=True)
class TableSize:
    """Size of a table in storage. `times`: how many times a run writes the table."""

    rows: int
    bytes: int
    shards: int
    times: int = 1


class Estimate(NamedTuple):
    """Sizes of all tables in storage, peak bytes of a process for each step, and the blocks of mining."""

    tables: dict[str, TableSize]
    memory: dict[str, int]
    blocks: BlockPlan | None


def estimate(workload: Workload) -> Estimate:
    """Estimate the whole run. Raises InputError if mining needs more memory."""
    recipe, rows = workload.recipe, workload.labels
    sizes, blocks = dict[str, TableSize](), None
    token, label = _TOKEN_FACTOR * _entropy(workload.vocabulary), _LABEL_FACTOR * _entropy(rows)
    key = _ROW_ID_BYTES + _CHARACTER_BYTES * workload.key_bytes
    stored = {
        "queries": key + token * workload.tokens + label * workload.labels_per_query,
        "labels": key + token * workload.label_tokens + _CHARACTER_BYTES * workload.text_bytes,
        **workload.stored,
    }
    for name, count in (("queries", workload.queries), ("labels", rows)):
        size = int(stored[name] * count)
        sizes[name] = TableSize(count, size, default_shards(count, size, ShardOptions().shard_bytes))

    def add_sources(kind: str, each: float) -> None:
        """Add the tables of `kind`, with `each` bytes per row. Each dump contains one table per source."""
        for name, count in workload.sources.items():
            size = int((_ROW_ID_BYTES + each) * count)
            sizes[f"{kind} of {name}"] = TableSize(count, size, sizes[name].shards, workload.dumps)

    if workload.dumps:
        add_sources("embeddings", _VECTOR_FACTOR * 2 * workload.columns)
        if recipe.is_clustered:
            sizes["queries in cluster order"] = replace(sizes["queries"], times=workload.dumps)
        else:
            size = int(rows * (_ROW_ID_BYTES + _VECTOR_FACTOR * 4 * workload.columns))
            sizes["vectors"] = TableSize(rows, size, -(-rows // VECTOR_ROWS), workload.dumps)
            blocks = _mining_blocks(workload, sizes)
            each = _NEGATIVE_FACTOR * _entropy(sizes[workload.searched].rows) + _SCORE_BYTES
            add_sources("negatives", each * recipe.table_parameters["table_width"])
            needs = blocks.needs(workload.rows)
            if scratch := needs.get("candidates", 0) + needs.get("indexes", 0):  # only one mining runs at a time
                sizes["candidates and indexes of mining"] = TableSize(workload.rows, scratch, 0)
    parameters, optimizer = parameter_bytes(recipe, workload.vocabulary, rows, workload.dense)
    files = 2 + len(row_ranges(0, rows, sum(label_bytes(recipe))))
    sizes["checkpoint"] = TableSize(rows, parameters + optimizer, files, recipe.checkpoint.keep)
    shards = (each * sizes[name].rows / sizes[name].shards for name, each in workload.row_bytes.items())
    memory = {"shard": shard_worker_bytes(max(shards))}
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


def _mining_blocks(workload: Workload, data: dict[str, TableSize]) -> BlockPlan:
    """Choose index, blocks and query batch as `extremis mine --memory` does. Raises InputError if memory is short."""
    facts, searched = workload.recipe.table_parameters, data[workload.searched]
    options = MineOptions(memory=workload.memory)

    def manifest(kind: str, table: TableSize, row_group_rows: int) -> Manifest:  # with the fields that mining reads
        rows = -(-table.rows // table.shards)
        shard = Shard(path=shard_name(0, table.shards), rows=rows, bytes=0, sha256="0" * 64)
        return Manifest(kind=kind, shards=(shard,), rows=table.rows, row_group_rows=row_group_rows)

    vectors = manifest("vectors", searched, VECTOR_GROUP_ROWS)
    points = [manifest(name, data[name], default_row_group_rows(n)) for name, n in workload.sources.items()]
    sizes = sizes_of(workload.columns, vectors, points, options, facts["table_width"], facts["table_width"])
    return plan_blocks(facts["index"], searched.rows, workload.rows, options, sizes)


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
    copies = encoder + min(vectors, FILE_BYTES) + workload.labels // workload.ranks
    saved = copies if recipe.checkpoint.background else 0
    counts = 12 * workload.labels if recipe.train.positive_weight else 0  # frequencies and weights of labels
    return PROCESS_BYTES + int(encoder + vectors + saved + window + step + scores + counts)


_NGRAMS = 4  # factor of (tokens of all texts) ** HEAPS: 1.8 to 9 on texts of six data sets; buckets are rounded up
_STAGING_PEAK = 1.05  # peak bytes in staging, with tables, relative to the bytes of the input: 1.00 to 1.06 measured
_STAGING_TOTAL = 1.2  # total bytes written to staging, relative to the bytes of the input: 0.7 to 1.4 on four data sets

_JOB_SERVER = (
    "--runner=PortableRunner --job_endpoint=JOBSERVER:8099 --artifact_endpoint=JOBSERVER:8098 "
    '--environment_type=PROCESS --environment_config=\'{{"command": "/opt/extremis/bin/extremis-worker"}}\' '
    "--parallelism={workers}"
)

# Bytes of Java per Python worker, which do not grow with the data, because bulk data goes through files.
_ENGINES = {
    "flink": 1728 << 20,  # Flink's default TaskManager with one slot
    "spark": 1320 << 20,  # an executor of 1,200 MiB, plus a tenth
}


def workload(
    data: str | None, queries: int | None, labels: int | None, recipe: Recipe, memory: int, averages: dict[str, Any]
) -> Workload:
    """Build a workload; averages, and counts that are None, come from DATA. Raises InputError, TableError."""
    tables: dict[str, Table] = {}
    if data is not None:
        layout = DataLayout(data)
        places = {"queries": layout.queries("train"), "labels": layout.labels}
        tables = {name: Table.open(place, name) for name, place in places.items()}
        queries, labels = queries or tables["queries"].rows, labels or tables["labels"].rows
    if queries is None or labels is None:
        raise InputError(
            f"plan needs the size of the data. Give {option('queries', 'N')} and {option('labels', 'L')}, or "
            f"{option('data', 'DATA')} for a similar data set."
        )
    described = Workload(queries, labels, recipe, memory=memory, **averages)
    if data is None:
        return described
    points, texts = (table.read(stop=1 << 13) for table in tables.values())

    def mean(lengths: Any) -> float:
        return pc.mean(lengths).as_py() or 0.0

    return replace(
        described,
        tokens=mean(pc.list_value_length(points["input_ids"])),
        label_tokens=mean(pc.list_value_length(texts["input_ids"])),
        labels_per_query=mean(pc.list_value_length(points["label_ids"])),
        key_bytes=mean(pc.binary_length(points["key"])),
        text_bytes=mean(pc.binary_length(texts["text"])),
        vocabulary=int(Table.open(layout.tokenizer, "tokenizer").parameters["vocabulary"]),
        dense=int(Table.open(data, "data").parameters.get(DENSE) or 0),
        stored={name: sum(shard.bytes for shard in table.shards) / table.rows for name, table in tables.items()},
    )


def resolve_for(workload: Workload, recipe: str, overrides: Iterable[str], data: str | None) -> Resolved:
    """Compute the settings that the recipe `recipe` takes from the data.

    The statistics of the data come from the workload's averages, or are scaled up from the sample `data`. Raises
    InputError for the same reasons as `resolve`, and TableError.
    """
    body = read_recipe(recipe, overrides)
    if not settle(body, NOMINAL)[1]:
        return Resolved(workload.recipe)
    queries, label_texts = workload.trained_queries, workload.sources.get("labels", 0)
    if data is None:
        pairs, ngrams = queries * workload.labels_per_query, _NGRAMS * (queries * workload.tokens) ** HEAPS
        numbers = queries, workload.labels, round(pairs), label_texts, round(ngrams)
        statistics = DataStatistics(*numbers, workload.tokens)
    else:
        sample = measure(DataLayout(data), "train", ALL_ROWS, bool(label_texts))
        times = queries / sample.queries
        pairs, ngrams = round(sample.pairs * times), round(sample.ngrams * times**HEAPS)
        scaled = {"queries": queries, "labels": workload.labels, "label_texts": label_texts}
        statistics = replace(sample, pairs=pairs, ngrams=ngrams, **scaled)
    return Resolved.of(body, statistics, recipe)


def with_streams_for(ranks: int, recipe: Recipe, say: Say) -> Recipe:
    """Return the recipe with at least one stream for each of the `ranks`; report a change with `say`."""
    streams = recipe.order.streams * -(-ranks // recipe.order.streams)
    if streams == recipe.order.streams:
        return recipe
    say(f"order.streams = {streams} (a run on {ranks} ranks needs this setting)")
    return recipe.model_copy(update={"order": recipe.order.model_copy(update={"streams": streams})})


def plan(workload: Workload, engine: str | None = None) -> dict[str, Any]:
    """Estimate all sizes; return one JSON object.

    `engine`: engine that runs the pipelines; None: this machine. "fusion": what `extremis fuse` needs for training
    points, with the default limit and, as `memory_bytes_of_all`, without a limit. Raises InputError if mining needs
    more memory.
    """
    tables, memory, blocks = estimate(workload)
    over = {step: need for step, need in memory.items() if need > workload.memory}
    recipe = workload.recipe
    points = workload.queries, recipe.encoder.dimension, workload.labels_per_query
    settled, on_engine = plan_index(*points), None
    if engine is not None:
        worker = max(memory[step] for step in ("shard", "mine", "cluster") if step in memory)
        read, stored = workload.input_bytes, sum(tables[each].bytes for each in ("queries", "labels"))
        on_engine = {
            "engine": engine,
            "workers": workload.workers,
            "options": _JOB_SERVER.format(workers=workload.workers),
            "worker_bytes": worker,
            "slot_bytes": worker + _ENGINES[engine],
            "input_bytes": read,
            "staging_bytes": int(_STAGING_PEAK * read),
            "network_bytes": int(read + 2 * _STAGING_TOTAL * read + stored),
        }
    return {
        "workload": {
            **asdict(workload),
            "recipe": recipe.title,
            "dimension": recipe.encoder.dimension,
            "epochs": recipe.train.epochs,
        },
        "tables": {name: asdict(size) for name, size in tables.items()},
        "bytes": sum(size.bytes * size.times for size in tables.values()),
        "memory": memory,
        "mining": blocks
        and {
            "index": blocks.factory.spec,
            "blocks": len(blocks.bounds),
            "block_rows": blocks.block_rows,
            "query_batch": blocks.batch,
            "refreshes": workload.dumps,
        },
        "fusion": {
            "index": settled.factory.spec,
            "points": settled.points,
            "memory_bytes": settled.bytes,
            "stored_bytes": settled.stored,
            "milliseconds": settled.milliseconds,
            "memory_bytes_of_all": plan_index(*points, budget=1 << 62).bytes,
        },
        "steps": workload.steps,
        "on_engine": on_engine,
        "over": over,
        "go": not over,
    }


def view(plan: dict[str, Any]) -> list[Grid | str]:
    """Return the tables and lines that describe a plan."""
    rows = []
    for name, size in plan["tables"].items():
        numbers = [f"{size['rows']:,}", f"{size['shards']:,}", say_bytes(size["bytes"]), str(size["times"])]
        rows.append([name, *numbers, say_bytes(size["bytes"] * size["times"])])
    columns = ["table", "rows", "shards", "bytes", "times", "in all"]
    shown: list[Grid | str] = [Grid("in storage", columns, rows)]
    limit = plan["workload"]["memory"]
    steps = [[step, say_bytes(need), "fits" if need <= limit else "too much"] for step, need in plan["memory"].items()]
    shown.append(Grid(f"each process, with {say_bytes(limit)}", ["step", "memory", ""], steps))
    if mining := plan["mining"]:
        shown.append(
            f"mining: {mining['blocks']:,} block(s) of up to {mining['block_rows']:,} vectors, "
            f"index {mining['index']}, {mining['query_batch']:,} queries at a time, {mining['refreshes']} refresh(es)",
        )
    fusion = plan["fusion"]
    all_points = fusion["points"] == plan["workload"]["queries"]
    needed = say_bytes(fusion["memory_bytes_of_all"]).replace(" ", "")
    more = "" if all_points else f"; all points need {option('memory', needed)}"
    shown.append(
        f"fusion: {fusion['points']:,} points, index {fusion['index']}, {say_bytes(fusion['memory_bytes'])} in memory, "
        f"{say_bytes(fusion['stored_bytes'])} stored, about {fusion['milliseconds']:.2g} ms per query in large batches"
        f"{more}"
    )
    if engine := plan["on_engine"]:
        worker, slot, staging, network, read = (
            say_bytes(engine[f"{name}_bytes"]) for name in ("worker", "slot", "staging", "network", "input")
        )
        shown.append(f"pipelines on {engine['engine']} with {engine['workers']:,} worker(s)")
        shown.append(f"  memory: {worker} per worker, {slot} per slot with a worker")
        traffic = f"{network} read and written by shard, for about {read} of input"
        shown.append(f"  storage: at most {staging} of temporary files; {traffic}")
        shown.append(f"  options after --: {engine['options']}")
    over = ", ".join(f"{step} needs {say_bytes(need)}" for step, need in plan["over"].items())
    verdict = f"does not fit: {over}" if over else "every step fits"
    shown.append(f"{say_bytes(plan['bytes'])} in storage, {plan['steps']:,} steps; {verdict}")
    return shown
