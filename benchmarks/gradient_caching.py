"""All-label training by gradient caching: peak memory and time of a step against sub-batches and labels.

    python -m benchmarks.gradient_caching            L up to 131,072, a batch of 1,024
    python -m benchmarks.gradient_caching --quick    L up to 32,768, a batch of 256

DEXML's section B.5.1: with sub-batches of eta labels, a step needs memory for the encoder itself, for eta labels within
the encoder, for L x D embeddings (here three matrices: z, its gradient, and the loss's gradient before it is passed
on), and for B x L scores, which `loss.chunk` avoids. Each figure comes from a separate process: a step of a small
transformer with random weights, after a warm-up step with few labels.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.report import report

if TYPE_CHECKING:
    from trainer.inputs import Inputs
    from trainer.stream.batch import Batch

DIMENSION, TOKENS, VOCABULARY = 64, 8, 5_000
QUERY_BATCH = 256
CHUNK = 8_192  # labels scored at a time in the mode without [B, L]
COPIES = 3  # embeddings of size L x D


@dataclass(frozen=True)
class Setting:
    """Sizes to measure: all of `labels` with sub-batches of `size`, and all of `sizes` with the fewest labels."""

    batch: int
    labels: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int = 1_024


FULL = Setting(batch=1_024, labels=(16_384, 32_768, 65_536, 131_072), sizes=(64, 256, 1_024, 4_096))
QUICK = Setting(batch=256, labels=(8_192, 32_768), sizes=(256, 2_048))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(step(**json.loads(arguments.step))))
        return
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as root:
        make_model(root)
        measure(QUICK if arguments.quick else FULL, root)


def measure(setting: Setting, model: str) -> None:
    few, many = setting.labels[0], setting.labels[-1]
    by_size = {str(size): child(model, setting.batch, few, size, 0) for size in setting.sizes}
    whole = child(model, setting.batch, few, few, 0)
    kept = {str(labels): child(model, setting.batch, labels, setting.size, 0) for labels in setting.labels}
    chunked = {str(labels): child(model, setting.batch, labels, setting.size, CHUNK) for labels in setting.labels}
    embeddings = 4 * COPIES * DIMENSION * (many - few)
    scores = 4 * setting.batch * (many - few)
    growth = {
        name: results[str(many)]["bytes"] - results[str(few)]["bytes"]
        for name, results in (("kept", kept), ("chunked", chunked))
    }
    report(
        "with gradient caching a step's memory grows with the labels by their embeddings and scores alone, and without "
        "the scores in chunks",
        {
            **asdict(setting),
            "dimension": DIMENSION,
            "by_size": by_size,
            "without_caching": whole,
            "by_labels": kept,
            "by_labels_in_chunks": chunked,
            "formula_bytes": {"kept": embeddings + scores, "chunked": embeddings},
        },
        {
            "growth_over_formula": growth["kept"] / (embeddings + scores),
            "growth_over_formula_in_chunks": growth["chunked"] / embeddings,
            "memory_without_caching": whole["bytes"] / kept[str(few)]["bytes"],
            "time_over_no_caching": kept[str(few)]["seconds"] / whole["seconds"],
        },
        {"growth_over_formula": "<1.2", "growth_over_formula_in_chunks": "<1.5"},
    )


def child(model: str, batch: int, labels: int, size: int, chunk: int) -> dict[str, float]:
    """Run a step in a separate process."""
    options = {"model": model, "batch": batch, "labels": labels, "size": size, "chunk": chunk}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gradient_caching", "--step", json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(
        f"L = {labels:,}, eta = {size:,}{', in chunks' if chunk else ''}: {result['bytes'] / 2**20:,.0f} MiB, "
        f"{result['seconds']:.1f} s\n"
    )
    return result


def step(model: str, batch: int, labels: int, size: int, chunk: int) -> dict[str, float]:
    """Return the additional peak bytes of a step, and its seconds."""
    from trainer.heads import LabelEncoderHead, SubBatches
    from trainer.methods.recipe import Recipe
    from trainer.model import Model
    from trainer.negatives.planner import Planner
    from trainer.step import StepContext, take_step

    recipe = Recipe.model_validate(
        {
            "encoder": {
                "kind": "transformer",
                "model": model,
                "dimension": DIMENSION,
                "normalize": True,
                "dropout": 0.1,
            },
            "head": {"kind": "label-encoder", "label_batch": size},
            "negatives": {"pool": "all"},
            "loss": {"kind": "decoupled", "temperature": 0.05, "chunk": chunk},
        }
    )
    encoder = recipe.encoder.build(VOCABULARY, 0)
    for warm in (256, labels):
        head = LabelEncoderHead(recipe, encoder, warm, RandomTexts(warm))  # type: ignore[arg-type]
        queries = SubBatches(encoder, -(-batch // QUERY_BATCH))
        context = StepContext(Model(encoder, head), Planner(recipe.negatives, warm), queries)
        rows = random_batch(batch, warm)
        before = reset_peak()
        started = time.perf_counter()
        take_step(context, rows, 0, 1.0)
        seconds = time.perf_counter() - started
    return {"bytes": peak() - before, "seconds": round(seconds, 3)}


class RandomTexts:
    """Texts of L labels, computed from the label, in place of texts on disk."""

    def __init__(self, labels: int) -> None:
        self._labels = labels

    def __len__(self) -> int:
        return self._labels

    def take(self, ids: np.ndarray) -> "Inputs":
        return inputs_of(np.asarray(ids, np.int64))


def random_batch(queries: int, labels: int) -> "Batch":
    """Return queries with two positives each."""
    from trainer.stream.batch import Batch

    draw = np.random.default_rng(0)
    positives = np.sort(draw.integers(0, labels // 2, (queries, 2)) + np.array([0, labels // 2]), axis=1)
    offsets = 2 * np.arange(queries + 1)
    return Batch(0, 0, np.arange(queries), inputs_of(np.arange(queries) + labels), positives.ravel(), offsets)


def inputs_of(ids: np.ndarray) -> "Inputs":
    from schemas.ragged import Ragged
    from trainer.inputs import Inputs

    mixed = (ids[:, None] * 2_654_435_761 + np.arange(TOKENS) * 40_503) >> 7
    return Inputs(Ragged((mixed % VOCABULARY).astype(np.uint16).ravel(), np.arange(len(ids) + 1) * TOKENS))


def make_model(folder: str) -> None:
    """Write a BERT of one layer with random weights."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIMENSION,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * DIMENSION,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)


def reset_peak() -> int:
    """Return the bytes in use now, and start measuring the peak."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the peak bytes since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    with open(f"/proc/{os.getpid()}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


if __name__ == "__main__":
    main()
