"""Rehearsal stages of a pipeline worker: `shard` samples of the input, and `mine` synthetic blocks."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.rehearsal import synthetic_tables
from benchmarks.rehearsal.stage import Sizes, Stage, Task, size_of
from pipelines.mine import mine as mine_dump
from pipelines.options import MineOptions, ShardOptions, default_row_group_rows
from pipelines.shard import shard as shard_input
from schemas import arrow
from schemas.layout import MINING_COST, DataLayout, RunLayout
from schemas.process import peak_bytes
from schemas.table import Table
from search.index import Factory

_SECONDS_PER_ROW, _SECONDS_PER_PRODUCT = 60e-6, 14e-12  # to size samples; no result depends on these figures
_ONE_WORKER = ("--direct_num_workers=1", "--direct_running_mode=in_memory")


def shard(task: Task) -> list[Stage]:
    """Shard two samples of different size. The difference in cost gives the cost per byte; the rest is constant."""
    sizes, took = task.sizes, list[tuple[int, float, int]]()
    group, words = default_row_group_rows(sizes.queries), max(100, min(sizes.vocabulary, 30_000))
    options = ShardOptions(tokenizer=f"train:{words}", row_group_rows=group)
    most = int(max(8, min(sizes.queries, max(4000, task.seconds / 8 / _SECONDS_PER_ROW))))
    for rows in (max(1, most // 4), most):
        raw, data = f"{task.folder}/raw-{rows}", f"{task.folder}/sharded-{rows}"
        read, began = _write_lines(Path(raw), rows, sizes), time.perf_counter()
        shard_input(raw, data, options, _ONE_WORKER)
        took.append((read, time.perf_counter() - began, size_of(data)))
    (small_bytes, *small), (large_bytes, *large) = took
    times = max(0.0, sizes.input_bytes - large_bytes) / max(1, large_bytes - small_bytes)
    seconds, stored = (whole + times * max(0.0, whole - part) for part, whole in zip(small, large, strict=True))
    return [Stage("shard", "shard", seconds, peak_bytes(), stored, note=f"{most:,} rows")]


def _write_lines(folder: Path, rows: int, sizes: Sizes) -> int:
    """Write `rows` rows of input, and proportionally many labels, as JSON lines; return the bytes."""
    draw, labels = np.random.default_rng(rows), max(10, rows * sizes.labels // sizes.queries)
    letters, width = draw.choice([*"etaoinshrdlucm"], (min(sizes.vocabulary, 30_000), 5)), round(sizes.key_bytes)
    words = np.array(["".join(word) for word in letters.tolist()], object)
    folder.mkdir()

    def text(size: float) -> str:
        return " ".join(words[synthetic_tables.zipf(draw, max(1, round(size / 6)), len(words))])

    with (folder / "labels.jsonl").open("w") as file:
        file.writelines(f'{{"key": "{n:0{width}}", "text": "{text(sizes.text_bytes)}"}}\n' for n in range(labels))
    with (folder / "train-00.jsonl").open("w") as file:
        for n, named in enumerate(draw.integers(0, labels, (rows, round(sizes.labels_per_query))).tolist()):
            keys = [f"{label:0{width}}" for label in dict.fromkeys(named)]
            row = {"key": f"{n:0{width}}", "text": text(4.7 * sizes.tokens), "labels": keys}
            file.write(json.dumps(row) + "\n")
    return size_of(str(folder))


def make_dump(task: Task) -> list[Stage]:
    """Write a dump with one or two blocks, and the queries to search for in the dump."""
    sizes, data, run = _sample_sizes(task), DataLayout(f"{task.folder}/searched"), RunLayout(f"{task.folder}/mined")
    synthetic_tables.write_data(data.root, sizes, False)
    table, schema = Table.open(data.queries("train")), arrow.embeddings(sizes.columns)
    of = {"parents": {"queries": table.digest}, "parameters": {"epoch": 0}}
    group = table.manifest.row_group_rows or 1
    synthetic_tables.write_vectors(run.embeddings(0, "queries"), "embeddings", table.rows, schema, group, **of)
    of, schema = {"parameters": {"epoch": 0, "use_from": 2, "sources": ["queries"]}}, arrow.vectors(sizes.columns)
    synthetic_tables.write_vectors(run.vectors(0), "vectors", sizes.labels, schema, 1 << 14, **of)
    return []


def mine(task: Task) -> list[Stage]:
    """Mine the dump; scale the cost of a block with the number of products, and of a merge with rows and blocks."""
    whole, sample, run = task.sizes, _sample_sizes(task), RunLayout(f"{task.folder}/mined")
    mining = {"width": whole.width, "block_rows": sample.block_rows, "query_batch": whole.batch, "memory": whole.memory}
    options = MineOptions(index="auto" if Factory(whole.index).lists else whole.index, **mining)
    manifest = mine_dump(f"{task.folder}/searched", run.root, options=options, beam_options=_ONE_WORKER)["queries"]
    spent = json.loads(Path(run.negatives(2, MINING_COST)).read_text())["tables"]["queries"]
    index = manifest.parameters["index"]
    seconds = {stage: part / sample.blocks for stage, part in spent["seconds"].items()}
    rows, labels = whole.queries / sample.queries, whole.block_rows / sample.block_rows
    sides = [(Factory(whole.index), whole.block_rows), (Factory(index), sample.block_rows)]
    built, built_few = (factory.building_cost(n, whole.columns) for factory, n in sides)
    each, each_few = (factory.query_cost(n, whole.width, None, whole.columns) for factory, n in sides)
    merging, searching = seconds.pop("merge", 0.0) * rows, seconds.pop("search", 0.0) * rows * each / each_few
    building = seconds.pop("build index", 0.0) * (built / built_few if built_few else 1.0)
    took = building + searching + labels * sum(seconds.values())
    vectors, merged = (sum(s.bytes for s in t.shards) for t in (Table.open(run.vectors(0)).manifest, manifest))
    read, done = vectors * whole.block_rows / sample.labels, f"{sample.queries:,} rows"
    note = f"{sample.blocks} of {sample.block_rows:,} vectors by {index}, {done}"
    stored = merged * rows if labels == 1 else None  # with fewer labels, ids are shorter
    return [
        Stage("mine", "block", took, spent["peak_bytes"], read, note=note),
        Stage("mine", "merge", merging * whole.blocks, None, stored, note=done),
    ]


def _sample_sizes(task: Task) -> Sizes:
    """Return the sizes for mining: one block, or two blocks to merge, as large as the time allows."""
    sample = replace(task.sizes, queries=min(task.sizes.queries, 1 << 17), blocks=min(2, task.sizes.blocks))
    products = task.seconds / 4 / _SECONDS_PER_PRODUCT / sample.blocks * (8 if Factory(sample.index).lists else 1)
    while sample.queries * sample.block_rows * sample.columns > products and sample.queries > 1 << 10:
        block_rows = max(min(1 << 15, sample.block_rows), sample.block_rows // 2)
        sample = replace(sample, queries=sample.queries // 2, block_rows=block_rows)
    return replace(sample, labels=sample.blocks * sample.block_rows)
