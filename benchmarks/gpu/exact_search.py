"""Exact search on the device: queries a second for their best 100 of 1.3M and 19M vectors."""

from typing import Any

import torch

from benchmarks.gpu.timing import fits, milliseconds
from trainer.evaluation.search import top_k

SIZES = {"1.3M": 1_305_265, "19M": 19_049_952}
D, QUERIES, K = 64, 4096, 100


def measure(device: torch.device, quick: bool) -> dict[str, Any]:
    """Return queries a second by the number of vectors, in float16."""
    figures = {}
    for name, labels in ({"20K": 20_000} if quick else SIZES).items():
        if fits(device, 2 * D * labels / 2**30):
            vectors = torch.randn(labels, D, device=device).half()
            x = torch.randn(64 if quick else QUERIES, D, device=device)
            time = milliseconds(lambda: top_k(x, vectors, K), device, 2, 1)
            figures[name] = {"queries_s": round(len(x) / time * 1000, 1)}
    return figures
