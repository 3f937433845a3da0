"""Tate from shards to P@1: the recipe `astra` with hard negatives from the trainer's own index, then evaluation."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.bench import Bench, Measurement, require
from trainer.evaluation.evaluate import SplitScorer
from trainer.loop import Trainer
from trainer.settings.resolve import resolve

OVERRIDES = ("refresh.source=in-trainer", "refresh.index=fresh", "logging.tensorboard=false")
MINUTES = 1.5


def measurements(bench: Bench) -> Iterator[Measurement]:
    yield Measurement("astra", lambda: _train(bench), gib=1, seconds=300)


def _train(bench: Bench) -> dict[str, Any]:
    data = str(bench.data)
    require((bench.data / "queries").is_dir(), f"{data}: no sharded data set. Make it by: make gpu-bundle")
    length = ("train.epochs=1", "encoder.dimension=8", "encoder.buckets=512") if bench.quick else ()
    overrides = (*OVERRIDES, *length, f"train.minutes={MINUTES}", f"train.device={bench.device}")
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as run:
        began = time.perf_counter()
        trainer = Trainer.start(data, run, resolve("astra", overrides, data).recipe, lines.append)
        losses = [report.loss for report in trainer.train()]
        trained = time.perf_counter()
        metrics = SplitScorer.open(trainer.context.data, trainer.model, "test").score().metrics.result()
    return {
        "epochs": len(losses),
        "loss": losses[-1],
        "train_s": trained - began,
        "evaluate_s": time.perf_counter() - trained,
        **{name: metrics[name] for name in ("P@1", "P@5", "PSP@5") if name in metrics},
    }
