"""A run with 100M labels on one machine: 200 steps, a checkpoint, a dump, a mined table for a sample, a resume.

The data is synthetic: queries of random words with 10 random labels each, and a table of 100M labels that nothing reads
into memory. D = 64, bfloat16, row-wise Adagrad, 400 random negatives of each query's own (460 with the mined ones that
come later). Each stage is a process of its own, whose memory is sampled: shared pages count once, and pages of mapped
files, which the system takes back when it needs them, apart. At 100M labels: about 40 GiB of disk under --folder and
16 GiB of memory.

    python -m benchmarks.hundred_million [--quick] [--labels L] [--folder DIR] [--storage memory|DIR]
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common.process_memory import measure
from benchmarks.common.report import report
from schemas import arrow
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, Shard, columns_of, open_manifest, publish
from schemas.shard_files.parquet import list_array, writing_shard
from trainer.config import Recipe
from trainer.loop import Trainer

LABELS, QUICK_LABELS = 100_000_000, 1_000_000
B, D, STEPS, AFTER = 512, 64, 200, 10
POSITIVES, HARD, RANDOM = 10, 50, 400
SAMPLE = 2048
VOCABULARY, WORDS = 30_000, 12
SHARD_ROWS, GROUP_ROWS = 1 << 23, 1 << 17  # of the labels table
LIMIT_GIB = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1M labels")
    parser.add_argument("--labels", type=int)
    parser.add_argument("--folder", help="where everything is written; default: a temporary folder, removed at the end")
    parser.add_argument("--storage", default="memory", help="classifier.storage")
    parser.add_argument("--memory", default="6GiB", help="what mining may use")
    parser.add_argument("--stage", choices=["train", "resume"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    labels = arguments.labels or (QUICK_LABELS if arguments.quick else LABELS)
    if arguments.stage:
        _stage(arguments.stage, Path(arguments.folder), arguments.storage)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        _run(Path(folder), labels, arguments.storage, arguments.memory)


def recipe(storage: str) -> Recipe:
    """One epoch of 200 steps leaves a dump for a table; there are two more."""
    return Recipe.model_validate(
        {
            "method": "astra",
            "encoder": {"dimension": D, "ngrams": 1, "idf": False, "optimizer": "adagrad", "lr": 0.05},
            "classifier": {"dtype": "bfloat16", "storage": storage, "lr": 0.05},
            "negatives": {"pool": "own", "random": RANDOM, "hard": HARD},
            "order": {"batch": B},
            "refresh": {"start": 2, "every": 1},
            "train": {"epochs": 3},
            "checkpoint": {"keep": 1},
            "logging": {"tensorboard": False},
        }
    )


def _run(folder: Path, labels: int, storage: str, memory: str) -> None:
    data, run, sample = str(folder / "data"), str(folder / "run"), str(folder / "sample")
    stages: dict[str, dict[str, Any]] = {}
    began = time.perf_counter()
    _write(DataLayout(data), labels)
    stages["write data"] = {"seconds": round(time.perf_counter() - began, 1), "GiB on disk": _disk(Path(data))}
    stage = [
        sys.executable,
        "-m",
        "benchmarks.hundred_million",
        "--folder",
        str(folder),
        "--storage",
        storage,
        "--stage",
    ]
    extremis = [sys.executable, "-m", "extremis"]
    commands = {
        "train": [*stage, "train"],
        "embed": [*extremis, "embed", data, run, sample, "--split", "sample", "--json"],
        "mine": [*extremis, "mine", data, run, "--queries", sample, "--out", str(folder / "table")],
        "resume": [*stage, "resume"],
    }
    commands["mine"] += ["--for-epoch", "2", "--memory", memory, "--json"]
    for name, command in commands.items():
        done = measure(command)
        if done.status:
            sys.exit(f"{' '.join(command)}: status {done.status}")
        stages[name] = {
            "seconds": round(done.seconds, 1),
            "peak GiB": _gib(done.peak_bytes),
            "peak GiB without pages of files": _gib(max((sample[2] for sample in done.samples), default=0)),
            **(json.loads(done.output.splitlines()[-1]) if name in ("train", "resume") else {}),
        }
        sys.stderr.write(f"{name}: {json.dumps(stages[name])}\n")
    table = open_manifest(str(folder / "table" / "queries"), "negatives")
    peak = max(stage.get("peak GiB without pages of files", 0.0) for stage in stages.values())
    report(
        f"{labels:,} labels train, are dumped, mined and resumed within {LIMIT_GIB} GiB of memory",
        {
            "labels": labels,
            "dimension": D,
            "vectors GiB": _gib(labels * D * 2),
            "checkpoint GiB": _disk(Path(RunLayout(run).checkpoints)),
            "dump GiB": _disk(Path(RunLayout(run).dumps)),
            "mined": {"queries": table.rows, "index": table.parameters["index"], "quality": table.quality},
            "stages": stages,
        },
        {"peak GiB": peak, "resumed at step": float(stages["resume"]["first step"])},
        {"peak GiB": f"<{LIMIT_GIB}", "resumed at step": float(STEPS)},
    )


def _stage(name: str, folder: Path, storage: str) -> None:
    """Train one epoch, or continue for a few steps; print the times as the last line."""
    data, run, options = str(folder / "data"), str(folder / "run"), recipe(storage)
    began = time.perf_counter()
    open_run = Trainer.start if name == "train" else Trainer.resume
    trainer = open_run(data, run, options, lambda line: None)
    opened = time.perf_counter() - began
    first, times, losses = trainer.progress.global_step, [time.perf_counter()], []

    def on_step(step: int, total: int, loss: float) -> None:
        times.append(time.perf_counter())
        losses.append(loss)
        if name == "resume" and len(losses) == AFTER:
            raise _Enough

    epochs = trainer.train(on_step)
    with contextlib.suppress(_Enough):
        next(epochs)
    dumped = time.perf_counter()
    epochs.close()  # waits for the dump and the checkpoint, which are written in the background
    written = time.perf_counter()
    steps = np.diff(times)
    result: dict[str, Any] = {
        "seconds to open": round(opened, 1),
        "first step": first,
        "steps": len(losses),
        "ms a step, median": round(float(np.median(steps)) * 1e3, 1),
        "ms a step, slowest": round(float(steps.max()) * 1e3, 1),
        "loss, first and last": [round(losses[0], 2), round(losses[-1], 2)],
    }
    if name == "train":
        result["seconds at the epoch's end"] = round(dumped - times[-1], 1)
        result["seconds to write dump and checkpoint, behind it"] = round(written - dumped, 1)
    sys.stdout.write(json.dumps(result) + "\n")


class _Enough(Exception):
    pass


def _write(data: DataLayout, labels: int) -> None:
    """Publish queries, labels and a tokenizer's facts."""
    kind = arrow.label_type(labels)
    tokenizer = publish(data.tokenizer, Manifest(kind="tokenizer", parameters={"vocabulary": VOCABULARY}))
    parents = {"tokenizer": tokenizer.digest}
    schema = arrow.queries(arrow.token_type(VOCABULARY), kind)
    for seed, (split, rows) in enumerate({"train": STEPS * B, "sample": SAMPLE}.items()):
        draw = np.random.default_rng(seed)
        with writing_shard(data.queries(split), 0, 1, schema, 8192) as shard:
            shard.write(_queries(draw, rows, labels, schema))
        manifest = _publish(data.queries(split), "queries", schema, [shard.entry], 8192, dict(parents))
        parents[f"queries/{split}"] = manifest.digest
    parents["labels"] = _write_labels(data, labels).digest
    publish(data.root, Manifest(kind="data", parents=parents))


def _queries(draw: np.random.Generator, rows: int, labels: int, schema: pa.Schema) -> pa.Table:
    words = np.exp(draw.random(rows * WORDS) * np.log(VOCABULARY)).astype(np.uint16) - 1
    # Sorted draws with 0, 1, 2, ... added are distinct.
    positives = np.sort(draw.integers(0, labels - POSITIVES, (rows, POSITIVES)), axis=1) + np.arange(POSITIVES)
    columns = [
        pa.array(np.arange(rows)),
        pa.array(np.char.mod("q%d", np.arange(rows))),
        list_array(words, np.arange(rows + 1) * WORDS, schema.field("input_ids").type.value_type),
        list_array(positives.reshape(-1), np.arange(rows + 1) * POSITIVES, schema.field("label_ids").type.value_type),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _write_labels(data: DataLayout, labels: int) -> Manifest:
    """Labels named by their number, without a text, a row group at a time."""
    schema = arrow.labels(arrow.token_type(VOCABULARY))
    shards = []
    starts = range(0, labels, SHARD_ROWS)
    for index, start in zip(count(), starts, strict=False):
        with writing_shard(data.labels, index, len(starts), schema, GROUP_ROWS) as shard:
            for low in range(start, min(start + SHARD_ROWS, labels), GROUP_ROWS):
                ids = np.arange(low, min(low + GROUP_ROWS, start + SHARD_ROWS, labels))
                empty = pa.array([""] * len(ids))
                none = list_array(np.empty(0, np.uint16), np.zeros(len(ids) + 1, int), pa.uint16())
                names = pa.array(ids).cast(pa.string())
                columns = [pa.array(ids), names, empty, none, pa.array(np.ones(len(ids), np.int64))]
                shard.write(pa.Table.from_arrays(columns, schema=schema))
        shards.append(shard.entry)
    return _publish(data.labels, "labels", schema, shards, GROUP_ROWS, {}, {"training_points": STEPS * B})


def _publish(
    url: str,
    kind: str,
    schema: pa.Schema,
    shards: list[Shard],
    group: int,
    parents: dict[str, str],
    parameters: dict[str, Any] | None = None,
) -> Manifest:
    rows = sum(shard.rows for shard in shards)
    manifest = Manifest(
        kind=kind,
        columns=columns_of(schema),
        shards=tuple(shards),
        rows=rows,
        row_group_rows=group,
        id_range=(0, rows),
        parents=parents,
        parameters=parameters or {},
    )
    return publish(url, manifest)


def _disk(folder: Path) -> float:
    return _gib(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


def _gib(size: float) -> float:
    return round(size / 2**30, 3)


if __name__ == "__main__":
    main()
