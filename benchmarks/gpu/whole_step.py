"""The whole step of a bag and of transformers, also compiled, and with fresh hard negatives; the classifier's part.

Candidates are planned beforehand, as by the stream's threads. Fresh negatives are the best of 131K labels by scores in
the step; then the step also draws the random negatives.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.classifier_step import SIZES
from benchmarks.gpu.models import BAG, TRANSFORMERS, B, open_model, open_steps
from benchmarks.gpu.random_queries import HARD, plan, random_batch
from trainer.group import ALONE
from trainer.negatives.base import MOST_FRESH, NegativeSources, SourceContext
from trainer.negatives.indexes import FreshIndex

LABELS = SIZES["1.3M"]
WIDEST = list(TRANSFORMERS)[-1]


def of_bag(bench: Bench) -> Iterator[Measurement]:
    yield Measurement(BAG, partial(_measure, bench, BAG), gib=1)


def of_transformers(bench: Bench) -> Iterator[Measurement]:
    for name in TRANSFORMERS:
        yield Measurement(name, partial(_measure, bench, name), gib=8, on_cpu=False)
    yield Measurement(f"{WIDEST}, fresh negatives", partial(_fresh, bench), gib=8, on_cpu=False)
    yield Measurement(f"{WIDEST}, compiled", partial(_measure, bench, WIDEST, compiled=True), 8, 150, on_cpu=False)


def _measure(bench: Bench, encoder: str, compiled: bool = False) -> dict[str, Any]:
    labels = 2000 if bench.quick else LABELS
    bench.reset_peak()
    context = open_model(bench, encoder, labels, compiled=compiled and not bench.quick)
    whole = bench.milliseconds(open_steps(bench, context, labels))
    size, classifier = 16 if bench.quick else B, context.model.head
    x = torch.randn(size, context.model.width, device=bench.device)
    planned = plan(random_batch(size, labels, 0), labels, "own", bench.device)
    alone = bench.milliseconds(lambda: classifier.descend(x, planned, 1.0, 0, 1 / size))  # type: ignore[attr-defined]
    return {"ms": whole, "classifier_ms": alone, "classifier_share": alone / whole, "gib": bench.peak_gib()}


def _fresh(bench: Bench) -> dict[str, Any]:
    labels = 2000 if bench.quick else MOST_FRESH
    context = open_model(bench, WIDEST, labels)
    search = SourceContext(context.model.head, ALONE, on_device=not context.planner.merges)
    context = replace(context, negative_sources=NegativeSources([FreshIndex(HARD, 0, search)]))
    return {"ms": bench.milliseconds(open_steps(bench, context, labels, planned=False))}
