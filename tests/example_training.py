"""Trainings of examples/, and which batches each was given; or one rank of such a training under `torchrun`.

    torchrun --nproc-per-node 2 -m tests.example_training EXAMPLE DATA OUT

Each rank writes its record to OUT/rank-0.json: [epoch, step, row ids] of each batch, and a digest of the weights.
"""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.command import ROOT
from trainer.stream import Batch, JoinedStream, ranks_of_environment

# Less said; and two ranks of a CPU.
QUIET: dict[str, dict[str, Any]] = {
    "own_loop": {},
    "hf_trainer": {"disable_tqdm": True, "use_cpu": True},
    "lightning_module": {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "hf_trainer": {"ddp_backend": "gloo"},
    "lightning_module": {"devices": 2, "strategy": "ddp"},
}


@dataclass
class Training:
    """Weights that a training ended with, in the order in which it made them, and the batches that it was given."""

    weights: list[np.ndarray] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


def train(example: str, *arguments: Any, seed: int = 0, **changes: Any) -> Training:
    """Train as `examples/EXAMPLE.py` does, from the random weights of `seed`."""
    spec = importlib.util.spec_from_file_location(example, ROOT / "examples" / f"{example}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    training, deal = Training(), JoinedStream.__iter__

    def record(stream: JoinedStream) -> Iterator[Batch]:
        for batch in deal(stream):
            training.batches.append(batch)
            yield batch

    torch.manual_seed(seed)
    with mock.patch.object(JoinedStream, "__iter__", record):
        model = module.train(*map(str, arguments), **QUIET[example], **changes)
    parts = torch.nn.ModuleList(model) if isinstance(model, tuple) else model
    training.weights = [weight.detach().numpy() for weight in parts.parameters()]
    return training


def main(example: str, data: str, out: str) -> None:
    training = train(example, data, **TWO_RANKS[example])
    weights = hashlib.sha256(b"".join(weight.tobytes() for weight in training.weights)).hexdigest()
    batches = [[batch.epoch, batch.step, batch.rows.tolist()] for batch in training.batches]
    record = Path(out) / f"rank-{ranks_of_environment().rank}.json"
    record.write_text(json.dumps({"weights": weights, "batches": batches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
