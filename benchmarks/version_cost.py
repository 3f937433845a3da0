"""Adding 1 % of points and labels to a data set against sharding all data, in processor seconds of all processes.

The cost of the start, measured on a few rows, is subtracted from both. The input is written as a stream; equal sizes
give equal input.

    python -m benchmarks.version_cost [--quick] [--rows N --labels L] [--folder DIR]
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.keyed_input import write_keyed
from benchmarks.common.report import report

ADDED = 100  # one new row for this number of rows
SMALL = 20
BAR = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="200,000 rows and 20,000 labels")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--labels", type=int, default=200_000)
    parser.add_argument("--folder", help="where input and output go; default: a temporary folder, removed at the end")
    arguments = parser.parse_args()
    rows, labels = (200_000, 20_000) if arguments.quick else (arguments.rows, arguments.labels)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(Path(folder), rows, labels)


def run(folder: Path, rows: int, labels: int) -> None:
    """Write the inputs, shard them, and print the report."""
    write_keyed(folder / "few", SMALL, SMALL)
    write_keyed(folder / "fewer", SMALL, SMALL, before=(SMALL, SMALL))
    write_keyed(folder / "all", rows, labels)
    write_keyed(folder / "new", rows // ADDED, labels // ADDED, before=(rows, labels))
    seconds = {
        "start": shard(folder, "few"),
        "start onto": shard(folder, "fewer", "few"),
        "all": shard(folder, "all"),
        "1 % added": shard(folder, "new", "all"),
    }
    added, whole = seconds["1 % added"] - seconds["start onto"], seconds["all"] - seconds["start"]
    sizes = {
        name: sum(path.stat().st_size for path in (folder / f"{name}-data").rglob("*.*")) for name in ("all", "new")
    }
    report(
        f"adding 1 % of points and labels costs at most {BAR:.0%} of sharding all of them",
        {
            "rows": rows,
            "labels": labels,
            "processor seconds": {name: round(value, 1) for name, value in seconds.items()},
            "bytes": sizes,
        },
        {"added over all": added / whole},
        {"added over all": f"<{BAR}"},
    )


def shard(folder: Path, name: str, onto: str | None = None) -> float:
    """Shard the input `name`, perhaps onto the data `onto`; return the processor seconds of its processes."""
    more = [] if onto is None else ["--onto", str(folder / f"{onto}-data"), "--labels", "new"]
    command = [sys.executable, "-m", "extremis", "shard", str(folder / name), str(folder / f"{name}-data"), *more]
    before = _seconds()
    subprocess.run(command, check=True)
    return _seconds() - before


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
