"""Exact search on the device: queries per second for the best 100, and recall against float64 on a CPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.classifier_step import SIZES
from benchmarks.gpu.place import Measurement, Place
from search.nearest import DeviceVectors
from trainer.evaluation.search import top_k

D, QUERIES, AUDITED, K = 64, 4096, 16, 100


def measurements(place: Place) -> Iterator[Measurement]:
    for name in ("2K",) if place.quick else ("1.3M", "13M"):
        labels = 2048 if place.quick else SIZES[name]
        gib = labels * D * 8 / 2**30 + (3 if place.on_gpu else 0)
        yield Measurement(f"evaluation, L={name}", partial(_evaluation, place, labels), gib)
        yield Measurement(f"mining, L={name}", partial(_mining, place, labels), gib)


def _evaluation(place: Place, labels: int) -> dict[str, Any]:
    """Measure search of float16 vectors as in `evaluate`."""
    x, vectors = _drawn(place, labels)
    vectors = vectors.half()
    time = place.milliseconds(lambda: top_k(x, vectors, K), warm=1)
    return {"queries_s": len(x) / time * 1000, "recall": _recall(top_k(x[:AUDITED], vectors, K)[1], x, vectors)}


def _mining(place: Place, labels: int) -> dict[str, Any]:
    """Measure search of float32 vectors as in `mine --index exact`, from host to host."""
    x, vectors = _drawn(place, labels)
    queries, there = x.cpu().numpy(), DeviceVectors(vectors.cpu().numpy(), str(place.device))
    time = place.milliseconds(lambda: there.nearest(queries, K), warm=1)
    found = torch.from_numpy(there.nearest(queries[:AUDITED], K)[1])
    return {"queries_s": len(x) / time * 1000, "recall": _recall(found, x, vectors)}


def _drawn(place: Place, labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator(place.device).manual_seed(labels)
    count = 64 if place.quick or not place.on_gpu else QUERIES
    x, vectors = (torch.randn(rows, D, generator=draw, device=place.device) for rows in (count, labels))
    return x, vectors


def _recall(found: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor) -> float:
    """Return the share of the first queries' best K labels that is in `found` [AUDITED, K]."""
    queries = x[:AUDITED].cpu().double()
    scores = torch.cat([queries @ part.cpu().double().T for part in vectors.split(1 << 20)], 1)
    best = scores.topk(K).indices
    return float((found.cpu()[:, :, None] == best[:, None]).any(2).double().mean())
