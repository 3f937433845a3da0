"""The whole step with a transformer of random weights, and the share of it in which the device waits for the host.

Candidates are planned before, as the stream's threads do; what is left to the host is what the loop does itself. With
fresh hard negatives, the best of 131K labels by their scores in the step, it draws the random ones in the step too. No
loss is read back, as in training between two lines of the log.
"""

import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.random_queries import HARD, RANDOM, plan, random_batch
from benchmarks.gpu.timing import milliseconds, wait_for
from trainer.group import ALONE
from trainer.heads.classifier import merges_on
from trainer.heads.queries import WholeBatch
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.base import MOST_FRESH, NegativeSources, SourceContext
from trainer.negatives.indexes import FreshIndex
from trainer.negatives.planner import Planner
from trainer.step import Clock, StepContext, take_step

LAYERS, HIDDEN = 6, (384, 768)
LABELS, B, TOKENS, VOCABULARY = 1_305_265, 512, 32, 30_522
BATCHES = 8


def measure(device: torch.device, quick: bool) -> dict[str, Any]:
    """Return milliseconds by the encoder's width; of the widest once more, compiled, and with fresh negatives."""
    layers = 2 if quick else LAYERS
    figures = {f"{layers}x{hidden}": _measure(device, hidden, quick) for hidden in _widths(quick)}
    widest = _widths(quick)[-1]
    figures[f"{layers}x{widest}, fresh negatives"] = _measure(device, widest, quick, fresh=True)
    if not quick:
        figures[f"{layers}x{widest}, compiled"] = _measure(device, widest, quick, compiled=True)
    return figures


def _widths(quick: bool) -> tuple[int, ...]:
    return (32,) if quick else HIDDEN


def _measure(
    device: torch.device, hidden: int, quick: bool, compiled: bool = False, fresh: bool = False
) -> dict[str, float]:
    labels, size = (2000, 16) if quick else (MOST_FRESH if fresh else LABELS, B)
    with tempfile.TemporaryDirectory() as folder:
        context = _open(folder, device, hidden, labels, 2 if quick else LAYERS, compiled)
    batches = [random_batch(size, labels, step, TOKENS, VOCABULARY) for step in range(BATCHES)]
    planned = [plan(batch, labels, "own", device) for batch in batches]
    if fresh:
        search = SourceContext(context.model.head, ALONE, on_device=not context.planner.merges)
        context = replace(context, sources=NegativeSources([FreshIndex(HARD, 0, search)]))
        batches = [replace(batch, hard=None) for batch in batches]
    else:
        batches = [replace(batch, candidates=made) for batch, made in zip(batches, planned, strict=True)]
    number = 0

    def step() -> None:
        nonlocal number
        take_step(context, batches[number % BATCHES], number, 1.0)
        number += 1

    rounds = 2 if quick else 10
    whole = milliseconds(step, device, rounds)
    x = torch.randn(size, context.model.width, device=device)
    classifier: Any = context.model.head
    alone = milliseconds(lambda: classifier.descend(x, planned[0], 1.0, 0, 1 / size), device, rounds)
    figures = {"ms": whole, "classifier_ms": alone, "classifier_share": alone / whole}
    if device.type == "cuda":
        figures["idle_share"] = _idle_share(step, device)
    return {name: round(value, 4) for name, value in figures.items()}


def _idle_share(step: Any, device: torch.device, steps: int = 20) -> float:
    """Return the share of time in which no kernel runs, by the profiler's spans of all kernels and copies."""
    from torch.profiler import ProfilerActivity, profile

    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA]) as spans:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wait_for(device)
        total = time.perf_counter() - began
    ranges = sorted((event.time_range.start, event.time_range.end) for event in spans.events())
    busy = end = 0.0
    for low, high in ranges:
        busy += max(0.0, high - max(low, end))
        end = max(end, high)
    return 1 - busy / 1e6 / total


def _open(folder: str, device: torch.device, hidden: int, labels: int, layers: int, compiled: bool) -> StepContext:
    from transformers import BertConfig, BertModel

    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, hidden // 64),
        "intermediate_size": 4 * hidden,
    }
    BertModel(BertConfig(vocab_size=VOCABULARY, hidden_size=hidden, **shape)).save_pretrained(folder)
    recipe = Recipe.model_validate(
        {
            "encoder": {
                "kind": "transformer",
                "model": folder,
                "dimension": 64,
                "bottleneck": True,
                "compile": compiled,
            },
            "classifier": {"dtype": "bfloat16", "lr": 0.01},
            "negatives": {"pool": "own", "random": RANDOM, "hard": HARD},
        }
    )
    model = Model.build(recipe, VOCABULARY, labels, device=device)
    planner = Planner(recipe.negatives, labels, merges=not merges_on(device, recipe))
    return StepContext(model, planner, WholeBatch(model.encoder, ALONE, Clock().lap))
