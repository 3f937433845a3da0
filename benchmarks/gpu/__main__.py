"""Measure everything that runs on a GPU, in ten minutes, on a machine without a network.

Each measurement is a line of DIR/results.jsonl, on disk before the next measurement begins. Existing measurements are
skipped, so an interrupted command continues when it is repeated. A measurement that fails, hangs or kills its process
does not affect the others. DIR/report.json, and the last line of the output, shows all measurements beside their bars.
`make gpu-bundle` makes the files to take along with a checkout.

    python -m benchmarks.gpu --out DIR [--minutes 9] [--only versions,kernels] [--device auto] [--bundle DIR] [--quick]
"""

import argparse
import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import Bar, report
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.supervisor import supervise
from benchmarks.gpu.worker import work

CLAIM = "on a GPU, a step's cost does not grow with the labels, and the device does not wait"
BARS: dict[str, Bar] = {
    "ms at 100M": "<0.4001",
    "step at 100M : at 13M": "<1.2001",
    "device idle, 6 x 768": "<0.0501",
    "classifier of the step, 6 x 768": "<0.1001",
    "full one-vs-all at 3M, GiB": "<8.0001",
    "losses off the CPU's": "<0.0010001",
    "least recall of exact search": 0.999,
}
BUNDLE = Path("build/gpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go, or are already")
    parser.add_argument("--minutes", type=float, default=9, help="when it ends, whatever is left (9)")
    sections = ",".join(SECTIONS)
    parser.add_argument("--only", default=sections, help=f"sections with commas between: {sections}")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--bundle", type=Path, default=BUNDLE, metavar="DIR", help=f"what `make gpu-bundle` made ({BUNDLE})"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in a minute: tells whether all of it runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - SECTIONS.keys():
        parser.error(f"--only {arguments.only}: no section {', '.join(sorted(unknown))}; there are {sections}")
    if arguments.worker:
        work(arguments)
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(arguments.out, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept until this process ends
    except BlockingIOError:
        parser.error(f"--out {arguments.out}: another call writes there. Wait for it, or give another --out.")
    except OSError as error:
        parser.error(f"--out {arguments.out}: {error.strerror}. Give a folder that can be written.")
    Results(arguments.out).drop_failed()
    worker = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--worker"]
    planned = supervise(worker, arguments.out, deadline)
    rows = Results(arguments.out).rows
    gaps = {name: "not measured" for name in planned if name not in rows}
    gaps |= {name: row["failed"] for name, row in rows.items() if "failed" in row}
    if not planned:
        gaps["start"] = "nothing could be measured: messages are above"
    ratios = {} if arguments.quick else _ratios(rows)
    bars = {name: bar for name, bar in BARS.items() if name in ratios}
    body = report(CLAIM, rows, ratios, bars, gaps=gaps, quick=arguments.quick)
    (arguments.out / "report.json").write_text(json.dumps(body, indent=1) + "\n")
    raise SystemExit(0 if body["holds"] else 1)


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the measured ratios of the bars."""

    def of(name: str, figure: str) -> Any:
        return rows.get(name, {}).get(figure)

    near, far = (of(f"steps: own B=512 D=64 L={labels}", "ms") for labels in ("13M", "100M"))
    losses = [row["of_cpu"] for row in rows.values() if "of_cpu" in row]
    recalls = [row["recall"] for row in rows.values() if "recall" in row]
    measured = {
        "ms at 100M": far,
        "step at 100M : at 13M": far / near if near and far else None,
        "device idle, 6 x 768": of("waiting: 6 x 768", "idle_share"),
        "classifier of the step, 6 x 768": of("transformer: 6 x 768", "classifier_share"),
        "full one-vs-all at 3M, GiB": of("full: in chunks, 3M D=768", "gib"),
        "losses off the CPU's": max(losses, default=None),
        "least recall of exact search": min(recalls, default=None),
    }
    return {name: value for name, value in measured.items() if value is not None}


if __name__ == "__main__":
    main()
