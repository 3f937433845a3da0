"""Rows a second of the joined stream from a store that answers 50 ms late, against the same rows on a local disk.

The store is an HTTP server of byte ranges in a process of its own: it shares the cores with the stream, and what both
take of them is stated. Three rates: as fast as it goes; for a consumer that takes 5 ms a batch, as a training step on a
device does; and from a server without the delay, which tells the cost of requests and bytes from that of the latency.
The time is that from the first batch of an epoch to its last; the seconds to the first batch are stated.

    python -m benchmarks.stream_remote [--quick] [--rows N] [--folder DIR]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.report import interleave, medians, report
from benchmarks.rows import LABELS, World
from benchmarks.serving import Server, serve

DELAY_SECONDS = 0.05
STEP_SECONDS = 0.005
STREAMS = 8
THREADS = 2
BAR = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, the same ratios")
    parser.add_argument("--rows", type=int, help="rows of the tables")
    parser.add_argument("--folder", help="where the tables go; default: a temporary folder, removed at the end")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        world, *given = json.loads(arguments.task)
        print(json.dumps(read(World(**world), *given)))
        return
    # Windows of so many rows that the epoch has 6 of them, or 8.
    group, default = (2048, 3 << 17) if arguments.quick else (8192, 1 << 21)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="extremis-benchmark-") as folder:
        measure(World(folder, arguments.rows or default, group=group), 1 if arguments.quick else 3)


def measure(world: World, rounds: int) -> None:
    """Make the tables, serve them, read them in turns, report."""
    world.write()
    cpu: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, list[float]] = defaultdict(list)

    def side(name: str, server: Server | None, step_seconds: float) -> Callable[[], float]:
        def run() -> float:
            before = server.cpu_seconds() if server else 0.0
            seen = child(world, server.url if server else world.root, step_seconds)
            served = (server.cpu_seconds() if server else 0.0) - before
            cpu[name]["stream"].append(seen["cpu"] / seen["seconds"])
            cpu[name]["server"].append(served / seen["seconds"])
            first[name].append(seen["first"])
            return float(seen["rows"] / seen["seconds"])

        return run

    with serve(world.root, DELAY_SECONDS) as late, serve(world.root, 0.0) as prompt:
        sides = {
            "local": side("local", None, 0.0),
            "remote": side("remote", late, 0.0),
            "remote without delay": side("remote without delay", prompt, 0.0),
            "local, in training": side("local, in training", None, STEP_SECONDS),
            "remote, in training": side("remote, in training", late, STEP_SECONDS),
        }
        rates = medians(interleave(sides, rounds))
    middle = {name: medians(shares) for name, shares in cpu.items()}
    report(
        f"a remote source that answers {DELAY_SECONDS * 1000:g} ms late reaches {BAR} of the local rate",
        {
            "rows": world.rows,
            "K": world.width,
            "rows a row group": world.group,
            "threads": THREADS,
            "milliseconds of a step, in training": STEP_SECONDS * 1000,
            "rows/s": {name: round(rate) for name, rate in rates.items()},
            "seconds to the first batch": {name: round(one, 3) for name, one in medians(first).items()},
            # On a machine that does other work, too, this says more than the clock.
            "CPU microseconds a row": {
                name: round(one["stream"] / rates[name] * 1e6, 3) for name, one in middle.items()
            },
            "cores in use": {
                name: {who: round(share, 2) for who, share in shares.items()} for name, shares in middle.items()
            },
            "rounds": rounds,
        },
        {
            "remote / local": rates["remote"] / rates["local"],
            "remote / local, in training": rates["remote, in training"] / rates["local, in training"],
            "remote / remote without delay": rates["remote"] / rates["remote without delay"],
        },
        {"remote / local": BAR, "remote / local, in training": BAR, "remote / remote without delay": BAR},
    )


def child(world: World, root: str, step_seconds: float) -> dict[str, Any]:
    """`read` in a fresh process."""
    task = json.dumps([asdict(world), root, step_seconds])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stream_remote", "--task", task]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{root}: status {done.returncode}")
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def read(world: World, root: str, step_seconds: float) -> dict[str, Any]:
    """An epoch from `root`, a local folder or a URL, to tensors, with a wait of `step_seconds` after each batch."""
    from benchmarks.batches import SIZE, planner, ready, warm_up
    from trainer.stream import JoinedStream

    source = world.open(root)
    warm_up(world.width)
    stream = JoinedStream([source], LABELS, batch=SIZE, streams=STREAMS, threads=THREADS, plan=planner(world.width))
    start = time.perf_counter()
    batches = map(ready, stream)
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
