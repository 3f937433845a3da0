"""Full one-vs-all over 3 million labels in chunks: its memory is that of the vectors and of one chunk."""

from typing import Any

import torch

from benchmarks.gpu.classifier_step import CHUNK
from benchmarks.gpu.random_queries import random_batch
from benchmarks.gpu.timing import milliseconds, peak_gib, reset_peak
from trainer.heads.classifier import Classifier
from trainer.methods.sections import Classifier as Config
from trainer.negatives.candidates import label_range

LABELS, D, B = 3_000_000, 768, 512


def measure(device: torch.device, quick: bool) -> dict[str, Any]:
    """Return milliseconds of a step, GiB at its peak and those of the vectors."""
    labels, dimension, size, chunk = (3000, 8, 16, 512) if quick else (LABELS, D, B, CHUNK)
    reset_peak(device)
    classifier = Classifier(Config(dtype="bfloat16", lr=0.01), labels, dimension, 0, device=device)
    x = torch.randn(size, dimension, device=device)
    batch = random_batch(size, labels, 0)

    def step() -> None:
        for low in range(0, labels, chunk):
            classifier.descend(x, label_range(batch, low, min(low + chunk, labels)), 1.0, 0, 1 / size)

    time = milliseconds(step, device, 2, 1)
    return {
        "labels": labels,
        "dimension": dimension,
        "ms": round(time, 2),
        "gib": round(peak_gib(device), 3),
        "vectors_gib": round(labels * (2 * dimension + 4) / 2**30, 3),
    }
