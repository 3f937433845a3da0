"""Tate from shards to P@1: the recipe `astra` with hard negatives from the trainer's own index, then evaluation."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.place import Measurement, Place, require
from trainer.evaluation.evaluate import SplitScorer
from trainer.loop import Trainer
from trainer.settings.resolve import resolve

OVERRIDES = ("refresh.source=in-trainer", "refresh.index=fresh", "logging.tensorboard=false")
MINUTES = 1.5


def measurements(place: Place) -> Iterator[Measurement]:
    yield Measurement("astra", lambda: _train(place), gib=1, seconds=300)


def _train(place: Place) -> dict[str, Any]:
    data = str(place.data)
    require((place.data / "queries").is_dir(), f"{data}: no sharded data set. Make it by: make gpu-bundle")
    length = ("train.epochs=1", "encoder.dimension=8", "encoder.buckets=512") if place.quick else ()
    overrides = (*OVERRIDES, *length, f"train.minutes={MINUTES}", f"train.device={place.device}")
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
