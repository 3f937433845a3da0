"""Sharding of rows with string keys: rows per second, memory of all processes, bytes of staging; also after a kill.

The input is written as a stream; equal sizes give equal input. `extremis shard` runs as a separate process with its
defaults. The memory of its whole process tree is sampled (proportional set size: shared pages count once), and so are
the bytes of DATA's staging, which also contains the tables until they are put in place. With `--kill` all its processes
are killed with SIGKILL once rows are tokenized and the first shard is written; the same command then continues. At the
end an epoch is streamed, and a sample of the input's points is looked up by key, with labels.

With `--listed SHARE` only this share of the labels is listed; each mention of another label is a reject.

    python -m benchmarks.shard_memory [--quick] [--rows N --labels L] [--folder DIR] [--kill]
    python -m benchmarks.shard_memory --rows N --labels L --shard-bytes 500000 --listed 0.5    # references and rejects
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common.folder_bytes import FolderWatch, folder_bytes
from benchmarks.common.keyed_check import count_found, positives, sample_points, training_counts
from benchmarks.common.keyed_input import label_number, write_keyed
from benchmarks.common.process_memory import CommandUsage, measure
from benchmarks.common.report import report
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from trainer.stream import JoinedStream, open_sources

LIMIT_GIB = 6.0
STAGING = 1.2  # bytes of staging over the input's bytes
SAMPLE = 10_000
BATCH = 512
# The target of the extrapolation, and its cluster.
QUERIES, LABELS, CORES = 370e6, 120e6, 256
EFFICIENCY = 0.7  # efficiency of a cluster's cores, after shuffle and stragglers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100,000 rows and 10,000 labels")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--labels", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where input and output go; default: a temporary folder, removed at the end")
    parser.add_argument("--kill", action="store_true", help="kill the run in its second half, and go on from there")
    parser.add_argument("--shard-bytes", type=int, help="passed on: small shards make many references")
    parser.add_argument("--listed", type=float, default=1.0, help="share of the labels that are listed")
    parser.add_argument("--gib", type=float, default=LIMIT_GIB, help="bar of the memory of all processes")
    arguments = parser.parse_args()
    rows, labels = (100_000, 10_000) if arguments.quick else (arguments.rows, arguments.labels)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        more = ["--shard-bytes", str(arguments.shard_bytes)] if arguments.shard_bytes else []
        if arguments.listed < 1:
            more += ["--max-reject-share", "1"]
        run(Path(folder), rows, labels, arguments.listed, arguments.kill, arguments.gib, more)


def run(folder: Path, rows: int, labels: int, listed: float, kill: bool, gib: float, more: list[str]) -> None:
    """Write the input, shard it, stream it, look up a sample of its keys, and print the report."""
    data = folder / "data"
    began = time.perf_counter()
    named, labels = labels, int(labels * listed)
    written = write_keyed(folder / "raw", rows, named, listed=labels)
    sys.stderr.write(f"{rows:,} rows and {labels:,} labels: {written / 2**20:,.0f} MiB\n")
    wrote = time.perf_counter() - began
    points = sample_points(folder / "raw", SAMPLE)
    command = [sys.executable, "-m", "extremis", "shard", str(folder / "raw"), str(data), "--json", *more]
    with FolderWatch(data / ".staging") as staging:
        killed = shard_and_kill(command, data) if kill else None
        done = measure(command)
    if done.status:
        sys.exit(f"{' '.join(command)}: status {done.status}")
    summary = json.loads(done.output.splitlines()[-1])
    if listed == 1 and (summary["rows"]["train"], summary["labels"]) != (rows, labels):
        sys.exit(f"expected {rows} rows and {labels} labels, got {summary['rows']} and {summary['labels']}")
    points = {key: [label for label in some if label_number(label) < labels] for key, some in points.items()}
    points = {key: some for key, some in points.items() if some}  # all other labels are rejects
    shutil.rmtree(folder / "raw")  # pages of the epoch would replace them
    both = (
        done
        if killed is None
        else replace(
            done,
            seconds=killed.seconds + done.seconds,
            peak_bytes=max(killed.peak_bytes, done.peak_bytes),
            most_processes=max(killed.most_processes, done.most_processes),
            launcher_bytes=max(killed.launcher_bytes, done.launcher_bytes),
        )
    )
    bytes_made = folder_bytes(data)
    epoch_rows, epoch_seconds = stream_epoch(str(data), labels)
    found = count_found(str(data), points)
    if training_counts(str(data)) != positives(str(data)):
        sys.exit("the labels' training counts are not those of the points")
    ratios = {
        "peak GiB": both.peak_bytes / 2**30,
        "peak staging / input": staging.peak / written,
        "points found again": found / len(points),
        "rows of the epoch / rows": epoch_rows / summary["rows"]["train"],
    }
    report(
        f"{rows:,} rows with string keys and {labels:,} labels shard within {gib:g} GiB for all processes",
        {
            "rows": rows,
            "labels": labels,
            "input bytes": written,
            "seconds to write the input": round(wrote, 1),
            "output bytes": bytes_made,
            "seconds": round(both.seconds, 1),
            **({"seconds until it was killed": round(killed.seconds, 1)} if killed else {}),
            **({"seconds to go on": round(done.seconds, 1)} if killed else {}),
            "rows/s": round(rows / both.seconds),
            "peak GiB": round(both.peak_bytes / 2**30, 3),
            "peak GiB of the launching process": round(both.launcher_bytes / 2**30, 3),
            "processes": both.most_processes,
            "peak staging bytes": staging.peak,
            "rejects": open_manifest(DataLayout(str(data)).rejects).rows,
            "shards": len(open_manifest(DataLayout(str(data)).queries("train")).shards),
            "epoch": {
                "rows": epoch_rows,
                "seconds": round(epoch_seconds, 1),
                "rows/s": round(epoch_rows / epoch_seconds),
            },
            "sample": {"points": len(points), "found with their labels": found},
            "extrapolation": extrapolate(both, rows, labels, bytes_made),
        },
        ratios,
        {
            "peak GiB": f"<{gib}",
            "peak staging / input": f"<{STAGING}",
            "points found again": 1.0,
            "rows of the epoch / rows": 1.0,
        },
    )


def shard_and_kill(command: list[str], data: Path) -> CommandUsage:
    """Run the command until the first shard is written, then kill all its processes."""

    def kill(process: "subprocess.Popen[str]") -> None:
        while not list(data.glob(".staging/*/queries/train/part-*")):
            if process.poll() is not None:
                sys.exit(f"{' '.join(command)}: ended before it could be killed")
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)

    killed = measure(command, started=kill, start_new_session=True)
    sys.stderr.write(f"killed after {killed.seconds:.1f} s\n")
    return killed


def stream_epoch(data: str, labels: int) -> tuple[int, float]:
    """Stream an epoch of the training points; return its rows and seconds."""
    stream = JoinedStream(open_sources(DataLayout(data), "train", False), labels, batch=BATCH, streams=8, threads=1)
    stream.set_epoch(0)
    began = time.perf_counter()
    rows = sum(len(batch.rows) for batch in stream)
    return rows, time.perf_counter() - began


def extrapolate(done: CommandUsage, rows: int, labels: int, bytes_made: int) -> dict[str, object]:
    """Extrapolate to 370M queries and 120M labels on a cluster, and state the assumptions."""
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
            "storage keeps up: about twice the input is written and read there",
        ],
    }


if __name__ == "__main__":
    main()
