"""Memory of `extremis mine`: what it plans, and the peak of each process, without pages of files.

    python -m benchmarks.mine_memory [--runs N] [--folder DIR]

600,000 × 384 float32 label vectors are mined at `--memory 800MiB` for 5,000 queries, exactly and with inverted lists, by
one process and by two, N times each. Anonymous memory (RssAnon) of each process is sampled every 5 ms.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.common.report import report, require
from benchmarks.mine import EPOCH, write_inputs

LABELS, QUERIES, DIMENSION = 600_000, 5_000, 384
MEMORY = 800 << 20
INDEXES = "exact", "IVF1024,Flat"
TWO = "--", "--direct_num_workers=2", "--direct_running_mode=multi_processing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each of the four kinds")
    parser.add_argument("--folder", help="where input and output go; default: a temporary folder, removed at the end")
    arguments = parser.parse_args()
    require("psutil", "faiss", "apache_beam")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write_inputs(folder, LABELS, QUERIES, DIMENSION, "float32")
        settings = itertools.product(range(arguments.runs), INDEXES, ((), TWO))
        runs = [run(Path(folder), index, workers) for _, index, workers in settings]
    report(
        "no process of mine holds more than 1.05 times its --memory",
        {"labels": LABELS, "queries": QUERIES, "columns": DIMENSION, "memory": MEMORY, "runs": runs},
        {"peak": max(each["peak"] for each in runs) / MEMORY},
        {"peak": "<1.05"},
    )


def run(folder: Path, index: str, workers: tuple[str, ...]) -> dict[str, object]:
    """Mine once; return what was planned, and the peak of the largest process, in bytes."""
    command = ["mine", str(folder), str(folder / "run"), "--index", index, "--memory", f"{MEMORY >> 20}MiB"]
    out = folder / "mined"
    command += ["--out", str(out), "--overwrite", *workers]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "extremis", *command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid, held in anonymous(process.pid).items():
            peaks[pid] = max(peaks.get(pid, 0), held)
        time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"{command}: status {process.returncode}")
    spent = json.loads((out / "spent.json").read_bytes())
    found = {
        "index": index,
        "processes": len(workers) and 2 or 1,
        "planned": spent["estimated_bytes"],
        "peak": max(peaks.values()),
        "ratio": round(max(peaks.values()) / MEMORY, 3),
        "seconds": round(time.perf_counter() - began, 1),
        "all": sorted(peaks.values()),
    }
    subprocess.run(["rm", "-rf", str(out)], check=True)
    print(found, file=sys.stderr)
    return found


def anonymous(pid: int) -> dict[int, int]:
    """Return the anonymous bytes of a process and its children."""
    held = {}
    for each in [pid, *(child.pid for child in psutil.Process(pid).children())]:
        try:
            with open(f"/proc/{each}/status") as lines:
                held[each] = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
        except (OSError, StopIteration):
            continue
    return held


if __name__ == "__main__":
    main()
