"""The mining pipeline against bare Faiss, and its memory as labels grow.

    python -m benchmarks.mine [--quick]

Time: one side builds the index with Faiss and searches, with vectors and queries in memory; the other side is `mine`,
from the tables in storage to the published table, including the audit. Factory string, training sample, threads, nprobe
and refinement are equal. Both sides run in separate processes in turns; imports, a first tiny pipeline and writing the
input are not timed. Memory: sampled bytes of all processes, without pages of files, at L and 8 L and one `--memory`.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common.process_memory import sample_peaks
from benchmarks.common.report import interleave, medians, report, require
from schemas import arrow
from schemas.layout import DataLayout, RunLayout
from schemas.shard_files.parquet import list_array, matrix_array
from schemas.shard_files.shards import write_table
from schemas.storage import join

K = 50
DIMENSION = 64
EPOCH = 3
GROUP = 1 << 14


@dataclass(frozen=True)
class Setting:
    """Sizes of one comparison."""

    labels: int
    queries: int
    index: str
    nprobe: int
    refine: int
    memory: str
    grown_queries: int
    rounds: int
    threads: int


FULL = Setting(1 << 20, 200_000, "IVF1024,PQ32x4fs", 96, 6, "800MiB", 20_000, 3, 2)
QUICK = Setting(1 << 17, 30_000, "IVF256,PQ32x4fs", 16, 6, "480MiB", 4_000, 3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, the same ratios")
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = QUICK if arguments.quick else FULL
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](setting, arguments.root)))
        return
    require("psutil", "faiss", "apache_beam")
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as root:
        measure(setting, root, ["--quick"] if arguments.quick else [])


def measure(setting: Setting, root: str, flags: list[str]) -> None:
    """Run both comparisons and print the report."""
    small, large = join(root, "small"), join(root, "large")
    write_inputs(small, setting.labels, setting.queries)
    write_inputs(join(root, "few"), setting.labels, setting.grown_queries)
    write_inputs(large, 8 * setting.labels, setting.grown_queries)
    seen: dict[str, list[dict]] = {"bare": [], "pipeline": []}

    def side(name: str) -> Callable[[], float]:
        def run() -> float:
            seen[name].append(child(name, small, flags))
            return float(seen[name][-1]["seconds"])

        return run

    times = interleave({name: side(name) for name in seen}, setting.rounds)
    by_labels = {str(n): child("memory", place, flags) for n, place in ((1, join(root, "few")), (8, large))}
    quality = seen["pipeline"][-1]["quality"]
    middle = medians(times)
    report(
        "mining takes at most 1.1 times bare Faiss build and search at the same recall, in memory that does not grow "
        "with the labels",
        {
            **asdict(setting),
            "seconds": times,
            "median_seconds": middle,
            "cpu_seconds": {name: [round(result["cpu"], 2) for result in runs] for name, runs in seen.items()},
            "bare_stages": {
                stage: statistics.median(result[stage] for result in seen["bare"]) for stage in ("build", "search")
            },
            "pipeline_stages": seen["pipeline"][-1]["stages"],
            "queries_per_second": setting.queries / middle["pipeline"],
            "recall_of_bare": seen["bare"][-1]["recall"],
            "peak_mib": {n: round(result["peak"] / 2**20) for n, result in by_labels.items()},
            "blocks": {n: result["blocks"] for n, result in by_labels.items()},
            "estimated_mib": {n: round(result["estimated"] / 2**20) for n, result in by_labels.items()},
            "not_timed": "imports, a first tiny pipeline, writing the input tables",
        },
        {
            "time": middle["pipeline"] / middle["bare"],
            "recall_at_50": quality["recall_at_k"],
            "peak_8L_to_L": by_labels["8"]["peak"] / by_labels["1"]["peak"],
        },
        {"time": "<1.1", "recall_at_50": 0.95, "peak_8L_to_L": "<1.3"},
    )


def child(side: str, place: str, flags: list[str]) -> dict:
    """Run one side in a separate process; for `memory`, sample the peak of its processes."""
    command = [sys.executable, "-m", "benchmarks.mine", "--side", side, "--root", place, *flags]
    threads = str((QUICK if flags else FULL).threads)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": threads}
    )
    peak = sum(sample_peaks(process).values()) if side == "memory" else 0
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{side}: status {process.returncode}")
    return {**json.loads(out.splitlines()[-1]), "peak": peak}


def bare(setting: Setting, root: str) -> dict:
    """Run Faiss alone: train on the same sample, add, and search in batches with refinement."""
    import faiss

    from pipelines.mining.inputs import open_source, read_block
    from schemas.table import Table
    from search.index import Factory
    from search.topk import configure_faiss

    configure_faiss(setting.threads)
    run = RunLayout(join(root, "run"))
    vectors = read_block(Table.open(run.vectors(EPOCH)), 0, setting.labels, DIMENSION)
    points = Table.open(DataLayout(root).queries("train"))
    source = open_source("queries", points, Table.open(run.embeddings(EPOCH, "queries")))
    batches = [
        batch.queries for shard in range(len(source.queries.shards)) for batch in source.batches(shard, 4096, DIMENSION)
    ]
    queries = np.concatenate(batches)
    factory = Factory(setting.index)
    draw = np.random.Generator(np.random.Philox(key=0))
    rows = np.sort(draw.choice(len(vectors), factory.training_rows(), replace=False, shuffle=False))
    started, cpu = time.perf_counter(), time.process_time()
    index = faiss.index_factory(DIMENSION, f"{setting.index},RFlat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[rows])
    index.add(vectors)
    built = time.perf_counter()
    refined: Any = faiss.downcast_index(index)
    faiss.extract_index_ivf(faiss.downcast_index(refined.base_index)).nprobe = setting.nprobe
    refined.k_factor = setting.refine
    lists = [index.search(batch, K)[1] for batch in batches]
    done, cpu_seconds = time.perf_counter(), time.process_time() - cpu
    _, exact = faiss.knn(queries[:500], vectors, K, metric=faiss.METRIC_INNER_PRODUCT)
    some = np.concatenate(lists)[:500]
    recall = np.mean([len({*a} & {*b}) / K for a, b in zip(some.tolist(), exact.tolist(), strict=True)])
    return {
        "seconds": done - started,
        "build": built - started,
        "search": done - built,
        "cpu": cpu_seconds,
        "recall": float(recall),
    }


def pipeline(setting: Setting, root: str) -> dict:
    """Run `mine` from storage to storage, in one block like the other side."""
    from pipelines.mine import MineOptions, mine
    from schemas import storage

    warm_up(root)
    options = MineOptions(
        index=setting.index,
        nprobe=setting.nprobe,
        refine=setting.refine,
        threads=setting.threads,
        block_rows=setting.labels,
    )
    storage.remove(RunLayout(join(root, "run")).negatives_root, recursive=True)
    started, cpu = time.perf_counter(), time.process_time()
    manifest = mine(root, join(root, "run"), options=options)["queries"]
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    profile = read_profile(root)
    return {
        "seconds": seconds,
        "cpu": cpu,
        "quality": manifest.quality,
        "stages": profile["tables"]["queries"]["seconds"],
    }


def read_profile(root: str) -> dict:
    """Read the times and memory recorded by `mine`."""
    from schemas import storage
    from schemas.layout import MINING_COST

    folder = join(RunLayout(join(root, "run")).negatives_root, f"epoch-{EPOCH + 2:04d}")
    profile: dict = json.loads(storage.read_bytes(join(folder, MINING_COST)))
    return profile


def memory(setting: Setting, root: str) -> dict:
    """Run `mine` under the memory budget."""
    from pipelines.mine import MineOptions, mine

    options = MineOptions(
        index=setting.index,
        nprobe=setting.nprobe,
        refine=setting.refine,
        target_recall=0.5,  # nprobe is that of a smaller index
        threads=setting.threads,
        memory=setting.memory,
        audit_queries=100,
    )
    manifest = mine(root, join(root, "run"), options=options)["queries"]
    profile = read_profile(root)
    return {"blocks": manifest.parameters["blocks"], "estimated": profile["estimated_bytes"]}


SIDES: dict[str, Callable[[Setting, str], dict]] = {"bare": bare, "pipeline": pipeline, "memory": memory}


def warm_up(root: str) -> None:
    """Mine a table of a few rows, so that Beam and Faiss load their modules."""
    from pipelines.mine import MineOptions, mine

    tiny = join(root, "tiny")
    write_inputs(tiny, 100, 50)
    mine(tiny, join(tiny, "run"), options=MineOptions(width=5))


def write_inputs(
    root: str, labels: int, queries: int, dimension: int = DIMENSION, dtype: str = "float16", shards: int = 4
) -> None:
    """Write DATA and a dump of clustered unit vectors (a centre plus noise), with queries in `shards` shards."""
    centres = unit(np.random.default_rng(0).standard_normal((max(16, labels // 256), dimension), np.float32))
    draw = np.random.default_rng(1)
    nearest = draw.integers(0, len(centres), queries)
    embeddings = noisy(centres, nearest, draw).astype(np.float16)
    positives = draw.integers(0, labels, 2 * queries)
    ids = np.arange(queries)
    label_type = arrow.label_type(labels)
    table = pa.table(
        {
            "query_id": pa.array(ids),
            "key": pa.array(ids.astype(str)),
            "input_ids": list_array(np.zeros(queries, np.uint16), np.arange(queries + 1), pa.uint16()),
            "label_ids": list_array(positives, np.arange(queries + 1) * 2, label_type),
        },
        schema=arrow.queries(pa.uint16(), label_type),
    )
    parent = write_table(DataLayout(root).queries("train"), "queries", cut(table, shards), GROUP, id_range=(0, queries))
    run = RunLayout(join(root, "run"))
    dumped = pa.table(
        {"query_id": pa.array(ids), "vector": matrix_array(embeddings, pa.float16())},
        schema=arrow.embeddings(dimension),
    )
    write_table(
        run.embeddings(EPOCH, "queries"),
        "embeddings",
        cut(dumped, shards),
        GROUP,
        id_range=(0, queries),
        parents={"queries": parent.digest},
    )
    tables = []
    for start in range(0, labels, 1 << 20):
        stop = min(labels, start + (1 << 20))
        schema = arrow.vectors(dimension, dtype)
        some = noisy(centres, draw.integers(0, len(centres), stop - start), draw).astype(dtype)
        vectors = matrix_array(some, schema.field("vector").type.value_type)
        columns = {"label_id": pa.array(np.arange(start, stop)), "vector": vectors}
        tables.append(pa.table(columns, schema=schema))
    facts = {"sources": ["queries"], "table_width": K, "step": 0, "use_from": EPOCH + 2}
    write_table(run.vectors(EPOCH), "vectors", tables, GROUP, id_range=(0, labels), parameters=facts)


def cut(table: pa.Table, shards: int) -> list[pa.Table]:
    edges = [table.num_rows * i // shards for i in range(shards + 1)]
    return [table.slice(low, high - low) for low, high in itertools.pairwise(edges)]


def noisy(centres: np.ndarray, picked: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    noise = draw.standard_normal((len(picked), centres.shape[1]), np.float32) / np.sqrt(centres.shape[1])
    return unit(centres[picked] + 0.9 * noise)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
