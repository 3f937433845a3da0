"""What a person or a caller waits for: an answer, a service, a command, `auto`; beside a checkout, and other tools.

    python -m benchmarks.waits [--quick] [--export EXPORT] [--before CHECKOUT] [--peers PYTHON] [--raw RAW]

An answer: a fresh process on one core loads EXPORT and predicts 1,000 test titles of Tate one by one, by NumPy and by
the compiled path, with equal answers. The service: a title a request over loopback, from 1, 8 and 64 connections.
Commands: processor seconds. `auto`: `extremis run auto` on Tate, elapsed. Without EXPORT, a run of a minute on Tate is
exported; with --quick, of 3,000 rows, and `auto` is left out. PYTHON has Omikuji, PECOS, fastText or Annif (`peers`),
which are trained on RAW, by default Tate. Other checkouts are measured in turns with this one, in --rounds rounds.
"""

import argparse
import asyncio
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import extremis
from benchmarks.against.__main__ import BRIEF, Side, command_of
from benchmarks.common.raw_cut import cut
from benchmarks.common.report import report, require
from benchmarks.serve_load import CONNECTIONS, Client, serving

ROOT = Path(__file__).resolve().parents[2]
TATE = ROOT / "examples" / "tate"
COMMANDS = "inspect data", "inspect export", "evaluate", "predict 1", "shard 1000"
PEERS = Path(__file__).with_name("peers.py")
_TEXTS = """
import hashlib, json, sys, time
began = time.process_time()
import extremis
model = extremis.load(sys.argv[1], threads=1)
texts = open(sys.argv[2], encoding="utf-8").read().splitlines()
model.predict(texts[0], max_labels=10)
figures = {"start, processor s": time.process_time() - began}

def ask(name):
    for text in texts[:50]:
        model.predict(text, max_labels=10)
    waits, digest = [], hashlib.sha256()
    for text in texts:
        started = time.perf_counter()
        answer = model.predict(text, max_labels=10)
        waits.append(1000 * (time.perf_counter() - started))
        digest.update(repr([(label.key, label.score) for label in answer[0].labels]).encode())
    waits.sort()
    figures[f"{name}, p50 ms"], figures[f"{name}, p99 ms"] = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    return digest.hexdigest()

answers = ask("one text, NumPy")
if hasattr(model, "compile"):
    started = time.process_time()
    if model.compile():
        figures["compile, processor s"] = time.process_time() - started
        figures["answers that differ"] = float(ask("one text, compiled") != answers)
print(json.dumps(figures))
"""

Figures = dict[str, float]


class Place(NamedTuple):
    """What is asked: an export, and texts; DATA and RUN are beside them."""

    export: Path
    texts: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--export", type=Path, help="an export, for answers and the service")
    parser.add_argument("--before", type=Path, help="another checkout of the project")
    parser.add_argument("--peers", help="a Python with other tools")
    parser.add_argument("--raw", type=Path, default=TATE, help="what the other tools are trained on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each number of connections")
    parser.add_argument("--only", nargs="+", choices=[*MEASURES], default=[*MEASURES])
    options = parser.parse_args()
    require("fastapi", "uvicorn", "numba", "psutil")
    with tempfile.TemporaryDirectory(prefix="extremis-waits-") as scratch:
        place = prepare(Path(scratch), options)
        sides = {"before": options.before, "now": ROOT}
        costs = {name: Side(name, path.resolve(), Path(scratch)) for name, path in sides.items() if path}
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for name in options.only:
            for _ in range(1 if options.quick or name in ONCE else options.rounds):
                for side in costs.values():
                    for figure, value in MEASURES[name](side, place, options).items():
                        found[figure][side.name].append(value)
    medians = {figure: {side: statistics.median(some) for side, some in by.items()} for figure, by in found.items()}
    for figure, by in medians.items():
        print(f"{figure:44}", *(f"{by.get(side, float('nan')):12.3f}" for side in costs))
    peers = [*other_tools(options.peers, options.raw, options.quick)] if options.peers else []
    differ = medians.get("answers that differ", {})
    report("the compiled path answers as NumPy does", medians, differ, dict.fromkeys(differ, "<1"), peers=peers)


def prepare(scratch: Path, options: argparse.Namespace) -> Place:
    """Write 1,000 test titles of Tate; shard, train, fuse and export as far as it is needed."""
    raw, data, run = TATE, scratch / "data", scratch / "run"
    if options.quick:
        raw = scratch / "raw"
        cut(TATE, raw, 3000, seen=True)
    with gzip.open(TATE / "tst.json.gz", "rt", encoding="utf-8") as lines:
        titles = [" ".join(json.loads(line)["title"].split()) for line in lines][: 300 if options.quick else 1000]
    (scratch / "texts.txt").write_text("\n".join(titles) + "\n", encoding="utf-8")
    (scratch / "one.txt").write_text(titles[0] + "\n", encoding="utf-8")
    points = (json.dumps({"text": title, "labels": title.split()[:2]}) + "\n" for title in titles)
    (scratch / "rows.jsonl").write_text("".join(points), encoding="utf-8")
    place = Place(scratch / "export", scratch / "texts.txt")
    if options.export:
        place.export.symlink_to(options.export.resolve())
    if options.export and "commands" not in options.only:
        return place
    extremis.shard(str(raw), str(data), progress=False)
    extremis.run("random", str(data), str(run), set={"train.epochs": 2, "data.holdout": 0.05}, progress=False)
    extremis.fuse(str(data), str(run), progress=False)
    if not options.export:
        extremis.export(str(data), str(run), str(place.export), progress=False)
    return place


def answer(side: Side, place: Place, _: argparse.Namespace) -> Figures:
    """Measure one text at a time in a fresh process on one core."""
    core = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-c", _TEXTS, str(place.export), str(place.texts)],
        env={**side.environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        cwd=side.checkout,
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def service(side: Side, place: Place, options: argparse.Namespace) -> Figures:
    """Measure requests of one text from several connections, when the service is warm."""
    cores = sorted(os.sched_getaffinity(0))
    program = ["-m", "extremis", "serve"]
    if not (side.checkout / "extremis" / "service.py").exists():
        program = [str(side.checkout / "examples" / "serve.py")]
    seconds = 2.0 if options.quick else options.seconds

    async def measure(port: int) -> Figures:
        client, figures = Client(port, place.texts.read_text(encoding="utf-8").splitlines()), Figures()
        await client.closed(1, max(5.0, seconds / 4))
        for connections in CONNECTIONS:
            rate, latencies = await client.closed(connections, seconds)
            of = f"HTTP, {connections} connection{'s' * (connections > 1)}"
            figures |= {f"{of}, {name} ms": latencies[name] for name in ("p50", "p99")} | {
                f"{of}, µs a text": 1e6 / rate
            }
        if {*client.outcomes} - {"200"}:
            raise SystemExit(f"{side.name}: {client.outcomes}")
        return figures

    os.sched_setaffinity(0, cores[1:2] or cores)
    try:
        with serving([*program, str(place.export), "--port", "0"], cores[0], side.checkout) as port:
            return asyncio.run(measure(port))
    finally:
        os.sched_setaffinity(0, cores)


def commands(side: Side, place: Place, _: argparse.Namespace) -> Figures:
    """Measure the processor seconds of commands."""
    figures = {f"extremis {line}": side.run(line, status=BRIEF[line]) for line in ("--version", "--help", "shrad")}
    figures |= {f"extremis {name}": side.run(*command_of(name, place.texts.parent)) for name in COMMANDS}
    return {f"{name}, processor s": costs["processor s"] for name, costs in figures.items()}


def auto(side: Side, _: Place, options: argparse.Namespace) -> Figures:
    """Measure `auto` on Tate, with what is compiled once before, and without."""
    if options.quick:
        return {}
    data, run = str(side.folder / "tate"), str(side.folder / "auto")
    side.run("shard", str(TATE), data)
    shutil.rmtree(run, ignore_errors=True)
    return {"extremis run auto, s": side.run("run", "auto", data, run)["s"]}


def other_tools(python: str, raw: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Train and ask other tools, and print a line for each."""
    command = [python, str(PEERS), str(raw), *(["--rows", "3000"] if quick else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line.rstrip())
            yield json.loads(line)


Measure = Callable[[Side, Place, argparse.Namespace], Figures]
MEASURES: dict[str, Measure] = {"answer": answer, "service": service, "commands": commands, "auto": auto}
ONCE = {"service", "auto"}

if __name__ == "__main__":
    main()
