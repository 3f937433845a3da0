"""Steps with and without a checkpoint that is written in the background, and the memory of the checkpoint."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.classifier_step import SIZES
from benchmarks.gpu.models import BAG, open_model, open_steps
from schemas.layout import RunLayout
from trainer.checkpoints import CheckpointContents, CheckpointWriter
from trainer.stream.batch import Candidates

STEPS = 20


def measurements(bench: Bench) -> Iterator[Measurement]:
    for name in ("2K",) if bench.quick else ("1.3M", "13M"):
        labels = 2048 if bench.quick else SIZES[name]
        yield Measurement(f"L={name}", partial(_measure, bench, labels), labels * 132 / 2**30 + 1, 90)


def _measure(bench: Bench, labels: int) -> dict[str, Any]:
    steps = STEPS if bench.on_gpu else 3
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(RunLayout(folder))
        context = open_model(bench, BAG, labels)

        def before_change(candidates: Candidates, merged: torch.Tensor | None) -> None:
            if writer.copies_rows:
                writer.before_change(candidates.ids if merged is None else merged)

        step = open_steps(bench, replace(context, before_change=before_change), labels)
        alone = bench.milliseconds(step)
        bench.reset_peak()
        memory = bench.peak_gib()  # before the checkpoint
        head, parts = context.model.head, context.model.checkpoint_tensors()
        begun = bench.seconds(
            lambda: writer.save(CheckpointContents(0, parts, head.rows(), head.start, labels, {}, {}))
        )
        beside = bench.seconds(lambda: [step() for _ in range(steps)]) * 1000 / steps
        is_written = not writer.copies_rows
        written = begun + beside * steps / 1000 + bench.seconds(writer.wait)
        return {
            "ms": alone,
            "ms_while_written": beside,
            "begun_ms": begun * 1000,
            "seconds_written": written,
            "written_before_the_steps_were_done": is_written,
            **({"more_gib": bench.peak_gib() - memory} if bench.on_gpu else {}),
        }
