"""The whole step of a bag and of transformers, also compiled, and with fresh hard negatives; the classifier's part.

Candidates are planned beforehand, as by the stream's threads. Fresh negatives are the best of 131K labels by scores in
the step; then the step also draws the random negatives.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.classifier_step import SIZES
from benchmarks.gpu.models import BAG, TRANSFORMERS, B, open_model, open_steps
from benchmarks.gpu.place import Measurement, Place
from benchmarks.gpu.random_queries import HARD, plan, random_batch
from trainer.group import ALONE
from trainer.negatives.base import MOST_FRESH, NegativeSources, SourceContext
from trainer.negatives.indexes import FreshIndex

LABELS = SIZES["1.3M"]
WIDEST = list(TRANSFORMERS)[-1]


def of_bag(place: Place) -> Iterator[Measurement]:
    yield Measurement(BAG, partial(_measure, place, BAG), gib=1)
    yield Measurement(f"{BAG}, recorded", partial(_measure, place, BAG, recorded=True), gib=1, on_cpu=False)


def of_transformers(place: Place) -> Iterator[Measurement]:
    for name in TRANSFORMERS:
        yield Measurement(name, partial(_measure, place, name), gib=8, on_cpu=False)
    yield Measurement(f"{WIDEST}, fresh negatives", partial(_fresh, place), gib=8, on_cpu=False)
    yield Measurement(f"{WIDEST}, compiled", partial(_measure, place, WIDEST, compiled=True), 8, 150, on_cpu=False)


def _measure(place: Place, encoder: str, compiled: bool = False, recorded: bool = False) -> dict[str, Any]:
    labels = 2000 if place.quick else LABELS
    place.reset_peak()
    context = open_model(place, encoder, labels, compiled=compiled and not place.quick)
    whole = place.milliseconds(open_steps(place, context, labels, recorded=recorded))
    size, classifier = 16 if place.quick else B, context.model.head
    x = torch.randn(size, context.model.width, device=place.device)
    planned = plan(random_batch(size, labels, 0), labels, "own", place.device)
    alone = place.milliseconds(lambda: classifier.descend(x, planned, 1.0, 0, 1 / size))  # type: ignore[attr-defined]
    return {"ms": whole, "classifier_ms": alone, "classifier_share": alone / whole, "gib": place.peak_gib()}


def _fresh(place: Place) -> dict[str, Any]:
    labels = 2000 if place.quick else MOST_FRESH
    context = open_model(place, WIDEST, labels)
    search = SourceContext(context.model.head, ALONE, on_device=not context.planner.merges)
    context = replace(context, negative_sources=NegativeSources([FreshIndex(HARD, 0, search)]))
    return {"ms": place.milliseconds(open_steps(place, context, labels, planned=False))}
