"""Check that two checkouts give the same shards, tables, checkpoints, losses, metrics and predictions on this machine.

    python -m benchmarks.same_results OTHER [THIS] [--quick] [--only STEP,...] [--keep DIR]

Both checkouts run the same commands (`steps.py`) on the same input. Files are compared byte by byte; JSON and TOML are
compared value by value, without times and versions. The exit status is 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.report import report
from benchmarks.same_results.compare import Comparison, compare_step
from benchmarks.same_results.inputs import write_inputs
from benchmarks.same_results.steps import SIZES, VOCABULARY, Step, select

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = re.compile("no such option|no such command|unknown key|unknown recipe", re.IGNORECASE)


def main() -> None:
    """Run both sides and print the comparison. Raises SystemExit with status 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the project")
    parser.add_argument("this", type=Path, nargs="?", default=ROOT, help="another one (default: the script's)")
    parser.add_argument("--quick", action="store_true", help="less data and fewer steps")
    parser.add_argument("--only", default="", metavar="STEP,...", help="only these steps and those that they need")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep OTHER's outputs in DIR, and use those there")
    options = parser.parse_args()
    steps = select(options.quick, [name for name in options.only.split(",") if name])
    size = "quick" if options.quick else "full"
    with tempfile.TemporaryDirectory(prefix="same-results-") as scratch:
        sides = [options.keep / size if options.keep else Path(scratch, "other"), Path(scratch, "this")]
        for folder, checkout in zip(sides, (options.other, options.this), strict=True):
            run_side(folder.resolve(), checkout.resolve(), steps, size)
        compare(sides[0], sides[1], steps)


def write(folder: Path, size: str) -> str:
    """Write the inputs into `folder`; return their digest."""
    shutil.rmtree(folder, ignore_errors=True)
    write_inputs(folder, *SIZES[size], vocabulary=VOCABULARY)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def run_side(folder: Path, checkout: Path, steps: Sequence[Step], size: str) -> None:
    """Run the steps in `folder`, except steps already run there with the same commands and inputs."""
    kept = folder / "steps"
    kept.mkdir(parents=True, exist_ok=True)
    inputs = write(folder / "inputs", size)
    commands_of = {step.name: json.dumps({"inputs": inputs, **asdict(step)}) for step in steps}
    stale = {name for name, text in commands_of.items() if not _same(kept / f"{name}.json", text)}
    for step in steps:  # in order, because a step that reads a stale step's outputs is stale
        stale |= {step.name} if stale.intersection(step.needs) else set()
    todo = [step for step in steps if step.name in stale]
    if not todo:
        return
    for step in todo:
        shutil.rmtree(folder / step.name, ignore_errors=True)
        (kept / f"{step.name}.json").unlink(missing_ok=True)
    (folder / "todo.json").write_text(json.dumps([asdict(step) for step in todo]))
    command = [sys.executable, str(Path(__file__).with_name("side.py")), str(checkout), "todo.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, cwd=folder, env=environment, check=True)
    for step in todo:
        if not _failure(folder, step):
            (kept / f"{step.name}.json").write_text(commands_of[step.name])


def compare(other: Path, this: Path, steps: Sequence[Step]) -> None:
    """Print a line per step, then each difference; raise SystemExit if there is a difference."""
    results: dict[str, Comparison] = {}
    skipped: dict[str, str] = {}
    print(f"{'step':16} {'files':>7} {'values':>9} {'differences':>12}")
    for step in steps:
        failures = [_failure(folder, step) for folder in (other, this)]
        if any(UNKNOWN.search(failure) for failure in failures) or skipped.keys() & set(step.needs):
            skipped[step.name] = " | ".join(failure or "runs" for failure in failures)
            print(f"{step.name:16} skipped: {skipped[step.name]}")
            continue
        results[step.name] = result = compare_step(other, this, step.name)
        result.differences += [failure for failure in failures if failure]
        print(f"{step.name:16} {result.files:7,} {result.values:9,} {len(result.differences):12,}")
    for result in results.values():
        for line in result.differences[:20]:
            print(line[:300])
    one_sided = sorted(set().union(*(result.one_sided for result in results.values())))
    print("\n".join(one_sided))
    different = sum(len(result.differences) for result in results.values())
    figures = {
        "files": sum(result.files for result in results.values()),
        "values": sum(result.values for result in results.values()),
        "differences": {name: result.differences[:20] for name, result in results.items() if result.differences},
        "skipped": skipped,
        "options of one side": one_sided,
    }
    claim = "two checkouts give the same shards, tables, checkpoints, losses, metrics and predictions"
    if not report(claim, figures, {"differences": different}, {"differences": "<1"})["holds"]:
        sys.exit(1)


def _same(file: Path, text: str) -> bool:
    return file.exists() and file.read_text() == text


def _failure(folder: Path, step: Step) -> str:
    """Return the failed command of the step, with the end of its standard error; empty if no command failed."""
    file = folder / step.name / "failed"
    if not (folder / step.name).exists():
        return "not run: a step that it needs failed"
    if not file.exists():
        return ""
    errors = max((folder / step.name).glob("*.err"), key=lambda path: path.stat().st_mtime)
    return f"{file.read_text().strip()[-100:]} {errors.read_text().strip()[-300:]}"


if __name__ == "__main__":
    main()
