"""A sharding run over 10M rows with string keys and 1M labels: rows a second, and the memory of all processes together.

The input is written as a stream, the same for the same sizes. `extremis shard` runs as a process of its own with its
defaults; the memory of its whole process tree is sampled (proportional set size: shared pages count once).

    python -m benchmarks.shard_memory [--quick] [--rows N --labels L] [--folder DIR]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.common.keyed_input import write_keyed
from benchmarks.common.process_memory import Measured, measure
from benchmarks.common.report import report

LIMIT_GIB = 6.0
# What the extrapolation is to, and on what.
QUERIES, LABELS, CORES = 370e6, 120e6, 256
EFFICIENCY = 0.7  # of a cluster's cores, shuffle and stragglers taken off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100,000 rows and 10,000 labels")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--labels", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where input and output go; default: a temporary folder, removed at the end")
    arguments = parser.parse_args()
    rows, labels = (100_000, 10_000) if arguments.quick else (arguments.rows, arguments.labels)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(Path(folder), rows, labels)


def run(folder: Path, rows: int, labels: int) -> None:
    """Write the input, shard it, report."""
    written = write_keyed(folder / "raw", rows, labels)
    sys.stderr.write(f"{rows:,} rows and {labels:,} labels: {written / 2**20:,.0f} MiB\n")
    command = [sys.executable, "-m", "extremis", "shard", str(folder / "raw"), str(folder / "data"), "--json"]
    done = measure(command)
    if done.status:
        sys.exit(f"{' '.join(command)}: status {done.status}")
    summary = json.loads(done.output.splitlines()[-1])
    if (summary["rows"]["train"], summary["labels"]) != (rows, labels):
        sys.exit(f"expected {rows} rows and {labels} labels, got {summary['rows']} and {summary['labels']}")
    bytes_made = sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())
    report(
        f"{rows:,} rows with string keys and {labels:,} labels shard within {LIMIT_GIB:g} GiB for all processes",
        {
            "rows": rows,
            "labels": labels,
            "input bytes": written,
            "output bytes": bytes_made,
            "seconds": round(done.seconds, 1),
            "rows/s": round(rows / done.seconds),
            "peak GiB": round(done.peak_bytes / 2**30, 3),
            "processes": done.most_processes,
            "extrapolation": extrapolate(done, rows, labels, bytes_made),
        },
        {"peak GiB": done.peak_bytes / 2**30},
        {"peak GiB": f"<{LIMIT_GIB}"},
    )


def extrapolate(done: Measured, rows: int, labels: int, bytes_made: int) -> dict[str, object]:
    """To 370M queries and 120M labels on a cluster, with what is assumed."""
    workers = max(1, done.most_processes - 1)
    core_seconds = done.seconds * workers / (rows + labels) * (QUERIES + LABELS)
    return {
        "queries": int(QUERIES),
        "labels": int(LABELS),
        "cores": CORES,
        "hours": round(core_seconds / CORES / EFFICIENCY / 3600, 2),
        "table GB": round(bytes_made / (rows + labels) * (QUERIES + LABELS) / 1e9),
        "memory a worker GiB": round(done.peak_bytes / 2**30 / workers, 2),
        "assumed": [
            f"{workers} cores were this run's, start-up included, and were not shared with other work",
            f"cost grows with rows and labels together; {EFFICIENCY:g} of {CORES} cores are at work on average",
            "a worker holds one block, or one shard of queries (128 MiB) or labels, whatever their number",
            "texts and label counts are like these: 12 words, 5 labels",
            "storage and the runner's shuffle keep up: about 3 x the input passes through each",
        ],
    }


if __name__ == "__main__":
    main()
