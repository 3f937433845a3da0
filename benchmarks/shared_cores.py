"""Time with different numbers of threads, on idle cores and beside busy processes.

    python -m benchmarks.shared_cores DATA TEXTS [--recipes astra,renee] [--rounds N]

Each setting is measured in turn: the default number of threads of a process, and each fixed number up to the number of
cores. Figures are the seconds of the third epoch of each recipe, the seconds of mining for a run of the first recipe,
and, with an export of that run, the milliseconds for one text (median and 99th percentile) and for 300 texts in one
call. TEXTS: a file of 300 lines or more. Meanwhile 0, 1 or 2 other processes compute without end. The bar: the default
number of threads takes at most 1.15 times as long as the best fixed number.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.report import interleave, medians, report
from schemas.process import cores

BUSY = (0, 1, 2)
BAR = "<1.15"
_OWN = "own"
_PREDICT = """
import json, sys, time
from schemas.process import limit_openmp_threads
limit_openmp_threads()
import extremis
model = extremis.load(sys.argv[1])
texts = [line.strip() for line in open(sys.argv[2])][:300]
def spent(asked):
    began = time.perf_counter()
    model.predict(asked)
    return 1e3 * (time.perf_counter() - began)
spent(texts)
singles = sorted(spent([text]) for text in texts)
many = sorted(spent(texts) for _ in range(5))
print(json.dumps({"one text p50": singles[150], "one text p99": singles[297], "300 texts": many[2]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("texts")
    parser.add_argument("--recipes", default="astra,renee")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    recipes = arguments.recipes.split(",")
    threads = {_OWN: None, **{str(count): count for count in range(1, cores() + 1)}}
    figures, ratios = {}, {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _train(recipes[0], arguments.data, folder / "run", None, "refresh.start=2")
        _extremis(None, "export", arguments.data, folder / "run", folder / "export")
        for busy in BUSY:
            sides: dict[str, Any] = {}
            for name, count in threads.items():
                predicted = _Predicted(folder / "export", arguments.texts, count)
                for recipe in recipes:
                    sides[f"{recipe} epoch s|{name}"] = lambda r=recipe, n=count: _epoch(r, arguments.data, folder, n)
                sides[f"mining s|{name}"] = lambda n=count: _mine(arguments.data, folder, n)
                for what in ("one text p50", "one text p99", "300 texts"):
                    sides[f"{what} ms|{name}"] = lambda w=what, p=predicted: p.take(w)
            with _beside(busy):
                middle = medians(interleave(sides, arguments.rounds))
            for what in dict.fromkeys(side.split("|")[0] for side in sides):
                of_what = {name: round(middle[f"{what}|{name}"], 3) for name in threads}
                figures[f"{what}, {busy} busy"] = of_what
                best = min(value for name, value in of_what.items() if name != _OWN)
                ratios[f"{what}, {busy} busy"] = of_what[_OWN] / best
    report(
        "threads divide the cores as the best fixed number of them does",
        figures,
        ratios,
        dict.fromkeys(ratios, BAR),
    )


def _environment(threads: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "EXTREMIS_"))}
    return kept if threads is None else {**kept, "OMP_NUM_THREADS": str(threads)}


def _extremis(threads: int | None, *words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "extremis", *map(str, words), "--json", "--quiet"]
    done = subprocess.run(command, env=_environment(threads), check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _train(recipe: str, data: str, run: Path, threads: int | None, *more: str) -> dict[str, Any]:
    shutil.rmtree(run, ignore_errors=True)
    changes = ("train.epochs=3", "validation.every_epochs=9", "logging.tensorboard=false", *more)
    return _extremis(threads, "train", recipe, data, run, *(word for each in changes for word in ("--set", each)))


def _epoch(recipe: str, data: str, folder: Path, threads: int | None) -> float:
    return _train(recipe, data, folder / "again", threads)["epochs"][-1]["seconds"]


def _mine(data: str, folder: Path, threads: int | None) -> float:
    shutil.rmtree(folder / "mined", ignore_errors=True)
    words = ("mine", data, folder / "run", "--out", folder / "mined")
    began = time.perf_counter()
    _extremis(threads, *words)
    return time.perf_counter() - began


class _Predicted:
    """Figures of one predicting process, returned one at a time; a new process starts after the last figure."""

    def __init__(self, export: Path, texts: str, threads: int | None) -> None:
        self._words = [sys.executable, "-c", _PREDICT, str(export), texts]
        self._threads, self._left = threads, dict[str, float]()

    def take(self, name: str) -> float:
        if name not in self._left:
            done = subprocess.run(
                self._words, env=_environment(self._threads), check=True, capture_output=True, text=True
            )
            self._left = json.loads(done.stdout)
        return self._left.pop(name)


@contextlib.contextmanager
def _beside(busy: int) -> Iterator[None]:
    """Let `busy` processes compute until the block ends."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
