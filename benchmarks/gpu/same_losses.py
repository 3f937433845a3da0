"""Losses of 20 steps on the device compared with the same steps on the CPU, from the same start, in float32."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.random_queries import random_batch
from trainer.device import CPU
from trainer.group import ALONE
from trainer.heads import WholeBatch, merges_on
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.planner import Planner
from trainer.step import Clock, StepContext, plan_for_device, take_step

LABELS, B, VOCABULARY, STEPS = 20_000, 256, 5000, 20


def measurements(bench: Bench) -> Iterator[Measurement]:
    for loss, pool in (("bce", "own"), ("bce", "shared"), ("decoupled", "shared")):
        yield Measurement(f"{loss} {pool}", partial(_measure, bench, loss, pool))


def _measure(bench: Bench, loss: str, pool: str) -> dict[str, Any]:
    """Return the greatest relative difference of a loss between device and CPU, and between two runs on the device."""
    expected, got, again = (_train(device, loss, pool, bench.quick) for device in (CPU, bench.device, bench.device))
    return {
        "of_cpu": max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True)),
        "again": max(abs(a - b) / abs(b) for a, b in zip(again, got, strict=True)),
    }


def _train(device: torch.device, loss: str, pool: str, quick: bool) -> list[float]:
    labels, size = (2000, 16) if quick else (LABELS, B)
    recipe = Recipe.model_validate(
        {
            "encoder": {"dimension": 64, "buckets": 1 << 14, "idf": False, "residual": True, "lr": 0.01},
            "classifier": {"dtype": "bfloat16", "lr": 0.05, "bias": True},
            "negatives": {"pool": pool, "random": 400, "hard": 50},
            "loss": {"kind": loss},
        }
    )
    model = Model.build(recipe, VOCABULARY, labels, device=device)
    queries = WholeBatch(model.encoder, ALONE, Clock().lap)
    context = StepContext(model, Planner(recipe.negatives, labels, merges=not merges_on(device, recipe)), queries)
    prepare = queries.preparing()
    results = []
    for number in range(STEPS):
        batch = random_batch(size, labels, number, 16, VOCABULARY)
        if prepare is not None:
            candidates = plan_for_device(context.planner, device, batch)
            batch = replace(batch, prepared=prepare(batch), candidates=candidates)
        results.append(take_step(context, batch, number, 1.0).loss)
    return [float(value) for value in torch.stack(results).cpu()]
