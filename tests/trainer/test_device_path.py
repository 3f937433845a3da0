"""What a device does, done by a CPU: runs are the same to rounding as those of the compiled loops.

All that asks whether a tensor is on a CPU is told that it is not: candidates are packed and copied, rows are gathered,
scored and updated by the reference of the kernels, losses and embeddings are read behind the step.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.device
import trainer.encoders.bag_encoder  # which recipes name, and load late
from schemas.layout import RunLayout
from tests.bert import write_bert
from tests.builders import SmallData, build_data
from tests.training import Killed, silent, train, with_sections
from trainer.loop import Trainer
from trainer.model import load_model

BASE: dict[str, Any] = {
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 8, "buckets": 64, "feature_dropout": 0.2, "dropout": 0.1, "residual": True, "lr": 0.01},
    "classifier": {"bias": True, "initial_scale": 0.3},
    "negatives": {"random": 12},
    "train": {"epochs": 5, "threads": 1, "clip": 5.0},
    "checkpoint": {"every_steps": 7},
    "refresh": {"start": 2, "every": 1},
    "logging": {"every_steps": 3, "tensorboard": False},
}
LABELS = {"method": "dexml", "head": {"label_batch": 7}}
KINDS: dict[str, dict[str, Any]] = {
    "own pools": {"negatives": {"pool": "own"}},
    "shared pool": {"negatives": {"pool": "shared"}},
    "full one-vs-all": {"method": "renee", "negatives": {"chunk": 7}},
    "bfloat16": {"negatives": {"pool": "own"}, "classifier": {"dtype": "bfloat16"}},
    "adam": {"negatives": {"pool": "own"}, "classifier": {"optimizer": "adam", "lr": 0.01}},
    "vectors of length 1": {
        "negatives": {"pool": "own"},
        "classifier": {"normalize": True, "initial_scale": 1.0, "bias": False},
    },
    "of length 1, with the own index": {
        "negatives": {"pool": "own", "hard": 3},
        "refresh": {"source": "in-trainer", "start": 0},
        "classifier": {"normalize": True, "initial_scale": 1.0, "bias": False},
    },
    "weights": {"negatives": {"pool": "own", "frequency_share": 0.5}, "train": {"positive_weight": 0.5}},
    "parts": {"negatives": {"pool": "own"}, "train": {"accumulate": 3}},
    "tables": {"negatives": {"pool": "own", "hard": 3}},
    "own index": {"negatives": {"pool": "own", "hard": 3}, "refresh": {"source": "in-trainer", "start": 0}},
    "hash tables": {"method": "lns", "negatives": {"pool": "own", "lsh": {"hard": 3}}},
    **{loss: {"loss": {"kind": loss}} for loss in ("softmax", "infonce", "decoupled", "softtopk", "triplet")},
    "vectors on the host": {"negatives": {"pool": "own"}, "classifier": {"storage": "host"}},
    "on the host, in chunks": {
        "method": "renee",
        "negatives": {"chunk": 7},
        "classifier": {"storage": "host", "dtype": "bfloat16", "optimizer": "adam", "lr": 0.01},
    },
    "on the host, softmax": {"loss": {"kind": "softmax"}, "classifier": {"storage": "host"}},
    "encoded labels": {**LABELS, "loss": {"kind": "decoupled"}, "negatives": {"pool": "all"}},
    "encoded in the batch": {**LABELS, "loss": {"kind": "triplet"}, "negatives": {"pool": "batch"}},
}


# Of those with a path of their own to the device; the others are slow.
FEW = (
    *("own pools", "shared pool", "bfloat16", "parts", "tables", "own index", "hash tables", "decoupled"),
    *("vectors on the host", "on the host, in chunks", "encoded labels", "encoded in the batch"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("device") / "data"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for another device, without kernels of its own, wherever it is asked for."""
    monkeypatch.setenv("EXTREMIS_KERNELS", "reference")
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("trainer.")
            and module is not trainer.device
            and getattr(module, "CPU", None) is trainer.device.CPU
        ):
            monkeypatch.setattr(module, "CPU", None)


def run(data: SmallData, place: Path, sections: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; return the loss of each epoch, and what the run has learnt."""
    started = Trainer.start(data.layout.root, str(place), with_sections(BASE, sections), silent)
    losses = [report.loss for report in started.train()]
    return losses, {**started.model.head.rows(), **started.model.encoder.tensors()}


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_run_on_a_device_is_that_of_a_cpu(
    kind: str, data: SmallData, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected, rows = run(data, tmp_path / "host", KINDS[kind])
    request.getfixturevalue("elsewhere")
    losses, others = run(data, tmp_path / "device", KINDS[kind])
    assert losses == pytest.approx(expected, rel=1e-3)
    narrow = KINDS[kind].get("classifier", {}).get("dtype") == "bfloat16"
    close = {"rtol": 0.02, "atol": 0.02} if narrow else {"rtol": 1e-2, "atol": 1e-3}
    for name, value in rows.items():
        torch.testing.assert_close(others[name], value, **close, msg=lambda text, name=name: f"{name}: {text}")


def test_so_is_a_transformers(data: SmallData, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = write_bert(tmp_path / "bert", 50)
    sections = {
        "encoder": {"kind": "transformer", "model": model, "dimension": 8, "bottleneck": True, "dropout": 0.1},
        "train": {"epochs": 2, "threads": 1, "clip": 5.0},
    }
    expected, _ = run(data, tmp_path / "host", sections)
    request.getfixturevalue("elsewhere")
    losses, _ = run(data, tmp_path / "device", sections)
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("storage", ["memory", "host"])
def test_a_run_goes_on_on_another_device(
    storage: str, data: SmallData, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sections = {"negatives": {"pool": "own"}, "refresh": {"start": 9}, "classifier": {"storage": storage}}
    recipe = with_sections(BASE, sections)
    whole = train(Trainer.start(data.layout.root, str(tmp_path / "whole"), recipe, silent))
    place = str(tmp_path / "run")
    with pytest.raises(Killed):
        train(Trainer.start(data.layout.root, place, recipe, silent), stop_after=8)
    request.getfixturevalue("elsewhere")
    said: list[str] = []
    resumed = Trainer.resume(data.layout.root, place, recipe, said.append)
    assert resumed.progress.global_step == 7
    assert any("started with kernels numba, resumed with reference" in line for line in said)
    losses = [report.loss for report in resumed.train()]
    steps = len(whole) // 5
    assert losses[1:] == pytest.approx([sum(whole[e * steps : (e + 1) * steps]) / steps for e in range(2, 5)], rel=1e-3)
    _, model, _ = load_model(data.layout, RunLayout(place))
    assert model.head.vectors.device.type == "cpu"
