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

from benchmarks.common.joined_tables import LABELS, JoinedTables
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
    """A stream over `tables`, with windows of `window_groups` row groups."""

    tables: JoinedTables
    window_groups: int = WINDOW_GROUPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="row groups of an eighth, and so everything")
    parser.add_argument("--folder", help="where the tables go; default: a temporary folder, removed at the end")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case = json.loads(arguments.case)
        print(json.dumps(iterate(JoinedTables(**case["tables"]), case["window_groups"])))
        return
    group = 512 if arguments.quick else 4096
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="extremis-benchmark-") as folder:
        run(JoinedTables(folder, WINDOWS * WINDOW_GROUPS * STREAMS * group, group=group))


def run(tables: JoinedTables) -> None:
    """Make and iterate the tables of one case after the other, and print the report."""
    cases = {
        "N rows": Case(tables),
        "4 N rows, a table 4 times as large": Case(replace(tables, rows=4 * tables.rows)),
        "4 K, a table 4 times as large, row groups of a quarter": Case(
            replace(tables, width=4 * tables.width, group=tables.group // 4)
        ),
        "4 K, the same window": Case(replace(tables, width=4 * tables.width)),
    }
    written: JoinedTables | None = None
    results: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        if case.tables != written:
            case.tables.write()
            written = case.tables
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
            "rows": tables.rows,
            "K": tables.width,
            "rows a row group": tables.group,
            "streams": STREAMS,
            "threads": THREADS,
            "cases": results,
        },
        ratios,
        {name: BAR for name in ratios if not name.startswith("4 K")},
    )


def sample(case: Case) -> dict[str, Any]:
    """Return the MiB of the stream over an epoch."""
    task = json.dumps({"tables": asdict(case.tables), "window_groups": case.window_groups})
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
    table = case.tables.open().negatives
    assert table is not None
    return {
        "rows": case.tables.rows,
        "K": case.tables.width,
        "window groups": case.window_groups,
        "MiB of the table": _mib(sum(shard.bytes for shard in table.manifest.shards)),
        "MiB of the process before": _mib(before),
        "MiB held at the peak": _mib(max(peaks) - before),
        "MiB held by tenths of the epoch": [_mib(peak - before) for peak in peaks],
        "MiB of the process with mapped pages of files": _mib(max(held for _, held, _ in during)),
        "samples": len(during),
        "last / first": (peaks[-1] - before) / (peaks[0] - before),
    }


def iterate(tables: JoinedTables, window_groups: int) -> dict[str, Any]:
    """Iterate an epoch; return when it began and ended."""
    from benchmarks.common.training_batch import SIZE, planner, to_tensors, warm_up
    from trainer.stream import JoinedStream

    source, plan = tables.open(), planner(tables.width)
    warm_up(tables.width)
    time.sleep(SETTLE_SECONDS)
    start = time.monotonic()
    stream = JoinedStream(
        [source], LABELS, batch=SIZE, streams=STREAMS, window_groups=window_groups, threads=THREADS, plan=plan
    )
    for batch in stream:
        to_tensors(batch)
        time.sleep(PACE_SECONDS)
    return {"start": start, "end": time.monotonic()}


def _mib(size: float) -> float:
    return round(size / 2**20, 1)


if __name__ == "__main__":
    main()
