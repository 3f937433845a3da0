"""Rows per second of the joined stream from a store that answers 50 ms late, against the same rows on a local disk.

The store is an HTTP server of byte ranges in a separate process, which shares the cores with the stream; the CPU times
of server and stream are reported. There are three rates: at full speed; for a consumer that takes 5 ms per batch, like
a training step on a device; and from a server without delay, to separate the cost of requests and bytes from the cost
of latency. The time runs from the first batch of an epoch to the last; the seconds to the first batch are reported. A
full run also measures an S3 server, which is written in Python and takes most of the two cores itself.

    python -m benchmarks.stream_remote [--quick] [--rows N] [--folder DIR]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.common.joined_tables import LABELS, JoinedTables
from benchmarks.common.report import interleave, medians, report
from benchmarks.common.slow_stores import Server, serve, serve_s3

DELAY_SECONDS = 0.05
STEP_SECONDS = 0.005
STREAMS = 8
THREADS = 2
BAR = 0.8
TRAINING = ", in training"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, the same ratios")
    parser.add_argument("--rows", type=int, help="rows of the tables")
    parser.add_argument("--folder", help="where the tables go; default: a temporary folder, removed at the end")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        tables, *options = json.loads(arguments.task)
        print(json.dumps(read(JoinedTables(**tables), *options)))
        return
    # Windows sized for 6 or 8 windows per epoch.
    group, default = (2048, 3 << 17) if arguments.quick else (8192, 1 << 21)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="extremis-benchmark-") as folder:
        tables = JoinedTables(os.path.join(folder, "http"), arguments.rows or default, group=group)
        # moto reads the whole object for each range, so this uses fewer rows in smaller shards.
        s3 = None if arguments.quick else JoinedTables(os.path.join(folder, "s3"), 1 << 18, group=2048)
        measure(tables, 1 if arguments.quick else 3, s3)


def measure(tables: JoinedTables, rounds: int, s3: JoinedTables | None) -> None:
    """Make the tables, serve them, read them in turns, and print the report."""
    for written in filter(None, (tables, s3)):
        written.write()
    cpu: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, list[float]] = defaultdict(list)

    def side(name: str, tables: JoinedTables, server: Server | None, step_seconds: float) -> Callable[[], float]:
        def run() -> float:
            before = server.cpu_seconds() if server else 0.0
            seen = child(tables, server, step_seconds)
            served = (server.cpu_seconds() if server else 0.0) - before
            cpu[name]["stream"].append(seen["cpu"] / seen["seconds"])
            cpu[name]["server"].append(served / seen["seconds"])
            first[name].append(seen["first"])
            return float(seen["rows"] / seen["seconds"])

        return run

    with contextlib.ExitStack() as stack:
        late = stack.enter_context(serve(tables.root, DELAY_SECONDS))
        prompt = stack.enter_context(serve(tables.root, 0.0))
        kinds: dict[str, tuple[JoinedTables, Server | None]] = {
            "local": (tables, None),
            "remote": (tables, late),
            "remote without delay": (tables, prompt),
        }
        if s3:
            kinds["local, rows of S3"] = (s3, None)
            kinds["S3"] = (s3, stack.enter_context(serve_s3(s3.root, DELAY_SECONDS)))
        sides = {name: side(name, *kind, 0.0) for name, kind in kinds.items()}
        for name in [kind for kind in kinds if kind != "remote without delay"]:
            sides[name + TRAINING] = side(name + TRAINING, *kinds[name], STEP_SECONDS)
        rates = medians(interleave(sides, rounds))
    middle = {name: medians(shares) for name, shares in cpu.items()}
    ratios = {
        "remote / local": rates["remote"] / rates["local"],
        f"remote / local{TRAINING}": rates[f"remote{TRAINING}"] / rates[f"local{TRAINING}"],
        "remote / remote without delay": rates["remote"] / rates["remote without delay"],
    }
    bars = dict.fromkeys(ratios, BAR)
    if s3:
        for way in ("", TRAINING):
            ratios[f"S3 / local{way}"] = rates[f"S3{way}"] / rates[f"local, rows of S3{way}"]
    report(
        f"a remote source that answers {DELAY_SECONDS * 1000:g} ms late reaches {BAR} of the local rate",
        {
            "rows": tables.rows,
            "rows of S3": s3.rows if s3 else "none in a quick run",
            "K": tables.width,
            "rows a row group": tables.group,
            "threads": THREADS,
            "milliseconds of a step, in training": STEP_SECONDS * 1000,
            "rows/s": {name: round(rate) for name, rate in rates.items()},
            "seconds to the first batch": {name: round(value, 3) for name, value in medians(first).items()},
            # More reliable than the clock on a machine with other work.
            "CPU microseconds a row": {
                name: round(shares["stream"] / rates[name] * 1e6, 3) for name, shares in middle.items()
            },
            "cores in use": {
                name: {process: round(share, 2) for process, share in shares.items()} for name, shares in middle.items()
            },
            "rounds": rounds,
        },
        ratios,
        bars,
    )


def child(tables: JoinedTables, server: Server | None, step_seconds: float) -> dict[str, Any]:
    """Run `read` in a fresh process, from `server` or from the disk."""
    task = json.dumps([asdict(tables), server.url if server else tables.root, step_seconds])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stream_remote", "--task", task]
    environment = {**os.environ, **(server.environment if server else {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{task}: status {done.returncode}")
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def read(tables: JoinedTables, root: str, step_seconds: float) -> dict[str, Any]:
    """Read an epoch from `root`, a local folder or a URL, to tensors; wait `step_seconds` after each batch."""
    from benchmarks.common.training_batch import SIZE, planner, to_tensors, warm_up
    from trainer.stream import JoinedStream

    source = tables.open(root)
    warm_up(tables.width)
    stream = JoinedStream([source], LABELS, batch=SIZE, streams=STREAMS, threads=THREADS, plan=planner(tables.width))
    start = time.perf_counter()
    batches = map(to_tensors, stream)
    next(batches)
    begun, cpu, rows = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        rows += len(batch["rows"])
        if step_seconds:
            time.sleep(step_seconds)
    end = time.perf_counter()
    return {"rows": rows, "seconds": end - begun, "cpu": time.process_time() - cpu, "first": begun - start}


if __name__ == "__main__":
    main()
