"""Whole models with random weights, opened from a recipe: a bag of embeddings, and transformers with 6 layers."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.classifier_step import BATCHES, plan_ahead
from benchmarks.gpu.random_queries import HARD, RANDOM, random_batch
from trainer.group import ALONE
from trainer.heads import WholeBatch, merges_on
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.planner import Planner
from trainer.step import Clock, StepContext, take_step

B, TOKENS, VOCABULARY = 512, 32, 30_522
BAG = "bag"
TRANSFORMERS = {"6 x 384": 384, "6 x 768": 768}


def open_model(bench: Bench, encoder: str, labels: int, compiled: bool = False, **classifier: Any) -> StepContext:
    """Open `encoder`, BAG or one of TRANSFORMERS, with a classifier of 64 columns and own pools."""
    with tempfile.TemporaryDirectory() as folder:
        section: dict[str, Any] = {
            "dimension": 64,
            "buckets": 1 << 18,
            "idf": False,
            "residual": True,
            "feature_dropout": 0.3,
        }
        if encoder != BAG:
            _write_transformer(folder, TRANSFORMERS[encoder], bench.quick)
            section = {"kind": "transformer", "model": folder, "dimension": 64, "bottleneck": True, "compile": compiled}
        recipe = Recipe.model_validate(
            {
                "encoder": section,
                "classifier": {"dtype": "bfloat16", "lr": 0.01, **classifier},
                "negatives": {"pool": "own", "random": RANDOM, "hard": HARD},
            }
        )
        model = Model.build(recipe, VOCABULARY, labels, device=bench.device)
    planner = Planner(recipe.negatives, labels, merges=not merges_on(bench.device, recipe))
    return StepContext(model, planner, WholeBatch(model.encoder, ALONE, Clock().lap))


def open_steps(bench: Bench, context: StepContext, labels: int, planned: bool = True) -> Callable[[], object]:
    """Return a step on the next of some batches; candidates are `planned` beforehand or in the step.

    The step does not read losses, as in training between two lines of the log.
    """
    size = 16 if bench.quick else B
    batches = [random_batch(size, labels, step, TOKENS, VOCABULARY) for step in range(BATCHES)]
    if planned:
        batches = [replace(batch, candidates=plan_ahead(bench, batch, labels, "own")) for batch in batches]
    else:
        batches = [replace(batch, hard=None) for batch in batches]
    if (prepare := context.queries.preparing()) is not None:  # done by the stream's threads, not in the step
        batches = [replace(batch, prepared=prepare(batch)) for batch in batches]
    number = 0

    def step() -> None:
        nonlocal number
        take_step(context, batches[number % BATCHES], number, 1.0)
        number += 1

    return step


def _write_transformer(folder: str, hidden: int, quick: bool) -> None:
    from transformers import BertConfig, BertModel

    shape: dict[str, Any] = {
        "hidden_size": 32 if quick else hidden,
        "num_hidden_layers": 2 if quick else 6,
        "num_attention_heads": max(2, hidden // 64) if not quick else 2,
        "intermediate_size": 64 if quick else 4 * hidden,
    }
    BertModel(BertConfig(vocab_size=VOCABULARY, **shape)).save_pretrained(folder)
