"""One commit's side: measurements within a long-lived process, so that rounds are short.

The process reads lines of JSON, {"measure": name, "folder": shared files, "write": whether to write them}, and answers
with {"figures": {name: cost}}; every figure is a cost, so less is better. The file also runs in older checkouts, so
`_of` looks names up at their old and new places.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 1 << 17  # rows of the stream's tables
B, POSITIVES, HARD, RANDOM, D = 512, 10, 100, 400, 64
SIZES = {"131K": 131_072, "1.3M": 1_305_265, "100M": 100_000_000}
RANKS = (8, 16)
TEXTS = 1_000
# Places in this and in earlier checkouts.
_TABLES = tuple(
    f"benchmarks.{place}" for place in ("common.joined_tables:JoinedTables", "common.joined_tables:World", "rows:World")
)
_TO_TENSORS = tuple(
    f"benchmarks.{place}"
    for place in ("common.training_batch:to_tensors", "common.training_batch:ready", "batches:ready")
)

Figures = dict[str, float]


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other prints out of the answers
    with contextlib.suppress(ImportError):
        _of("trainer.device:keep_freed_memory", "trainer.rows.memory:keep_freed_memory")()  # as in a training process
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer: dict[str, Any] = {"figures": MEASURES[task["measure"]](task["folder"], task["write"])}
        except (ImportError, AttributeError, FileNotFoundError) as error:
            answer = {"missing": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def stream(folder: str, write: bool) -> Figures:
    """Measure an epoch to tensors: in line and with two threads, with a shared pool and with own pools."""
    tables = _open_tables(folder, write)
    figures = {}
    for pool in ("shared", "own"):
        for threads, name in ((0, "in line"), (2, "2 threads")):
            rows, (processor, wall) = _timed(lambda: sum(map(len, _batches(tables, threads, pool))))
            figures[f"{name}, {pool} pool: processor us/row"] = processor / rows * 1e6
            figures[f"{name}, {pool} pool: us/row"] = wall / rows * 1e6
    return figures


def breakdown(folder: str, write: bool) -> Figures:
    """Measure the steps of a batch by the commit's own benchmark, in a fork, because that benchmark wraps functions."""
    tables = _open_tables(folder, write)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        with os.fdopen(writer, "w") as out:
            json.dump(_of("benchmarks.stream:breakdown")(tables)["microseconds"], out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        parts = json.load(answer)
    os.waitpid(pid, 0)
    return {f"{name}: us/batch": value for name, value in parts.items()}


def resume(folder: str, write: bool) -> Figures:
    """Measure the first batch after a resume in the middle of an epoch."""
    tables = _open_tables(folder, write)
    begun = _stream(tables, 0, "shared")
    state = {**begun.state_dict(), "step": begun.steps // 2}

    def first() -> None:
        again = _stream(tables, 0, "shared")
        again.load_state_dict(state)
        batches = iter(again)
        next(batches)
        batches.close()

    _, (processor, wall) = _timed(first)
    return {"processor ms": processor * 1e3, "ms": wall * 1e3}


def planning(folder: str, write: bool) -> Figures:
    """Measure planning the candidates of a batch: own and shared pools, and one rank's part of a global batch."""
    figures = {}
    for name, labels in SIZES.items():
        for pool in ("own", "shared"):
            plan = _planner(labels, pool, RANDOM, HARD)
            figures[f"{pool} pool, {name} labels: ms"] = _fastest(plan, _labelled(labels, B))
    for ranks in RANKS:
        name = f"rank 0 of {ranks}, own pools, batch of {B * ranks}: ms"
        figures[name] = _fastest(_plan_of_first_rank(SIZES["1.3M"], ranks), None, 1)
    return figures


def _plan_of_first_rank(labels: int, ranks: int) -> Callable[[None], Any]:
    """Return a function that plans rank 0's part of a global batch, and sends the other parts if the commit does so."""
    try:
        plan = _planner(labels, "own", RANDOM, HARD, part=(0, labels // ranks))
    except TypeError:
        return _plan_and_send(labels, ranks)
    batch = _labelled(labels, B * ranks)
    return lambda _: plan(batch)


def _plan_and_send(labels: int, ranks: int) -> Callable[[None], Any]:
    class First(_of("trainer.group:Group")):  # type: ignore[misc]
        """Rank 0, which got the messages `arrived`."""

        def __init__(self, arrived: list[Any]) -> None:
            self.ranks, self.arrived, self.sent = ranks, arrived, None

        def exchange(self, messages: Any) -> Any:
            self.sent = messages[0]
            return self.arrived or [messages[0]] * ranks

        all_to_all = exchange

    ranges = tuple((labels * rank // ranks, labels * (rank + 1) // ranks) for rank in range(ranks))
    try:
        plan = _planner(labels, "own", RANDOM, HARD, label_ranges=ranges)
    except TypeError:
        plan = _planner(labels, "own", RANDOM, HARD, parts=ranges)
    batches = [_labelled(labels, B, r) for r in range(ranks)]
    others = [First([]) for _ in batches]
    for batch, other in zip(batches, others, strict=True):
        plan.gather(batch, other)
    first = First([other.sent for other in others])

    def step(_: None) -> Any:
        gathered = plan.gather(batches[0], first)
        if isinstance(gathered, tuple):
            return plan(gathered[0])
        return plan(gathered.gathered if hasattr(gathered, "gathered") else gathered.whole)

    return step


def step(folder: str, write: bool) -> Figures:
    """Measure the classifier's part of a step, with the candidates of `planning`."""
    import torch

    classifier = _of("trainer.heads:Classifier", "trainer.classifier:Classifier")
    config = _of("trainer.methods.sections:Classifier", "trainer.config:Classifier")
    figures = {}
    for name in ("131K", "1.3M"):
        if name not in _heads:
            head = classifier(config(dtype="bfloat16", lr=0.01), SIZES[name], D, 0)
            head.vectors.normal_(0, 0.1)
            _heads[name] = head
        x = torch.randn(B, D, generator=torch.Generator().manual_seed(0))
        for pool in ("own", "shared"):
            planned = _planner(SIZES[name], pool, RANDOM, HARD)(_labelled(SIZES[name], B))
            descend = lambda candidates, head=_heads[name]: head.descend(x, candidates, 1.0, 0, 1 / B)  # noqa: E731
            figures[f"{pool} pool, {name} labels: ms"] = _fastest(descend, planned)
    return figures


def serve(folder: str, write: bool) -> Figures:
    """Measure predictions of a loaded export: one text at a time, and a thousand together."""
    load = _of("extremis:load")
    path = Path(folder, "export")
    if path not in _models:
        _models[path] = load(str(path))
        _models[path].compile()
    texts = Path(folder, "texts.txt").read_text().splitlines()
    one = [_fastest(_models[path].predict, [text], 1) for text in texts[:20]]
    return {
        "one text: ms": float(np.median(one)),
        f"{TEXTS:,} texts: ms": _fastest(_models[path].predict, texts[:TEXTS], 1),
    }


MEASURES: dict[str, Callable[[str, bool], Figures]] = {
    "stream": stream,
    "breakdown": breakdown,
    "resume": resume,
    "planning": planning,
    "step": step,
    "serve": serve,
}
_heads: dict[str, Any] = {}
_models: dict[Path, Any] = {}
_opened: dict[str, Any] = {}


def _of(*places: str) -> Any:
    """Return the object at the first of `places` (module:name) that exists. Raises ImportError."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        except AttributeError:
            continue
    raise ImportError(f"none of {', '.join(places)}")


def _open_tables(folder: str, write: bool) -> Any:
    if folder not in _opened:
        tables = _of(*_TABLES)(str(Path(folder, "world")), ROWS)  # a folder of both sides
        if write and not Path(tables.root).exists():
            tables.write()
        _opened[folder] = tables
        for pool in ("shared", "own"):
            next(_batches(tables, 0, pool))  # compiles and allocates once
    return _opened[folder]


def _stream(tables: Any, threads: int, pool: str) -> Any:
    labels = _of("benchmarks.common.joined_tables:LABELS", "benchmarks.rows:LABELS")
    plan = _planner(labels, pool, 2_000 if pool == "shared" else RANDOM, tables.width)
    joined = _of("trainer.stream:JoinedStream")
    return joined([tables.open()], labels, batch=B, streams=8, threads=threads, plan=plan)


def _batches(tables: Any, threads: int, pool: str) -> Iterator[Any]:
    to_tensors = _of(*_TO_TENSORS)
    return (to_tensors(batch)["rows"] for batch in _stream(tables, threads, pool))


def _planner(labels: int, pool: str, random: int, hard: int, **more: Any) -> Any:
    options = _of("trainer.methods.astra:Negatives", "trainer.config:Negatives")(random=random, hard=hard, pool=pool)
    return _of("trainer.negatives.planner:Planner", "trainer.candidates:Planner")(options, labels, 0, **more)


def _labelled(labels: int, size: int, number: int = 0) -> Any:
    """Return a batch of `size` queries with positives and hard negatives, all distinct within a query."""
    draw = np.random.default_rng([labels, size, number])
    width = POSITIVES + HARD
    ids = draw.permuted(np.sort(draw.integers(0, labels - width, (size, width)), axis=1) + np.arange(width), axis=1)
    positives = np.sort(ids[:, :POSITIVES], axis=1).reshape(-1).astype(np.int32)
    hard = np.ascontiguousarray(ids[:, POSITIVES:]).astype(np.int32)
    batch, inputs = _of("trainer.stream:Batch"), _of("trainer.inputs:Inputs")
    return batch(0, 0, np.arange(size) + number * size, inputs(), positives, np.arange(size + 1) * POSITIVES, hard)


def _timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return the result of `work`, and (processor seconds, wall seconds)."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.process_time() - processor, time.perf_counter() - wall)


def _fastest(work: Callable[[Any], Any], argument: Any, rounds: int = 5) -> float:
    """Return the milliseconds of wall time of the fastest of `rounds` calls, after a warm-up call."""
    work(argument)
    return min(_timed(lambda: work(argument))[1][1] for _ in range(rounds)) * 1e3


if __name__ == "__main__":
    main()
