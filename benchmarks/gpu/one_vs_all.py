"""Full one-vs-all in chunks, compared with plain PyTorch: all scores at once, compiled; and
`nn.Embedding(sparse=True)` with Adagrad for own pools.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import softplus

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.classifier_step import SIZES, Shape, open_classifier
from benchmarks.gpu.random_queries import HARD, POSITIVES, RANDOM, random_batch
from trainer.negatives.planner import range_candidates

B, CHUNK = 512, 1 << 16
OURS = {"131K D=64": (SIZES["131K"], 64), "1.3M D=64": (SIZES["1.3M"], 64), "3M D=768": (3_000_000, 768)}
PLAIN = ("131K D=64", "1.3M D=64")
SPARSE = {"131K D=64": SIZES["131K"], "1.3M D=64": SIZES["1.3M"], "13M D=64": SIZES["13M"]}


def measurements(bench: Bench) -> Iterator[Measurement]:
    ours = {"2K D=8": (2048, 8)} if bench.quick else OURS
    for name, (labels, dimension) in ours.items():
        shape = Shape(16 if bench.quick else B, dimension, labels)
        gib = shape.gib + 4 * B * CHUNK * 4 / 2**30 if labels > SIZES["131K"] else 1
        for products, suffix in {"tf32": "", "bfloat16": ", bfloat16"}.items():
            measure = partial(_chunks, bench, shape, products)
            yield Measurement(f"in chunks, {name}{suffix}", measure, gib, 90, on_cpu=labels < SIZES["1.3M"])
    for name in ours if bench.quick else PLAIN:
        shape = Shape(16 if bench.quick else B, *(ours[name][::-1]))
        gib = 4 * 2 * B * shape.labels / 2**30 + 1
        yield Measurement(f"plain, {name}", partial(_plain, bench, shape), gib, 120, on_cpu=False)
    for name, labels in {"2K D=8": 2048}.items() if bench.quick else SPARSE.items():
        shape = Shape(16 if bench.quick else B, 8 if bench.quick else 64, labels)
        gib = 2 * 4 * shape.dimension * labels / 2**30 + 1
        yield Measurement(f"nn.Embedding, {name}", partial(_embedding, bench, shape), gib)


def _chunks(bench: Bench, shape: Shape, products: str) -> dict[str, Any]:
    bench.reset_peak()
    classifier, batch = open_classifier(bench, shape, products=products), random_batch(shape.size, shape.labels, 0)
    x = torch.randn(shape.size, shape.dimension, device=bench.device)
    chunk = 512 if bench.quick else CHUNK
    parts = [range_candidates(batch, low, min(low + chunk, shape.labels)) for low in range(0, shape.labels, chunk)]
    time = bench.milliseconds(lambda: [classifier.descend(x, part, 1.0, 0, 1 / shape.size) for part in parts], warm=1)
    return {"ms": time, "gib": bench.peak_gib(), "vectors_gib": shape.gib}


def _plain(bench: Bench, shape: Shape) -> dict[str, Any]:
    bench.reset_peak()
    w = torch.randn(shape.labels, shape.dimension, device=bench.device, dtype=torch.bfloat16).mul_(0.1)
    w.requires_grad_()
    x = torch.randn(shape.size, shape.dimension, device=bench.device, dtype=torch.bfloat16)
    positives = torch.from_numpy(random_batch(shape.size, shape.labels, 0).positives).to(bench.device)
    queries = torch.arange(shape.size, device=bench.device).repeat_interleave(POSITIVES)

    def loss_of(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scores = x @ w.T
        return (softplus(scores).sum(dtype=torch.float32) - scores[queries, positives].float().sum()) / len(x)

    compiled = loss_of if bench.quick else torch.compile(loss_of)
    optimizer = torch.optim.SGD([w], lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        compiled(w, x).backward()
        optimizer.step()

    return {"ms": bench.milliseconds(step), "gib": bench.peak_gib()}


def _embedding(bench: Bench, shape: Shape) -> dict[str, Any]:
    bench.reset_peak()
    table = torch.nn.Embedding(shape.labels, shape.dimension, sparse=True, device=bench.device)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.01)
    x = torch.randn(shape.size, 1, shape.dimension, device=bench.device)
    ids = torch.randint(shape.labels, (shape.size, POSITIVES + HARD + RANDOM), device=bench.device)
    sign = torch.ones(ids.shape, device=bench.device)
    sign[:, :POSITIVES] = -1

    def step() -> None:
        optimizer.zero_grad()
        softplus((table(ids) * x).sum(2) * sign).sum().div(shape.size).backward()
        optimizer.step()

    return {"ms": bench.milliseconds(step), "gib": bench.peak_gib()}
