"""The classifier's step at 131K to 100M labels: milliseconds, GiB, and share of the bandwidth of a copy.

Vectors are random, and so is Adagrad's sum: zeros would be rounded to themselves.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.random_queries import plan, random_batch
from trainer.heads import Classifier
from trainer.methods.sections import Classifier as Config
from trainer.step import plan_for_device
from trainer.stream import Batch

SIZES = {"131K": 131_072, "1.3M": 1_305_265, "13M": 13_052_650, "100M": 100_000_000}
ON_HOST = ("131K", "13M")  # these are also measured with vectors in main memory
QUICK = {"2K": 2048, "20K": 20_000}
SHAPES = ((512, 64), (4096, 64), (512, 768))  # B, D
BATCHES = 4
_CHUNK = 1 << 22  # rows filled at a time


class Shape(NamedTuple):
    """B queries, D columns, L labels, and the storage of the vectors."""

    size: int
    dimension: int
    labels: int
    storage: str = "memory"

    @property
    def gib(self) -> float:
        """GiB of vectors in bfloat16 and of their sums."""
        return self.labels * (2 * self.dimension + 4) / 2**30


def measurements(bench: Bench) -> Iterator[Measurement]:
    sizes = QUICK if bench.quick else SIZES
    shapes = ((16, 8),) if bench.quick else SHAPES
    for name, labels in reversed(sizes.items()):  # the largest is what nobody has measured
        for size, dimension in shapes:
            for pool in ("own", "shared"):
                yield _measurement(bench, name, Shape(size, dimension, labels), pool)
    for name in QUICK if bench.quick else ON_HOST:
        yield _measurement(bench, f"{name}, on the host", Shape(*shapes[0], sizes[name], "host"), "own")


def _measurement(bench: Bench, labels: str, shape: Shape, pool: str) -> Measurement:
    name = f"{pool} B={shape.size} D={shape.dimension} L={labels}"
    on_host = shape.storage == "host"
    gib = shape.gib + 1 if not on_host and shape.gib > 1 else 1.0
    return Measurement(name, lambda: _measure(bench, shape, pool), gib, on_cpu=not on_host)


def open_classifier(bench: Bench, shape: Shape, **options: Any) -> Classifier:
    """Open a classifier with random vectors."""
    config = Config(dtype="bfloat16", lr=0.01, storage=shape.storage, **options)
    classifier = Classifier(config, shape.labels, shape.dimension, 0, device=bench.device)
    for part in classifier.vectors.split(_CHUNK):
        part.normal_(0, 0.1)
    rows = classifier.rows()
    rows["square"].fill_(1e-3)
    return classifier


def plan_ahead(bench: Bench, batch: Batch, labels: int, pool: str, merges: bool = True) -> Any:
    """Return the batch's candidates in the form in which the stream's threads pass them to a step."""
    return plan_for_device(lambda each: plan(each, labels, pool, bench.device, merges), bench.device, batch)


def open_step(bench: Bench, shape: Shape, pool: str) -> tuple[Callable[[], object], float]:
    """Return a step on batches planned beforehand, and the mean number of labels per batch."""
    classifier = open_classifier(bench, shape)
    x = torch.randn(shape.size, shape.dimension, device=bench.device)
    merges = shape.storage == "memory"
    planned = [
        plan_ahead(bench, random_batch(shape.size, shape.labels, step), shape.labels, pool, merges)
        for step in range(BATCHES)
    ]
    number = 0

    def step() -> None:
        nonlocal number
        classifier.descend(x, planned[number % BATCHES], 1.0, number, 1 / shape.size)
        number += 1

    rows = sum(len(each.ids) if each.drawn is None else len(each.drawn.label) for each in planned) / BATCHES
    return step, rows


def _measure(bench: Bench, shape: Shape, pool: str) -> dict[str, Any]:
    bench.reset_peak()
    step, rows = open_step(bench, shape, pool)
    time = bench.milliseconds(step)
    moved = rows * 2 * (2 * shape.dimension + 4)  # vectors and their sums are read and written
    return {"ms": time, "rows": rows, "gb_s": moved / time / 1e6, "gib": bench.peak_gib()}
