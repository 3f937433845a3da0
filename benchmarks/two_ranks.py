"""Two ranks against one on the Tate collection: the same metrics; time and traffic per step against calculations.

One process with one thread, one process with two threads, and two ranks with one thread each train the same recipe on
the same data, each with a miner. Bytes are the kernel's counts for the processes' own TCP connections, step by step.

    python -m benchmarks.two_ranks [--quick] [--epochs N] [--folder DIR]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common.report import report
from extremis.miner import start_miner
from schemas.layout import DataLayout, RunLayout
from trainer.evaluation.evaluate import SplitScorer
from trainer.group import Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.settings.resolve import resolve
from trainer.stream import Batch
from trainer.tracking import read_metrics

RANKS = 2
SIDES = {"one rank": (1, 1), "one rank, two threads": (1, 2), "two ranks": (RANKS, 1)}  # (ranks, threads per rank)
TOLERATED = 1.15  # tolerance over the bytes on paper: sizes, counts, sums of losses, and gloo's own messages
PARTS = ("stream", "gather", "prepare", "encode", "classify", "update", "rest")
SHOWN = ("P@1", "P@5", "PSP@5")
_ACKED, _RECEIVED = slice(120, 128), slice(128, 136)  # offsets in Linux's struct tcp_info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch, random negatives only")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", help="where data and runs go; default: a temporary folder, removed at the end")
    parser.add_argument("--work", nargs=4, metavar=("DATA", "RUN", "EPOCHS", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        data, run, epochs, threads = arguments.work
        work(data, run, recipe_of(int(epochs), data), int(threads))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        compare(Path(folder), 1 if arguments.quick else arguments.epochs)


def recipe_of(epochs: int, data: str) -> Recipe:
    """Return the recipe `astra` with tables from the third epoch on; a run waits for its tables."""
    tables = ("refresh.start=2", "refresh.every=2", "refresh.stale=wait") if epochs > 2 else ("negatives.hard=0",)
    return resolve("astra", (f"train.epochs={epochs}", "logging.tensorboard=false", *tables), data).recipe


def compare(folder: Path, epochs: int) -> None:
    """Shard, train each side, and print the report."""
    data = folder / "data"
    _run([sys.executable, "-m", "extremis", "shard", "examples/tate", str(data), "--propensity", "0.55,1.5"])
    sides = {}
    for name, (ranks, threads) in SIDES.items():
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
        words = [str(data), str(folder / name.replace(" ", "-").replace(",", "")), str(epochs), str(threads)]
        sides[name] = json.loads(_run([sys.executable, "-m", *launcher, "benchmarks.two_ranks", "--work", *words]))
        sys.stderr.write(f"{name}: {sides[name]['ms a step']:.1f} ms a step, P@1 {sides[name]['metrics']['P@1']:.2f}\n")
    alone, several = sides["one rank"], sides["two ranks"]
    low, high = alone["intervals"]["P@1"]
    apart = {
        name: round(max(abs(several["metrics"][name] - side["metrics"][name]) for side in sides.values()), 3)
        for name in SHOWN
    }
    report(
        f"{RANKS} ranks train what one trains, and send what they should on paper",
        {**sides, "points apart": apart, "half of the 95 % interval of P@1": round((high - low) / 2, 2)},
        {
            "P@1 apart / half of its 95 % interval": apart["P@1"] / ((high - low) / 2),
            "bytes sent / on paper": several["bytes sent a step"] / several["bytes sent on paper"]["sum"],
            "one rank's step / two ranks'": alone["ms a step"] / several["ms a step"],
        },
        {"P@1 apart / half of its 95 % interval": "<1", "bytes sent / on paper": f"<{TOLERATED}"},
    )


def work(data: str, run: str, recipe: Recipe, threads: int) -> None:
    """Run one rank: train and count; rank 0 prints the figures."""
    torch.set_num_threads(threads)
    group = Group.of_environment()
    trainer = Trainer.start(data, run, recipe, lambda line: None, group)
    meter = Meter()
    miner = start_miner(data, run, print, ()) if group.first and recipe.table_epochs() else None
    for _ in trainer.train(meter.step):
        pass
    if miner is not None:
        miner.stop()
    scores = SplitScorer.open(DataLayout(data), trainer.model, "test", group).score().report()
    sent, received = meter.a_step()
    paper = on_paper(recipe, group, trainer)
    if group.first:
        epochs = [record for record in read_metrics(RunLayout(run)) if record["kind"] == "epoch"]
        seconds_of = {part: sum(epoch[f"seconds_{part}"] for epoch in epochs) for part in PARTS}
        steps = trainer.total_steps
        print(
            json.dumps(
                {
                    "ranks": group.ranks,
                    "threads": threads,
                    "steps": steps,
                    "ms a step": round(1000 * sum(seconds_of.values()) / steps, 2),
                    "ms by part": {part: round(1000 * seconds / steps, 2) for part, seconds in seconds_of.items()},
                    "bytes sent a step": sent,
                    "bytes received a step": received,
                    "bytes sent on paper": paper,
                    "metrics": {name: round(scores["metrics"][name], 3) for name in SHOWN},
                    "intervals": {name: [round(end, 2) for end in scores["intervals"][name]] for name in SHOWN},
                }
            )
        )
    group.close()


class Meter:
    """Counts the bytes of this process's TCP connections from step to step."""

    def __init__(self) -> None:
        self._before = tcp_bytes()
        self._steps: list[tuple[int, int]] = []

    def step(self, step: int, total: int, loss: float) -> None:
        counts = tcp_bytes()
        self._steps.append((counts[0] - self._before[0], counts[1] - self._before[1]))
        self._before = counts

    def a_step(self) -> tuple[int, int]:
        """Return the medians of (sent, received), which exclude bytes sent once per epoch."""
        return tuple(int(statistics.median(column)) for column in zip(*self._steps, strict=True))  # type: ignore[return-value]


def tcp_bytes() -> tuple[int, int]:
    """Return bytes (acknowledged, received) over all open TCP connections of this process."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    sent += int.from_bytes(info[_ACKED], sys.byteorder)
                    received += int.from_bytes(info[_RECEIVED], sys.byteorder)
        except OSError:  # the connection was closed in the meantime
            continue
    return sent, received


def on_paper(recipe: Recipe, group: Group, trainer: Trainer) -> dict[str, int]:
    """Return the bytes that a rank must send per step, by kind (docs/ranks.md), for G ranks with b = B/G rows each."""
    ranks, batch = group.ranks, recipe.order.batch
    rows, others = batch // ranks, ranks - 1
    dimension, columns = recipe.encoder.dimension, trainer.model.head.vectors.shape[1]
    dense = sum(value.numel() for name, value in trainer.model.encoder.tensors().items() if name.startswith("dense."))
    positives, entries = averages(trainer)
    hard = recipe.negatives.max_hard
    summed = 2 * others / ranks  # a ring sends each part twice, except the rank's own part
    parts = {
        "row ids, counts, positives": rows * others * (8 + 4 + 4 * positives / ranks),
        "hard negatives": rows * others * (4 + 4 * hard / ranks) * bool(hard),
        "bags": rows * others * (4 + 8 * entries * (1 - recipe.encoder.model_dump().get("feature_dropout", 0.0))),
        "x": rows * others * 4 * columns,
        "gradient on x": rows * others * 4 * columns,
        "gradient on bags": rows * others * 4 * dimension,
        "gradient of the dense layers": summed * 4 * dense,
    }
    bytes_of = {name: round(value) for name, value in parts.items()}
    return {**bytes_of, "sum": sum(bytes_of.values())}


def averages(trainer: Trainer) -> tuple[float, float]:
    """Return (positives, features of the bag) per row, averaged over some batches."""
    trainer.stream.set_epoch(0)
    batches: list[Batch] = [batch for batch, _ in zip(trainer.stream, range(8), strict=False)]
    rows = sum(len(batch) for batch in batches)
    bags = [trainer.model.encoder.prepare(batch.inputs) for batch in batches]
    return sum(len(batch.positives) for batch in batches) / rows, sum(len(bag.column) for bag in bags) / rows


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


if __name__ == "__main__":
    main()
