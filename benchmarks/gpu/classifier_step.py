"""The classifier's step at 131K to 100M labels, against full one-vs-all: milliseconds, GiB, share of what must move."""

from typing import Any

import torch

from benchmarks.gpu.random_queries import plan, random_batch
from benchmarks.gpu.timing import copy_gigabytes, fits, milliseconds, peak_gib, reset_peak
from trainer.heads.classifier import Classifier
from trainer.methods.sections import Classifier as Config
from trainer.negatives.candidates import label_range

SIZES = {"131K": 131_072, "1.3M": 1_305_265, "19M": 19_049_952, "100M": 100_000_000}
ON_HOST = ("131K", "19M")  # of these once more, with vectors in main memory
QUICK = {"2K": 2048, "20K": 20_000}
SHAPES = ((512, 64), (4096, 64), (512, 768))  # B, D
CHUNK = 1 << 16
BATCHES = 4
FULL_LABELS = 3_000_000  # beyond, one-vs-all is told by its labels


def measure(device: torch.device, quick: bool) -> dict[str, Any]:
    """Return figures by B, D and labels."""
    speed = copy_gigabytes(device)
    figures: dict[str, Any] = {"copy_gb_s": round(speed, 1)}
    for size, dimension in ((16, 8),) if quick else SHAPES:
        for name, labels in (QUICK if quick else SIZES).items():
            gib = labels * (2 * dimension + 4) / 2**30
            if fits(device, gib + 1 if not quick else gib):
                figures[f"B={size} D={dimension} L={name}"] = _measure(device, size, dimension, labels, speed)
    size, dimension = (16, 8) if quick else SHAPES[0]
    for name in QUICK if quick else ON_HOST:
        labels = {**SIZES, **QUICK}[name]
        figures[f"B={size} D={dimension} L={name}, on the host"] = _measure(
            device, size, dimension, labels, speed, storage="host"
        )
    return figures


def _measure(
    device: torch.device, size: int, dimension: int, labels: int, speed: float, storage: str = "memory"
) -> dict[str, float]:
    reset_peak(device)
    classifier = Classifier(Config(dtype="bfloat16", lr=0.01, storage=storage), labels, dimension, 0, device=device)
    x = torch.randn(size, dimension, device=device)
    batches = [random_batch(size, labels, step) for step in range(BATCHES)]
    rounds, figures = (2 if labels in QUICK.values() else 10), {}
    for pool in ("own", "shared"):
        planned = [plan(batch, labels, pool, device, storage == "memory") for batch in batches]
        number = 0

        def step() -> None:
            nonlocal number
            classifier.descend(x, planned[number % BATCHES], 1.0, number, 1 / size)
            number += 1

        figures[f"{pool}_ms"] = milliseconds(step, device, rounds)
        rows = sum(len(candidates.ids) for candidates in planned) / BATCHES
        moved = rows * 2 * (2 * dimension + 4)  # vectors and their sums, read and written
        figures[f"{pool}_rows"] = rows
        figures[f"{pool}_of_copy"] = moved / speed / 1e6 / figures[f"{pool}_ms"]
    figures["gib"] = peak_gib(device)
    if labels <= FULL_LABELS:
        positives = [label_range(batches[0], low, min(low + CHUNK, labels)) for low in range(0, labels, CHUNK)]
        figures["full_ms"] = milliseconds(
            lambda: [classifier.descend(x, chunk, 1.0, 0, 1 / size) for chunk in positives], device, 2, 1
        )
    return {name: round(value, 4) for name, value in figures.items()}
