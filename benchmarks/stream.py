"""Rows per second of the joined stream against a bare Arrow read of the same files, and against loaders of records.

All sides read the same rows: tokens, positives, and a table of K = 50 hard negatives per row. The stream and the other
loaders return the same batches of 512: tokens with offsets and padded, positives, hard negatives, a random pool of
2,000, candidate ids unique over the batch with the index of each (query, candidate), and the mask of positives. Each
side runs in a separate process, in turns; figures are medians; imports and opening are not timed. The stream's time
covers a whole epoch with its first window; the time of other loaders starts after their first batches, when buffers are
full and workers run. Batches of each side are compared with the tables.

    python -m benchmarks.stream [--quick] [--rows N] [--folder DIR] [--python PATH]...
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.common.joined_tables import LABELS, LEAST_TOKENS, MOST_TOKENS, POSITIVES, JoinedTables
from benchmarks.common.report import Bar, interleave, medians, report, require
from schemas.storage import join

ROOT = Path(__file__).parents[1]
THREADS = (0, 1, 2, 3)
WORKERS = (0, 1, 2)
WARM = 8  # batches
BUFFER = 1_000  # samples in the shuffle buffers of other loaders
PREFETCHED = 4  # maximum of batches per worker
STREAMS = 8
OTHER_LABELS = {"131K": 131_072, "100M": 100_000_000}  # besides LABELS
# Module of each library; several interpreters are searched for it.
LIBRARIES = {"webdataset": "webdataset", "mosaicml-streaming": "streaming", "HF datasets": "datasets"}
RAW, ARROW = ", raw bytes", ", Arrow batches"
BARS: dict[str, Bar] = {
    "stream / Arrow, one thread": 0.8,
    "stream, 2 threads / in line": 1.7,
    "processor us/row, in line": "<1.2",
    **{f"stream / Arrow, one thread, {name} labels": 0.8 for name in OTHER_LABELS},
    **{f"processor us/row, in line, {name} labels": "<1.2" for name in OTHER_LABELS},
    "stream / best peer": 40.0,
}


@dataclass(frozen=True)
class Setting:
    """Sizes of one comparison; `peer_rows`: rows that loaders of records read after their warm-up."""

    rows: int
    peer_rows: int
    rounds: int
    threads: tuple[int, ...] = THREADS
    workers: tuple[int, ...] = WORKERS
    forms: tuple[str, ...] = ("", RAW)


FULL = Setting(1 << 20, 51_200, 3)
QUICK = Setting(1 << 18, 10_240, 1, (0, 2), (2,), (RAW,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, the same ratios")
    parser.add_argument("--rows", type=int, help="rows of the tables")
    parser.add_argument("--folder", help="where the tables go; default: a temporary folder, removed at the end")
    parser.add_argument(
        "--python",
        action="append",
        help="interpreters to look for other loaders in, besides this one; default: .venvs/*/bin/python",
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        name, tables, *more = json.loads(arguments.side)
        print(json.dumps(SIDES[name](JoinedTables(**tables), *more)))
        return
    require("psutil")
    setting = QUICK if arguments.quick else FULL
    setting = Setting(**{**asdict(setting), "rows": arguments.rows or setting.rows})
    pythons = [sys.executable, *(arguments.python or map(str, ROOT.glob(".venvs/*/bin/python")))]
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="extremis-benchmark-") as folder:
        measure(JoinedTables(folder, setting.rows), setting, pythons)


def measure(tables: JoinedTables, setting: Setting, pythons: list[str]) -> None:
    """Make the tables, run all sides in turns, and print the report."""
    tables.write()
    interpreters = {library: where for library in LIBRARIES if (where := _find(library, pythons))}
    peers = {library + form: where for library, where in interpreters.items() for form in setting.forms}
    if "HF datasets" in interpreters:
        peers[f"HF datasets{ARROW}"] = interpreters["HF datasets"]
    # Workers shuffle and prefetch: with more rows, all rows of the measured time are read within it.
    written = setting.peer_rows + WARM * 512 + (BUFFER + PREFETCHED * 512) * max(setting.workers)
    sides: dict[str, dict[str, Callable[[], float]]] = defaultdict(dict)
    cpu: dict[str, list[float]] = defaultdict(list)

    def add(name: str, label: str, side: str, *arguments: object, python: str = sys.executable) -> None:
        def run() -> float:
            seen = child(side, tables, *arguments, python=python)
            cpu[label].append(seen["cpu"] / seen["rows"] * 1e6)
            return float(seen["rows"] / seen["seconds"])

        sides[name][label] = run

    for threads in setting.threads:
        add("stream", f"stream, {threads} threads", "stream", threads)
    for name, threads in (("Arrow, one thread", 1), ("Arrow, two threads", 2)):
        add(name, name, "arrow", threads)
    for name, python in peers.items():
        for workers in setting.workers:
            add(name, f"{name}, {workers} workers", "peer", name, workers, setting.peer_rows, written, python=python)
    rates = interleave({label: run for some in sides.values() for label, run in some.items()}, 1)
    best = {name: max(some, key=lambda label: rates[label][0]) for name, some in sides.items()}
    # All numbers of threads for the stream, and only the best number of workers for each other loader.
    again = {label: sides[name][label] for name in sides for label in _again(name, sides[name], best[name])}
    for label, more in interleave(again, setting.rounds - 1).items():
        rates[label] += more
    middle = medians(rates)
    best["stream"] = max(sides["stream"], key=middle.__getitem__)
    stream = middle[best["stream"]]
    ratios = {f"stream / {name}": stream / middle[best[name]] for name in sides if name != "stream"}
    ratios["stream, 2 threads / in line"] = middle["stream, 2 threads"] / middle["stream, 0 threads"]
    ratios["processor us/row, in line"] = medians(cpu)["stream, 0 threads"]
    for name in OTHER_LABELS:
        ratios |= _of_labels(tables, name, setting.rounds)
    records = [f"stream / {name}" for name in peers if not name.endswith(ARROW)]
    if records:
        ratios["stream / best peer"] = min(ratios[name] for name in records)
    report(
        "the joined stream reaches 0.8 of the rate of a bare Arrow read of the same files on one thread, and 40 times "
        "that of the fastest of webdataset, mosaicml-streaming and HF datasets reading records; a row takes 1.2 us of "
        "a processor; two threads bring 1.7 times the rows of one line",
        {
            "rows": tables.rows,
            "K": tables.width,
            "labels": LABELS,
            "positives a row": POSITIVES,
            "tokens a row": [LEAST_TOKENS, MOST_TOKENS],
            "batch": 512,
            "rows/s": {name: round(rate) for name, rate in middle.items()},
            "best": best,
            # More reliable than the clock on a machine with other work.
            "CPU microseconds a row": {name: round(value, 3) for name, value in medians(cpu).items()},
            "microseconds of a batch by step, in line": child("breakdown", tables)["microseconds"],
            "rounds": setting.rounds,
            "rows of other loaders, after their warm-up": setting.peer_rows,
            "not timed": f"imports, opening; of other loaders, the first {WARM} batches, while buffers fill",
            "peers": {library: _about(library, interpreters.get(library)) for library in LIBRARIES},
            "Arrow batches": "HF datasets without records: columns decoded and shuffled by Arrow, and every file "
            "written again with each new table; beside the bar",
        },
        ratios,
        {name: bar for name, bar in BARS.items() if name in ratios},
    )


def _of_labels(tables: JoinedTables, name: str, rounds: int) -> dict[str, float]:
    """Measure equally many rows with another number of labels, in line and with two threads."""
    other = JoinedTables(join(tables.root, name), tables.rows, labels=OTHER_LABELS[name])
    other.write()
    cpu: list[float] = []

    def run(side: str, threads: int) -> float:
        seen = child(side, other, threads)
        if not threads:
            cpu.append(seen["cpu"] / seen["rows"] * 1e6)
        return float(seen["rows"] / seen["seconds"])

    sides = ("stream", 0), ("stream", 2), ("arrow", 1)
    rates = medians(interleave({f"{side} {threads}": partial(run, side, threads) for side, threads in sides}, rounds))
    return {
        f"stream / Arrow, one thread, {name} labels": rates["stream 2"] / rates["arrow 1"],
        f"stream, 2 threads / in line, {name} labels": rates["stream 2"] / rates["stream 0"],
        f"processor us/row, in line, {name} labels": statistics.median(cpu),
    }


def stream(tables: JoinedTables, threads: int) -> dict[str, Any]:
    """Measure a whole epoch of the joined stream to tensors."""
    from benchmarks.common.training_batch import check

    _, some = _timed(open_stream(tables, threads), 4, first=4)
    seen = _timed(open_stream(tables, threads), None)[0]
    check(some, tables)  # after the timing, because this reads whole tables and changes memory allocation
    return seen


def open_stream(tables: JoinedTables, threads: int) -> Iterator[Any]:
    """Yield an iterator of batches of the joined stream as tensors."""
    from benchmarks.common.training_batch import SIZE, planner, to_tensors
    from trainer.stream import JoinedStream

    plan = planner(tables.width, tables.labels)
    batches = JoinedStream([tables.open()], tables.labels, batch=SIZE, streams=STREAMS, threads=threads, plan=plan)
    return map(to_tensors, batches)


def arrow(tables: JoinedTables, threads: int) -> dict[str, Any]:
    """Measure decoding the same columns of the same files by Arrow, one row group at a time; no order, no join."""
    queries, negatives = tables.files()
    jobs = [(path, ["input_ids", "label_ids"]) for path in queries] + [(path, ["label_ids"]) for path in negatives]

    def read(job: tuple[str, list[str]]) -> int:
        path, columns = job
        with pq.ParquetFile(path, memory_map=True) as file:
            groups = range(file.num_row_groups)
            return sum(file.read_row_group(group, columns, use_threads=False).num_rows for group in groups)

    read(jobs[0])
    start, cpu = time.perf_counter(), time.process_time()
    if threads == 1:
        rows = sum(map(read, jobs))
    else:
        with ThreadPoolExecutor(threads) as pool:  # the largest files first, so that threads finish together
            rows = sum(pool.map(read, reversed(jobs)))
    assert rows == 2 * tables.rows
    return {"rows": tables.rows, "seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def peer(tables: JoinedTables, name: str, workers: int, rows: int, written: int) -> dict[str, Any]:
    """Measure `rows` rows of peer `name` as tensors after its warm-up; make its files of `written` rows if needed."""
    from benchmarks.common.peer_loaders import PEERS
    from benchmarks.common.training_batch import check

    folder = Path(tables.root, name)
    if not folder.exists():
        folder.mkdir()
        PEERS[name].write(folder, tables, written)
    batches = PEERS[name].load(folder, workers, BUFFER)
    seen, some = _timed(batches, WARM + rows // 512, warm=WARM, first=2)
    check(some, tables)
    if seen["rows"] != rows:
        raise SystemExit(f"{name} gave {seen['rows']} rows after its warm-up, expected {rows}")
    return seen


def breakdown(tables: JoinedTables) -> dict[str, Any]:
    """Return the microseconds of a batch's steps without threads: reading, gathering, and later steps."""
    import trainer.negatives.draws
    import trainer.negatives.planner
    import trainer.stream.batch
    import trainer.stream.row_groups
    from benchmarks.common import training_batch

    seconds_of: dict[str, float] = defaultdict(float)

    def timed(name: str, action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = action(*arguments, **options)
        seconds_of[name] += time.perf_counter() - start
        return result

    for owner, attribute, name in (
        (trainer.stream.row_groups.RowGroups, "read", "read and decode"),
        (trainer.negatives.planner, "draw_hard", "hard draw"),
        (trainer.negatives.draws.RandomPool, "_draw", "pool"),
        (trainer.negatives.planner.Planner, "__call__", "plan"),
        (trainer.stream.batch.Batch, "padded", "padding"),
    ):
        action = getattr(owner, attribute)

        def wrapped(*arguments: Any, action: Callable[..., Any] = action, name: str = name, **options: Any) -> Any:
            return timed(name, action, *arguments, **options)

        setattr(owner, attribute, wrapped)
    training_batch.to_tensors = partial(timed, "tensors", training_batch.to_tensors)
    next(open_stream(tables, 0))  # compiles and allocates once
    seconds_of.clear()
    stream, steps = open_stream(tables, 0), 0
    while timed("all", next, stream, None) is not None:
        steps += 1
    others = sum(seconds_of[name] for name in ("read and decode", "plan", "tensors"))
    parts = {
        "read and decode": seconds_of["read and decode"],
        "gather into order": seconds_of["all"] - others,
        "hard draw": seconds_of["hard draw"],
        "pool": seconds_of["pool"],
        "unique and index": seconds_of["plan"] - seconds_of["hard draw"] - seconds_of["pool"],
        "padding": seconds_of["padding"],
        "to tensors": seconds_of["tensors"] - seconds_of["padding"],
    }
    return {"microseconds": {name: round(seconds / steps * 1e6, 1) for name, seconds in parts.items()}}


def child(side: str, tables: JoinedTables, *arguments: object, python: str = sys.executable) -> dict[str, Any]:
    """Run one side in a fresh process."""
    task = json.dumps([side, asdict(tables), *arguments])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "benchmarks.stream", "--side", task],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode:
        raise SystemExit(f"{side} {arguments}: status {done.returncode}")
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def about_peer(tables: JoinedTables, name: str) -> dict[str, Any]:
    """Return the versions of peer `name` and its libraries."""
    return {package: version(package) for package in (name.removeprefix("HF "), "numpy", "torch", "pyarrow")}


def _timed(batches: Iterable[Any], stop: int | None, warm: int = 0, first: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """Return rows, seconds and CPU seconds (also of workers) of batches (warm, stop], and the first few batches.

    The time excludes the shutdown of a loader, such as waiting for its threads.
    """
    kept, rows = [], 0
    iterator = iter(batches)
    start, cpu = time.perf_counter(), _cpu()
    for number in itertools.count(1):
        batch = next(iterator, None)
        if batch is None:
            break
        if number <= first:
            kept.append(batch)
        rows += len(batch["rows"])
        if number == warm:
            start, cpu, rows = time.perf_counter(), _cpu(), 0
        if number == stop:
            break
    return {"rows": rows, "seconds": time.perf_counter() - start, "cpu": _cpu() - cpu}, kept


def _cpu() -> float:
    """Return the CPU seconds of this process and its children, including running children."""
    import psutil

    process = psutil.Process()
    living = 0.0
    for descendant in process.children(recursive=True):
        try:
            times = descendant.cpu_times()
        except psutil.Error:
            continue
        living += times.user + times.system
    return sum(os.times()[:4]) + living


def _again(name: str, labels: Iterable[str], best: str) -> list[str]:
    return list(labels) if name == "stream" else [best]


def _find(library: str, pythons: list[str]) -> str | None:
    """Return the first interpreter that has the library, or None."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({LIBRARIES[library]!r}) is None)"
    for python in pythons:
        if not subprocess.run([python, "-I", "-c", code], check=False).returncode:
            return python
    return None


def _about(library: str, python: str | None) -> Any:
    return child("about_peer", JoinedTables("", 0), library, python=python) if python else "not installed"


SIDES: dict[str, Callable[..., dict[str, Any]]] = {
    "stream": stream,
    "arrow": arrow,
    "peer": peer,
    "about_peer": about_peer,
    "breakdown": breakdown,
}


if __name__ == "__main__":
    main()
