"""The share of time in which the device waits for the real stream, whose threads read, join and plan batches.

The input is 65,536 queries with 50 mined negatives of 1.3M labels each, made first. Steps are not counted until the
threads are ahead.
"""

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.joined_tables import JoinedTables
from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.classifier_step import SIZES
from benchmarks.gpu.models import BAG, TRANSFORMERS, B, open_model
from benchmarks.gpu.profiles import idle_share
from trainer.step import StepContext, plan_for_device, take_step
from trainer.stream import JoinedStream

THREADS = 2
ROWS, QUICK_ROWS = 1 << 16, 1 << 10
WARM, STEPS, PROFILED = 20, 50, 30


def measurements(bench: Bench) -> Iterator[Measurement]:
    for encoder in (*reversed(TRANSFORMERS), BAG):
        is_bag = encoder == BAG
        yield Measurement(encoder, functools.partial(_measure, bench, encoder), 1 if is_bag else 8, 90, on_cpu=is_bag)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Return the folder of the queries; it is removed at the end of the process."""
    return tempfile.TemporaryDirectory()


def _open_stream(bench: Bench, context: StepContext, labels: int) -> JoinedStream:
    root = _folder().name
    tables = JoinedTables(root, QUICK_ROWS if bench.quick else ROWS, labels=labels)
    if not Path(tables.queries).exists():
        tables.write()
    size = 16 if bench.quick else B
    plan = functools.partial(plan_for_device, context.planner, bench.device)
    ahead = {"plan": plan, "prepare": context.queries.preparing()}
    return JoinedStream([tables.open()], labels, batch=size, streams=8, threads=THREADS, **ahead)


def _measure(bench: Bench, encoder: str) -> dict[str, Any]:
    labels = 2048 if bench.quick else SIZES["1.3M"]
    warm, steps, profiled = (2, 5, 2) if bench.quick or not bench.on_gpu else (WARM, STEPS, PROFILED)
    context = open_model(bench, encoder, labels)
    number, waited = 0, 0.0

    def run(count: int) -> None:
        nonlocal number, waited
        for _ in range(count):
            began = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - began
            take_step(context, batch, number, 1.0)
            number += 1

    with contextlib.closing(iter(_open_stream(bench, context, labels))) as batches:
        run(warm)
        waited = 0.0
        total = bench.seconds(lambda: run(steps))
        figures = {"ms": 1000 * total / steps, "for_stream_share": waited / total}
        if bench.on_gpu:
            figures["idle_share"] = idle_share(bench, lambda: run(profiled))
    return figures
