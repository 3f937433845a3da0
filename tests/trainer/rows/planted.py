"""Runs on a CPU whose Triton kernels are wrong or do not compile on one rank; run as a program, in the interpreter.

    TRITON_INTERPRET=1 python -m tests.trainer.rows.planted DATA FOLDER

prints one JSON object: for each run, what each rank said and used, and its loss.
"""

import json
import sys
from typing import Any

import triton
import triton.language as tl

from tests.ranks import on_ranks
from trainer.device import CPU
from trainer.group import Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.rows import kernels, triton_kernels
from trainer.tracking import read_metrics

RECIPE: dict[str, Any] = {
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 8, "buckets": 64, "lr": 0.01},
    "classifier": {"dtype": "bfloat16", "initial_scale": 0.3, "optimizer": "adam", "lr": 0.01},
    "negatives": {"random": 5, "pool": "own", "hard": 0},
    "train": {"epochs": 1, "threads": 1},
    "logging": {"tensorboard": False},
}


@triton.jit
def rounds_down(label, key, column, half):  # type: ignore[no-untyped-def]
    return tl.zeros_like(column).to(tl.uint32) + tl.zeros_like(label).to(tl.uint32)


@triton.jit
def does_not_compile(power):  # type: ignore[no-untyped-def]
    return tl.no_such_function(power)


def trained(group: Group, data: str, place: str, plant: str) -> dict[str, Any]:
    """Train on Numba's loops, or on Triton's kernels with a plant on the last rank."""
    if plant != "numba":
        kernels.KERNELS["cpu"] = "triton"
    if group.rank == group.ranks - 1:
        plants = {"wrong": {"_noise": rounds_down}, "not compiled": {"_one_less": does_not_compile}}
        vars(triton_kernels).update(plants.get(plant, {}))
    said: list[str] = []
    trainer = Trainer.start(data, place, Recipe.model_validate(RECIPE), said.append, group)
    (loss,) = [report.loss for report in trainer.train()]
    (recorded,) = [record["kernels"] for record in read_metrics(trainer.run) if record["kind"] == "epoch"]
    odd = [line for line in said if line.startswith("odd: plain PyTorch")]
    return {"said": odd, "used": kernels.name_kernels(CPU), "recorded": recorded, "loss": loss}


if __name__ == "__main__":
    data, folder = sys.argv[1:]
    ranks = {"numba": 1, "right": 1, "wrong": 2, "not compiled": 1}
    print(json.dumps({plant: on_ranks(ranks[plant], trained, data, f"{folder}/{plant}", plant) for plant in ranks}))
