"""Exact search on the device: queries per second for the best 100, and recall against float64 on a CPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.classifier_step import SIZES
from search.torch_topk import DeviceVectors, top_k

D, QUERIES, AUDITED, K = 64, 4096, 16, 100


def measurements(bench: Bench) -> Iterator[Measurement]:
    for name in ("2K",) if bench.quick else ("1.3M", "13M"):
        labels = 2048 if bench.quick else SIZES[name]
        gib = labels * D * 8 / 2**30 + (3 if bench.on_gpu else 0)
        yield Measurement(f"evaluation, L={name}", partial(_evaluation, bench, labels), gib)
        yield Measurement(f"mining, L={name}", partial(_mining, bench, labels), gib)


def _evaluation(bench: Bench, labels: int) -> dict[str, Any]:
    """Measure search of float16 vectors as in `evaluate`."""
    x, vectors = _drawn(bench, labels)
    vectors = vectors.half()
    time = bench.milliseconds(lambda: top_k(x, vectors, K), warm=1)
    return {"queries_s": len(x) / time * 1000, "recall": _recall(top_k(x[:AUDITED], vectors, K)[1], x, vectors)}


def _mining(bench: Bench, labels: int) -> dict[str, Any]:
    """Measure search of float32 vectors as in `mine --index exact`, from host to host."""
    x, vectors = _drawn(bench, labels)
    queries, there = x.cpu().numpy(), DeviceVectors(vectors.cpu().numpy(), str(bench.device))
    time = bench.milliseconds(lambda: there.nearest(queries, K), warm=1)
    found = torch.from_numpy(there.nearest(queries[:AUDITED], K)[1])
    return {"queries_s": len(x) / time * 1000, "recall": _recall(found, x, vectors)}


def _drawn(bench: Bench, labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator(bench.device).manual_seed(labels)
    count = 64 if bench.quick or not bench.on_gpu else QUERIES
    x, vectors = (torch.randn(rows, D, generator=draw, device=bench.device) for rows in (count, labels))
    return x, vectors


def _recall(found: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor) -> float:
    """Return the share of the first queries' best K labels that is in `found` [AUDITED, K]."""
    queries = x[:AUDITED].cpu().double()
    scores = torch.cat([queries @ part.cpu().double().T for part in vectors.split(1 << 20)], 1)
    best = scores.topk(K).indices
    return float((found.cpu()[:, :, None] == best[:, None]).any(2).double().mean())
