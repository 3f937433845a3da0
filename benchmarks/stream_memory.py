"""Memory of the joined stream: constant over an epoch, and independent of the number of rows and the table's size.

A separate process iterates an epoch at a steady pace, so that threads read ahead as far as they can; its memory is
sampled from outside. The memory of a stream is the memory of its process during the epoch minus the memory before.
Pages of mapped shards, which the system can reclaim, are reported but not counted. The memory is bounded by a few
windows (`window_groups` row groups of each of the S streams) and the batches planned ahead; the bytes of a row in both
grow with K. The bars are for a table that is 4 times as large; memory with 4 K, in windows of equal size and of a
quarter of the size, is also reported.

    python -m benchmarks.stream_memory [--quick] [--folder DIR]
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common.joined_tables import LABELS, World
from benchmarks.common.process_memory import measure
from benchmarks.common.report import report

THREADS = 2
STREAMS = 8
WINDOW_GROUPS = 4
WINDOWS = 10  # windows in an epoch of N rows
SETTLE_SECONDS = 0.5  # seconds before the stream is opened, to measure the memory without it
INTERVAL = 0.02
PACE_SECONDS = 0.004  # seconds between batches
BAR = "<1.3"


@dataclass(frozen=True)
class Case:
    """A stream over a world, with windows of `window_groups` row groups."""

    world: World
    window_groups: int = WINDOW_GROUPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="row groups of an eighth, and so everything")
    parser.add_argument("--folder", help="where the tables go; default: a temporary folder, removed at the end")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case = json.loads(arguments.case)
        print(json.dumps(iterate(World(**case["world"]), case["window_groups"])))
        return
    group = 512 if arguments.quick else 4096
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="extremis-benchmark-") as folder:
        run(World(folder, WINDOWS * WINDOW_GROUPS * STREAMS * group, group=group))


def run(world: World) -> None:
    """Make and iterate the tables of one case after the other, and print the report."""
    cases = {
        "N rows": Case(world),
        "4 N rows, a table 4 times as large": Case(replace(world, rows=4 * world.rows)),
        "4 K, a table 4 times as large, row groups of a quarter": Case(
            replace(world, width=4 * world.width, group=world.group // 4)
        ),
        "4 K, the same window": Case(replace(world, width=4 * world.width)),
    }
    written: World | None = None
    results: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        if case.world != written:
            case.world.write()
            written = case.world
        results[name] = sample(case)
        sys.stderr.write(f"{name}: {results[name]['MiB held at the peak']:.0f} MiB\n")
    held = {name: result["MiB held at the peak"] for name, result in results.items()}
    first, *others = held
    ratios = {f"{name} / {first}": held[name] / held[first] for name in others}
    # Read-ahead fills up during the first few windows; a tenth of the longest epoch has four windows.
    flat = {name: result.pop("last / first") for name, result in results.items()}
    ratios["last tenth / first tenth of 4 N rows"] = flat["4 N rows, a table 4 times as large"]
    report(
        "the stream's memory is flat over an epoch, and the same for any number of rows and size of the table; it is "
        "bounded by its window, times K",
        {
            "rows": world.rows,
            "K": world.width,
            "rows a row group": world.group,
            "streams": STREAMS,
            "threads": THREADS,
            "cases": results,
        },
        ratios,
        {name: BAR for name in ratios if not name.startswith("4 K")},
    )


def sample(case: Case) -> dict[str, Any]:
    """Return the MiB of the stream over an epoch."""
    task = json.dumps({"world": asdict(case.world), "window_groups": case.window_groups})
    done = measure([sys.executable, "-W", "ignore", "-m", "benchmarks.stream_memory", "--case", task], INTERVAL)
    if done.status:
        raise SystemExit(f"{task}: status {done.status}")
    told = json.loads(done.output.splitlines()[-1])
    before = max(anonymous for moment, _, anonymous in done.samples if moment < told["start"])
    during = [sample for sample in done.samples if told["start"] <= sample[0] <= told["end"]]
    tenth = (told["end"] - told["start"]) / 10
    peaks = [
        max(
            anonymous
            for moment, _, anonymous in during
            if told["start"] + number * tenth <= moment <= told["start"] + (number + 1) * tenth
        )
        for number in range(10)
    ]
    table = case.world.open().negatives
    assert table is not None
    return {
        "rows": case.world.rows,
        "K": case.world.width,
        "window groups": case.window_groups,
        "MiB of the table": _mib(sum(shard.bytes for shard in table.manifest.shards)),
        "MiB of the process before": _mib(before),
        "MiB held at the peak": _mib(max(peaks) - before),
        "MiB held by tenths of the epoch": [_mib(peak - before) for peak in peaks],
        "MiB of the process with mapped pages of files": _mib(max(held for _, held, _ in during)),
        "samples": len(during),
        "last / first": (peaks[-1] - before) / (peaks[0] - before),
    }


def iterate(world: World, window_groups: int) -> dict[str, Any]:
    """Iterate an epoch; return when it began and ended."""
    from benchmarks.common.training_batch import SIZE, planner, ready, warm_up
    from trainer.stream import JoinedStream

    source, plan = world.open(), planner(world.width)
    warm_up(world.width)
    time.sleep(SETTLE_SECONDS)
    start = time.monotonic()
    stream = JoinedStream(
        [source], LABELS, batch=SIZE, streams=STREAMS, window_groups=window_groups, threads=THREADS, plan=plan
    )
    for batch in stream:
        ready(batch)
        time.sleep(PACE_SECONDS)
    return {"start": start, "end": time.monotonic()}


def _mib(size: float) -> float:
    return round(size / 2**20, 1)


if __name__ == "__main__":
    main()
