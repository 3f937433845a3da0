"""Memory of `extremis mine`: given, planned, and the peak of the largest process without pages of files.

    python -m benchmarks.mine_memory [--runs N] [--folder DIR]

600,000 × 384 float32 label vectors are mined for 3,000 queries at `--memory 800MiB`, exactly and with inverted lists,
by one process and by two, N times each. The memory of each process is sampled every 5 ms.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.process_memory import sample_peaks
from benchmarks.common.report import report, require
from benchmarks.mine import write_inputs
from schemas.layout import MINING_COST

LABELS, QUERIES, DIMENSION = 600_000, 3_000, 384  # queries: more than a batch
MEMORY = 800 << 20
MOST = 1.05
INDEXES = {
    "exact": ["--index", "exact"],
    # Few probes: what is measured is memory.
    "lists": ["--index", "IVF64,Flat", "--nprobe", "4", "--target-recall", "0.1"],
}
WORKERS = {1: [], 2: ["--", "--direct_num_workers=2", "--direct_running_mode=multi_processing"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each index and number of processes")
    parser.add_argument("--folder", help="where input and output go; default: a temporary folder, removed at the end")
    arguments = parser.parse_args()
    require("psutil", "faiss", "apache_beam")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write_inputs(f"{folder}/data", LABELS, QUERIES, DIMENSION, "float32", shards=1)
        kinds = itertools.product(range(arguments.runs), INDEXES, WORKERS)
        runs = [mine(Path(folder), index, workers) for _, index, workers in kinds]
    ratio = max(run["peak"] for run in runs) / MEMORY
    report(
        f"no process of mine holds more than {MOST} times its --memory",
        {"labels": LABELS, "queries": QUERIES, "columns": DIMENSION, "memory": MEMORY, "runs": runs},
        {"peak / memory": ratio},
        {"peak / memory": f"<{MOST}"},
    )


def mine(folder: Path, index: str, workers: int) -> dict[str, Any]:
    """Mine once, and return the figures of the run, in bytes and seconds."""
    data, out, began = folder / "data", folder / "mined", time.perf_counter()
    place = [str(data), str(data / "run"), "--out", str(out), "--memory", f"{MEMORY >> 20}MiB", "--audit-queries", "50"]
    command = [sys.executable, "-m", "extremis", "mine", *place, *INDEXES[index], *WORKERS[workers]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = max(sample_peaks(process, 0.005).values())
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}")
    planned = json.loads((out / MINING_COST).read_bytes())["estimated_bytes"]
    shutil.rmtree(out)
    seconds = round(time.perf_counter() - began, 1)
    found = {"index": index, "processes": workers, "planned": planned, "peak": peak, "seconds": seconds}
    print(found | {"peak / memory": round(peak / MEMORY, 3)}, file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
