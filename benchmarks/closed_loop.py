"""The whole loop at 100M labels: shard, train, dump, mine, adopt, continue, and evaluate against a known truth.

Queries come from `common.clustered_queries`: each has right labels, and wrong neighbours that share most of its words.
Training starts with random negatives, writes a dump, and is stopped by SIGTERM when the mined table is due. From this
checkpoint it continues twice, with equal numbers of steps and of negatives per query: with the table, and in a copy of
the run without the table, with random negatives. Both are scored on the same test queries, against all labels.

Each stage is a separate command, and its memory is sampled: shared pages count once, and pages of mapped files, which
the system can reclaim, are counted separately. Every training query has a row in the table.

    python -m benchmarks.closed_loop [--quick] [--labels L] [--queries N] [--budget MINUTES] [--folder DIR]
"""

import argparse
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clustered_queries import CLUSTER, EACH, FACETS, QueryDistribution, write_clustered
from benchmarks.common.exact_top import top_of_split
from benchmarks.common.folder_bytes import FolderWatch, folder_bytes
from benchmarks.common.process_memory import CommandUsage, measure
from benchmarks.common.report import report
from schemas.layout import DataLayout, RunLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column, matrix_column
from schemas.sizes import parse_bytes
from schemas.table import Table
from trainer.evaluation.metrics import Contributions, bootstrap
from trainer.refresh.adoption import StoppedError
from trainer.stream import open_queries
from trainer.tracking import read_metrics

LABELS, QUERIES = 100_000_000, 10_000_000
QUICK_LABELS, QUICK_QUERIES = 100_000, 40_000
BUDGET = 45  # minutes without --queries and --quick
LIMIT_GIB = 24
KS = (1, 5)
BATCH, STEPS = 512, 300  # queries per step, and minimum of steps per epoch
# Seconds on two cores: start of a process; per million queries or labels; per GiB of vectors.
START, WRITE, SHARD_LABELS, SHARD_QUERIES = 7, 1.3, 1.5, 8
EPOCH, EPOCH_FAR = 35, 20  # per million queries, and the extra time if labels are far apart in memory
DUMP, SAVE, LOAD = 18, 6, 12
# Per million vectors, and per million queries against them (more in larger blocks); bytes per column.
INDEX, SEARCH, BLOCK_BYTES = 2, 100, 6
SCORE, EVALUATE = 2.7, 4  # per thousand queries against a million labels
WAIT_SECONDS = 10  # wait of the trainer for a table, during which it is stopped
ALL_ROWS_OF = 8  # row groups of the table to check for wrong neighbours
MINED, RANDOM = "mined", "random"


@dataclass(frozen=True)
class Options:
    """Options of a run of the benchmark; `start`: the first epoch with the table."""

    labels: int
    queries: int
    test: int
    scored: int  # test queries for `extremis evaluate`
    dimension: int
    start: int
    epochs: int
    hard: int
    random: int
    memory: str
    recall: float
    batch: int
    storage: str
    keep: bool = False
    set: Sequence[str] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LABELS:,} labels, {QUICK_QUERIES:,} queries")
    parser.add_argument("--labels", type=float)
    parser.add_argument("--queries", type=float, help="of training, all of which are mined for")
    parser.add_argument("--budget", type=float, help=f"minutes: fewer queries, if need be; default: {BUDGET}")
    parser.add_argument("--test", type=int, default=2000, help="test queries")
    parser.add_argument(
        "--scored", type=int, default=256, help="test queries that extremis evaluate scores too; 0: none"
    )
    parser.add_argument("--dimension", type=int, default=32)
    parser.add_argument("--start", type=int, default=3, help="first epoch with the table")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--hard", type=int, default=40, help="mined negatives of a query")
    parser.add_argument("--random", type=int, default=160, help="random negatives of a query beside them")
    parser.add_argument("--batch", type=int, help=f"queries a step; default: {BATCH}, or less for few queries")
    parser.add_argument("--memory", default="4GiB", help="what mining may use: larger blocks take less time in all")
    parser.add_argument("--recall", type=float, default=0.3, help="what mining tunes its index to")
    parser.add_argument("--storage", default="memory", help="classifier.storage")
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe, as extremis train takes it")
    parser.add_argument("--folder", help="where everything is written; default: a temporary folder, removed at the end")
    parser.add_argument("--keep", action="store_true", help="leave everything in --folder")
    parser.add_argument("--score", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.score:
        _score(*arguments.score.split(","))
        return
    options = _options(arguments)
    if options.keep and arguments.folder:
        Path(arguments.folder).mkdir(parents=True)
        run(Path(arguments.folder), options)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(Path(folder), options)


def _options(arguments: argparse.Namespace) -> Options:
    labels = int(arguments.labels or (QUICK_LABELS if arguments.quick else LABELS))
    queries = int(arguments.queries or (QUICK_QUERIES if arguments.quick else QUERIES))
    names = {each.name for each in fields(Options)} - {"labels", "queries", "batch"}
    batch = arguments.batch or min(BATCH, 1 << max(5, (queries // STEPS).bit_length() - 1))
    options = Options(labels, queries, batch=batch, **{name: getattr(arguments, name) for name in names})
    budget = arguments.budget or (None if arguments.quick or arguments.queries else BUDGET)
    return options if budget is None else replace(options, queries=affordable_queries(options, budget))


def recipe(options: Options) -> str:
    """Return the recipe: ASTRA with own pools, one table, and checkpoints only when the run is stopped or ends.

    Random negatives have weight 1, not L / k_r: at 100M labels a random negative would weigh as much as 600,000
    positives. The bias starts at the prior: from a higher bias, hard negatives would push learned labels below labels
    that no step has trained.
    """
    return f"""
method = "astra"

[encoder]
inputs = "features"
dimension = {options.dimension}
optimizer = "adagrad"
lr = 0.28
idf = false
initial_scale = 2.5

[classifier]
optimizer = "adagrad"
dtype = "bfloat16"
storage = "{options.storage}"
lr = 0.5
bias = true
initial_bias = "prior"

[order]
batch = {options.batch}

[negatives]
pool = "own"
hard = {options.hard}
random = {options.random}
reweight = false

[refresh]
start = {options.start}
every = {options.epochs}
stale = "wait"
wait_seconds = {WAIT_SECONDS}

[train]
epochs = {options.epochs}

[checkpoint]
every_epochs = 0
keep = 1

[logging]
tensorboard = false
"""


def estimate(options: Options) -> dict[str, float]:
    """Estimate the seconds of each stage on two idle cores from measurements at 1M labels."""
    labels, queries = options.labels / 1e6, options.queries / 1e6
    gib = options.labels * (options.dimension + 1) * 2 / 2**30
    block = min(options.labels, parse_bytes(options.memory) / (options.dimension + 1) / BLOCK_BYTES) / 1e6
    epoch = queries * (EPOCH + EPOCH_FAR * min(1.0, labels / 100))
    # A query probes about √n of a block's n vectors.
    search = queries * SEARCH * math.ceil(labels / block) * block**0.5
    again = options.epochs - options.start
    return {
        "write": WRITE * queries,
        "shard": SHARD_LABELS * labels + SHARD_QUERIES * queries,
        "train until the table is due, dump": START + options.start * epoch + (DUMP + SAVE) * gib,
        "mine": START + INDEX * labels * block**0.5 + search,
        "go on, both": 2 * (START + WAIT_SECONDS * again / 2 + again * epoch + (LOAD + SAVE) * gib),
        "score, both": 2 * (START + LOAD * gib + SCORE * options.test * labels / 1e3),
        "evaluate, both": 2 * (START + LOAD * gib + EVALUATE * options.scored * labels / 1e3) if options.scored else 0,
    }


def affordable_queries(options: Options, minutes: float) -> int:
    """Return the number of queries that fit into `minutes`. Raises SystemExit if none fit."""
    low, high = 0, options.queries + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(estimate(replace(options, queries=middle)).values()) <= 60 * minutes
        low, high = (middle, high) if fits else (low, middle)
    if low < options.batch:
        sys.exit(f"--budget {minutes:g}: {options.labels:,} labels alone take longer; give more, or fewer --labels")
    return low


@dataclass
class Stages:
    """Finished commands with their costs; `folder` contains all their output."""

    folder: Path
    taken: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(
        self,
        name: str,
        command: Sequence[str],
        status: int = 0,
        started: "Callable[[subprocess.Popen[str]], None] | None" = None,
    ) -> CommandUsage:
        """Run a command to its end; exit if its status is not `status`."""
        before, processor = folder_bytes(self.folder), _processor_seconds()
        with FolderWatch(self.folder) as watch:
            done = measure(command, started=started)
        if done.status != status:
            sys.exit(f"{' '.join(command)}: status {done.status}, expected {status}")
        figures = {
            "seconds": round(done.seconds, 1),
            "processor seconds": round(_processor_seconds() - processor, 1),
            "peak GiB": _gib(done.peak_bytes),
            "peak GiB without pages of files": _gib(max((sample[2] for sample in done.samples), default=0)),
            "GiB written that stay": _gib(folder_bytes(self.folder) - before),
            "GiB on disk at most": _gib(max(watch.peak, folder_bytes(self.folder))),
        }
        self.add(name, figures)
        return done

    def add(self, name: str, figures: dict[str, Any]) -> None:
        """Store and print the figures of a stage."""
        self.taken[name] = figures
        sys.stderr.write(f"{name}: {json.dumps(figures)}\n")
        sys.stderr.flush()


def run(folder: Path, options: Options) -> None:
    """Run the loop in `folder`, and print the report."""
    began, stages = time.perf_counter(), Stages(folder)
    distribution = QueryDistribution.of(options.queries, options.labels)
    data, runs = str(folder / "data"), {MINED: str(folder / MINED), RANDOM: str(folder / RANDOM)}
    extremis = [sys.executable, "-m", "extremis"]
    prepare(stages, distribution, options, [*extremis, "shard", str(folder / "raw"), data, "--json"])
    settings = [word for key in options.set for word in ("--set", key)]
    (folder / "recipe.toml").write_text(recipe(options))
    train = [*extremis, "train", str(folder / "recipe.toml"), data]

    def stop(process: "subprocess.Popen[str]") -> None:
        threading.Thread(target=_stop_after, args=(process, runs[MINED], options.start - 1), daemon=True).start()

    first = [*train, runs[MINED], *settings, "--grace", "7200", "--json"]
    stages.run("train until the table is due, dump", first, StoppedError.exit_status, stop)
    checkpoint, dump = (folder_bytes(Path(runs[MINED]) / name) for name in ("checkpoints", "dumps"))
    copy_run(Path(runs[MINED]), Path(runs[RANDOM]))
    stages.run("mine", [*extremis, "mine", data, runs[MINED], *_mining(options), "--json"])
    table = Table.open(RunLayout(runs[MINED]).negatives(options.start, "queries"), "negatives")
    mined = describe_table(data, table, distribution, options)
    shutil.rmtree(RunLayout(runs[MINED]).dumps)
    arms = {}
    for name, place in runs.items():
        stages.run(f"go on, {name}", [*train, place, *settings, "--resume", "--json"])
        arms[name] = {**training(place, options.start), **evaluated(stages, name, data, place, options, extremis)}
        shutil.rmtree(RunLayout(place).checkpoints)
    _report(stages, distribution, options, arms, mined, {"checkpoint": checkpoint, "dump": dump}, began)


def _mining(options: Options) -> list[str]:
    return ["--memory", options.memory, "--target-recall", str(options.recall)]


def prepare(stages: Stages, distribution: QueryDistribution, options: Options, shard: list[str]) -> None:
    """Write the queries and shard them, then remove the input files."""
    began, raw = time.perf_counter(), stages.folder / "raw"
    written = write_clustered(raw, distribution, options.queries, options.test)
    stages.add("write", {"seconds": round(time.perf_counter() - began, 1), "GiB written that stay": _gib(written)})
    stages.run("shard", shard)
    shutil.rmtree(raw)


def _stop_after(process: "subprocess.Popen[str]", place: str, epoch: int) -> None:
    """Stop the trainer once it has recorded `epoch`, and so waits for the table of the next epoch."""
    while process.poll() is None:
        if any(row["kind"] == "epoch" and row["epoch"] == epoch for row in read_metrics(RunLayout(place))):
            process.send_signal(signal.SIGTERM)
            return
        time.sleep(0.2)


def copy_run(source: Path, target: Path) -> None:
    """Copy a run without its dumps; files of the checkpoint never change, and are linked."""

    def copy(file: str, to: str) -> None:
        if f"{os.sep}checkpoints{os.sep}" in file:
            os.link(file, to)
        else:
            shutil.copy2(file, to)

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("dumps"), copy_function=copy)


def describe_table(data: str, table: Table, distribution: QueryDistribution, options: Options) -> dict[str, Any]:
    """Return facts of the mined table, and the number of wrong neighbours among a query's negatives."""
    queries = open_queries(DataLayout(data), "train")
    met, rows = 0, 0
    for number in range(min(ALL_ROWS_OF, len(table.groups.first) - 1)):
        hard = matrix_column(table.read_group(number, ["label_ids"]), "label_ids").astype(np.int64)
        right = list_column(queries.read_group(number, ["label_ids"]), "label_ids").values.reshape(-1, EACH)
        met += int((distribution.cluster_of(hard) == distribution.cluster_of(right[:, :1].astype(np.int64))).sum())
        rows += len(hard)
    return {
        "queries": table.rows,
        "index": table.parameters["index"],
        "blocks": table.parameters["blocks"],
        "recall": table.manifest.quality.get("recall_at_k"),
        "wrong neighbours among the mined of a query": round(met / rows, 2),
        "expected among its random ones": (options.hard + options.random) * (CLUSTER - EACH) / options.labels,
        "GiB": _gib(folder_bytes(Path(table.url))),
    }


def training(place: str, start: int) -> dict[str, Any]:
    """Return the costs of the epochs from `start` on, without the wait for a table that is not made."""
    epochs = [row for row in read_metrics(RunLayout(place)) if row["kind"] == "epoch" and row["epoch"] >= start]
    seconds = sum(row["seconds"] - row.get("seconds_adopt", 0.0) for row in epochs)
    return {
        "tables": [row["table_epoch"] for row in epochs],
        "steps": epochs[-1]["step"],
        "training seconds": round(seconds, 1),
        "rows a second": round(sum(row["rows_per_second"] * row["seconds"] for row in epochs) / seconds),
        "loss": epochs[-1]["loss"],
    }


def evaluated(
    stages: Stages, name: str, data: str, place: str, options: Options, extremis: list[str]
) -> dict[str, Any]:
    """Return the results of the test queries, and their difference from `extremis evaluate` on the first queries."""
    top = stages.folder / f"{name}.npz"
    score = [sys.executable, "-m", "benchmarks.closed_loop", "--score", f"{data},{place},{top}"]
    stages.run(f"score, {name}", score)
    with np.load(top) as file:
        ids, right = file["ids"], file["right"]
    hits = (ids[:, :, None] == right[:, None, :]).any(2)
    result = {"ids": ids, "hits": hits, "right": right}
    if not options.scored:
        return result
    command = [*extremis, "evaluate", data, place, "--split", "test", "--limit", str(options.scored), "--json"]
    said = json.loads(stages.run(f"evaluate {options.scored}, {name}", command).output.splitlines()[-1])["metrics"]
    own = {f"P@{k}": 100 * float(hits[: options.scored, :k].mean()) for k in KS}
    apart = max(abs(said[metric] - value) for metric, value in own.items())
    return {**result, "extremis evaluate": {metric: round(said[metric], 2) for metric in own}, "apart": apart}


def _score(data: str, place: str, out: str) -> None:
    ids, right = top_of_split(data, place, "test", max(KS))
    np.savez(out, ids=ids, right=_matrix(right))


def _matrix(right: Ragged) -> np.ndarray:
    return right.values.reshape(-1, EACH).astype(np.int64)


def _report(
    stages: Stages,
    distribution: QueryDistribution,
    options: Options,
    arms: dict[str, dict[str, Any]],
    mined: dict[str, Any],
    sizes: dict[str, int],
    began: float,
) -> None:
    results, precise = {}, {}
    for name, arm in arms.items():
        ids, hits, right = (arm.pop(key) for key in ("ids", "hits", "right"))
        precise[name] = {f"P@{k}": Contributions(hits[:, :k].mean(1).astype(np.float32)) for k in KS}
        ends = bootstrap(precise[name])
        same = distribution.cluster_of(ids[:, 0]) == distribution.cluster_of(right[:, 0])
        for metric, part in precise[name].items():
            arm[metric] = {"value": round(100 * float(part.achieved.mean()), 2), "interval": _ends(ends[metric])}
        results[name] = {**arm, "best label in the right cluster": round(100 * float(same.mean()), 2)}
    gains = {
        metric: Contributions(precise[MINED][metric].achieved - part.achieved)
        for metric, part in precise[RANDOM].items()
    }
    intervals = bootstrap(gains)
    gained = {
        metric: {"value": round(100 * float(part.achieved.mean()), 2), "interval": _ends(intervals[metric])}
        for metric, part in gains.items()
    }
    peak = max(stage.get("peak GiB without pages of files", 0.0) for stage in stages.taken.values())
    ratios = {f"gain in {metric}, lower end": intervals[metric][0] for metric in gains}
    ratios["P@1 of random negatives alone, over a guess in the right cluster"] = (
        results[RANDOM]["P@1"]["value"] * FACETS / 100
    )
    ratios["peak GiB"] = peak
    ratios["extremis evaluate and all labels scored here, apart"] = max(arm.get("apart", 0.0) for arm in arms.values())
    ratios["steps, mined over random"] = results[MINED]["steps"] / results[RANDOM]["steps"]
    report(
        f"at {options.labels:,} labels the loop closes within {LIMIT_GIB} GiB, and mined negatives find more than "
        "random ones by more than the interval",
        {
            **{name: getattr(options, name) for name in ("labels", "queries", "test", "dimension", "hard", "random")},
            "epochs": [options.start, options.epochs],
            "labels that queries have": distribution.covered,
            "points of a label that queries have": round(options.queries * EACH / distribution.covered, 2),
            "best possible P@1 and P@5": round(100 * distribution.best, 2),
            "results": results,
            "gained": gained,
            "mined": mined,
            **{f"{name} GiB": _gib(size) for name, size in sizes.items()},
            "stages": stages.taken,
            "estimated seconds": {name: round(seconds) for name, seconds in estimate(options).items()},
            "minutes": round((time.perf_counter() - began) / 60, 1),
        },
        ratios,
        {
            **{f"gain in {metric}, lower end": 0.01 for metric in gains},
            "P@1 of random negatives alone, over a guess in the right cluster": 1.0,
            "peak GiB": f"<{LIMIT_GIB}",
            "extremis evaluate and all labels scored here, apart": "<0.5",
            "steps, mined over random": 1.0,
        },
    )


def _processor_seconds() -> float:
    """Return the processor seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ends(pair: tuple[float, float]) -> list[float]:
    return [round(end, 2) for end in pair]


def _gib(size: float) -> float:
    return round(size / 2**30, 3)


if __name__ == "__main__":
    main()
