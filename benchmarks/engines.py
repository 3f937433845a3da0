"""Sharding by Flink and Spark on this machine, compared with local worker processes: equal bytes, seconds in turns.

Each cluster has two workers with one slot, Flink's with the default memory of TaskManagers; both clusters start before
the first round and keep running. An engine's name may include a Beam environment; the default is PROCESS. A small input
comes first, because Java is slow in its first jobs.

    python -m benchmarks.engines [--quick] [--rows N --labels L] [--rounds 3] [--engines flink,spark]
    python -m benchmarks.engines --raw RAW --engines flink:LOOPBACK,flink:EXTERNAL,flink:PROCESS

Needs Java 17 and Maven; downloads are kept in build/engines.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.common.folder_bytes import FolderWatch, folder_bytes
from benchmarks.common.keyed_input import write_keyed
from benchmarks.common.report import interleave, medians, report
from schemas.manifest import open_manifest
from tests.command import ROOT
from tests.engines.clusters import CLUSTERS, WORKERS, vertices
from tests.engines.pieces import PIECES, install
from tests.engines.worker import external, loopback, pool, process, write_worker

BARS = {"flink": "<1.6", "spark": "<2"}
HERE = "in process"
SMALL = 20_000  # rows
JOBS = 3  # Flink jobs per command; the launching process sorts labels of this size
DEFAULTS = {"flink": {"memory": 1728, "network": 128}}  # MiB of a TaskManager, and MiB of it for buffers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100,000 rows, one round")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", type=Path, help="input of your own, in place of rows that are made")
    parser.add_argument("--engines", default="flink,spark")
    arguments = parser.parse_args()
    rows, labels = (100_000, 10_000) if arguments.quick else (arguments.rows, arguments.labels)
    rounds = 1 if arguments.quick else arguments.rounds
    names = arguments.engines.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.raw is not None:
            (folder / "large").symlink_to(arguments.raw.absolute())
            written = folder_bytes(arguments.raw)
        else:
            written = write_keyed(folder / "large", rows, labels)
        write_keyed(folder / "small", SMALL, SMALL // 10)
        program = write_worker(folder / "extremis-worker", ROOT)
        flags = {HERE: [f"--direct_num_workers={WORKERS}", "--direct_running_mode=multi_processing"]}
        sharded: dict[str, tuple[str, int]] = {}  # digest, and peak of staging
        with ExitStack() as stack:
            running = {}
            for engine in dict.fromkeys(name.partition(":")[0] for name in names):
                install(PIECES[engine])
                starting = CLUSTERS[engine](folder / engine, **DEFAULTS.get(engine, {}))
                running[engine] = stack.enter_context(starting)
            port = stack.enter_context(pool(program))
            for name in names:
                engine, _, kind = name.partition(":")
                cluster = running[engine]
                kinds = {"LOOPBACK": loopback(cluster), "EXTERNAL": external(cluster, port)}
                flags[name] = kinds.get(kind, process(cluster, program))
            small = medians(interleave(make_sides(folder, "small", flags, {}), 1))
            values = interleave(make_sides(folder, "large", flags, sharded), rounds)
            jobs = vertices(running["flink"])[-JOBS:] if "flink" in running else []
        size = folder_bytes(folder / "data")
    seconds = medians(values)
    report(
        "shard on two workers of Flink takes at most 1.6 times the seconds in process, of Spark 2 times",
        {
            **({"raw": arguments.raw.name} if arguments.raw else {"rows": rows, "labels": labels}),
            "input bytes": written,
            "bytes": size,
            "seconds": {name: [round(value, 1) for value in some] for name, some in values.items()},
            f"seconds for {SMALL:,} rows": {name: round(value, 1) for name, value in small.items()},
            "seconds more than in process": {name: round(seconds[name] - seconds[HERE], 1) for name in names},
            "vertices of Flink's jobs": jobs,
            "peak staging / input": {name: round(peak / written, 2) for name, (_, peak) in sharded.items()},
        },
        {
            **{name: seconds[name] / seconds[HERE] for name in names},
            "same digest": float(len({digest for digest, _ in sharded.values()}) == 1),
        },
        {**({} if arguments.raw else {name: BARS[name.partition(":")[0]] for name in names}), "same digest": 1.0},
    )


def make_sides(
    folder: Path, source: str, flags: dict[str, list[str]], sharded: dict[str, tuple[str, int]]
) -> dict[str, Callable[[], float]]:
    """Return functions that shard `source`, by name of the engine, each with its Beam options."""
    return {name: partial(shard, folder, source, name, some, sharded) for name, some in flags.items()}


def shard(folder: Path, source: str, name: str, flags: list[str], sharded: dict[str, tuple[str, int]]) -> float:
    """Return the seconds of the command as users run it; record the digest and the peak of staging."""
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    command = [sys.executable, "-m", "extremis", "shard", folder / source, data, "--", *flags]
    start = time.perf_counter()
    with FolderWatch(data / ".staging") as staging:
        subprocess.run([*map(str, command)], check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    sharded[name] = open_manifest(str(data)).digest, staging.peak
    return seconds


if __name__ == "__main__":
    main()
