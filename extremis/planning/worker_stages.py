"""Stages of a worker of the pipelines: `shard` of samples of the input, `mine` of blocks that are made up."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from extremis.planning import made_data
from extremis.planning.stage import Sizes, Stage, Task, peak_bytes, size_of
from pipelines.mine import mine as mine_dump
from pipelines.options import MineOptions, ShardOptions, default_row_group_rows
from pipelines.shard import shard as shard_input
from schemas import arrow
from schemas.layout import SPENT, DataLayout, RunLayout
from schemas.table import Table
from search.factory import EXACT, Factory

_ROW, _PRODUCT = 60e-6, 14e-12  # seconds; the size of a sample goes by them, and nothing that is said
_ONE = ("--direct_num_workers=1", "--direct_running_mode=in_memory")


def shard(task: Task) -> list[Stage]:
    """Shard two samples of the input: what the larger takes more goes with the bytes, the rest comes once."""
    sizes, group = task.sizes, default_row_group_rows(task.sizes.queries)
    most = int(min(sizes.queries, max(4000, task.seconds / 8 / _ROW)))
    took: list[tuple[int, float, int]] = []
    for rows in (max(1, most // 4), most):
        raw, data = Path(f"{task.folder}/raw-{rows}"), f"{task.folder}/sharded-{rows}"
        read, began = _write_lines(raw, rows, sizes), time.perf_counter()
        shard_input(str(raw), data, ShardOptions(tokenizer="train:8000", row_group_rows=group), _ONE)
        took.append((read, time.perf_counter() - began, size_of(data)))
    (fewer, once, small), (more, seconds, stored) = took
    times = (sizes.input_bytes - more) / max(1, more - fewer)
    seconds, stored = (most + times * max(0.0, most - least) for most, least in ((seconds, once), (stored, small)))
    return [Stage("shard", "shard", seconds, peak_bytes(), stored, note=f"{most:,} rows of the input")]


def _write_lines(folder: Path, rows: int, sizes: Sizes) -> int:
    """Write so many rows of the input, and their part of the labels, as lines of JSON; return the bytes."""
    draw, labels = np.random.default_rng(rows), max(10, rows * sizes.labels // sizes.queries)
    letters, width = np.array(list("abcdefghijklmnopqrstuvwxyz")), round(sizes.key_bytes)
    words = ["".join(word) for word in draw.choice(letters, (8000, 5))]
    folder.mkdir()

    def text(characters: float) -> str:
        return " ".join(words[at] for at in (draw.random(max(1, round(characters / 6))) ** 4 * len(words)).astype(int))

    with (folder / "labels.jsonl").open("w") as file:
        file.writelines(f'{{"key": "{n:0{width}}", "text": "{text(sizes.text_bytes)}"}}\n' for n in range(labels))
    with (folder / "train-00.jsonl").open("w") as file:
        for n in range(rows):
            named = {f"{at:0{width}}" for at in draw.integers(0, labels, round(sizes.labels_per_query)).tolist()}
            row = {"key": f"{n:0{width}}", "text": text(4.7 * sizes.tokens), "labels": sorted(named)}
            file.write(json.dumps(row) + "\n")
    return size_of(str(folder))


def make_dump(task: Task) -> list[Stage]:
    """Write a dump of one block, or of two, and the queries that are searched against it."""
    sizes, run = _sample(task), RunLayout(f"{task.folder}/mined")
    made_data.write_data(f"{task.folder}/searched", sizes, False)
    table = Table.open(DataLayout(f"{task.folder}/searched").queries("train"))
    facts = {"parents": {"queries": table.digest}, "parameters": {"epoch": 0}}
    group = table.manifest.row_group_rows or 1
    made_data.write_vectors(
        run.embeddings(0, "queries"), "embeddings", table.rows, arrow.embeddings(sizes.columns), group, **facts
    )
    asked = {"epoch": 0, "use_from": 2, "bias": True, "sources": ["queries"]}
    made_data.write_vectors(
        run.vectors(0), "vectors", sizes.labels, arrow.vectors(sizes.columns), 1 << 14, parameters=asked
    )
    return []


def mine(task: Task) -> list[Stage]:
    """Mine that dump; a block and a merge of all queries take what these take, by the products of the search."""
    whole, few, run = task.sizes, _sample(task), RunLayout(f"{task.folder}/mined")
    options = MineOptions(
        memory=whole.memory, width=whole.width, block_rows=few.block_rows, query_batch=whole.batch, index=few.index
    )
    made = mine_dump(f"{task.folder}/searched", run.root, options=options, beam_options=_ONE)["queries"]
    spent = json.loads(Path(run.negatives(2, "queries")).parent.joinpath(SPENT).read_text())["tables"]["queries"]
    merging = spent["seconds"].pop("merge", 0.0) / few.blocks
    rows = whole.queries / few.queries
    said = f"{few.blocks} of {few.block_rows:,} vectors by {few.index}, {few.queries:,} queries"
    searched = sum(spent["seconds"].values()) / few.blocks * _cost(whole) / _cost(few)
    vectors = size_of(run.vectors(0)) / few.labels * whole.block_rows
    merged = sum(each.bytes for each in made.shards) * rows
    return [
        Stage("mine", "block", searched, spent["peak_bytes"], vectors, note=said),
        Stage("mine", "merge", merging * rows * whole.blocks, None, merged, note=f"{few.queries:,} rows"),
    ]


def _sample(task: Task) -> Sizes:
    """Return the sizes that are mined: one block, or two that are merged, as large as there is time for."""
    whole, least = task.sizes, 1 << 12
    sample = replace(whole, queries=min(whole.queries, 1 << 16), blocks=min(2, whole.blocks))
    while _cost(sample) * sample.blocks * _PRODUCT > task.seconds / 4 and sample.block_rows > least:
        rows = sample.block_rows // 2
        lists = max(16, round(Factory(whole.index).lists * (rows / whole.block_rows) ** 0.5))
        index = re.sub(r"\bIVF\d+", f"IVF{lists}", whole.index)
        sample = replace(
            sample, block_rows=rows, index=index, queries=max(min(least, whole.queries), sample.queries // 2)
        )
    return replace(sample, labels=sample.blocks * sample.block_rows)


def _cost(sizes: Sizes) -> float:
    """Return the multiplications of mining one block, by its own estimate; a graph costs at most exact search."""
    factory = Factory(sizes.index) if Factory(sizes.index).lists else Factory(EXACT)
    of = sizes.queries, sizes.width, None, sizes.columns
    return factory.cost(sizes.block_rows, 1, *of) - factory.cost(sizes.block_rows, 0, *of)
