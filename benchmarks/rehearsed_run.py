"""A rehearsal against a real run: bytes of each stage within 5 % and seconds within 20 %, on one and two ranks.

All of DATA is made up, for the run and for the rehearsal. Ranks of the run are processes with one thread each, and gloo
joins them. Stages of the run are the steps of an epoch with mined negatives, a dump without other work, a checkpoint, a
resume. A step waits for its messages: the rehearsal adds their number times the seconds of a message between the ranks
of the real run, measured afterwards. Each of two ranks has one processor, and so has the rehearsal of one rank. Rounds
alternate, so that other work affects both sides; the quickest stage of each side counts.

    python -m benchmarks.rehearsed_run [--quick] [--labels L] [--rounds N] [--folder DIR]
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import report
from benchmarks.rehearsal import rank_stages, synthetic_tables
from benchmarks.rehearsal.rehearse import Rehearsal
from benchmarks.rehearsal.stage import Task, size_of
from benchmarks.two_ranks import tcp_bytes
from extremis.planning import Workload
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from schemas.waits import waiting
from trainer.checkpoints import latest_checkpoint
from trainer.group import Group, label_range
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.refresh.dump import dump_is_published

LABELS, QUICK = 1_000_000, 100_000
STAGES = ("step", "checkpoint", "dump", "resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} labels, one round")
    parser.add_argument("--labels", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--folder", help="where data and runs go; default: a temporary folder, removed at the end")
    parser.add_argument("--work", nargs=3, metavar=("KIND", "FOLDER", "LABELS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        kind, folder, labels = arguments.work
        if os.environ["REHEARSED_RANKS"] != "1":
            os.sched_setaffinity(0, {int(os.environ.get("LOCAL_RANK", "0"))})
        found = (rehearsed if kind == "rehearsed" else real)(folder, int(labels))
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(json.dumps(found) + "\n")
        return
    labels = arguments.labels or (QUICK if arguments.quick else LABELS)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        compare(Path(folder), labels, arguments.rounds or (1 if arguments.quick else 3))


def workload(labels: int, ranks: int) -> Workload:
    """Return a workload whose epoch has some 150 steps."""
    recipe = {
        "method": "astra",
        "data": {"label_texts": False},
        "encoder": {"dimension": 64, "buckets": 1 << 18, "lr": 0.05},
        "classifier": {"lr": 0.05},
        "negatives": {"pool": "own", "random": 400, "hard": 50},
        "refresh": {"start": 2, "every": 1},
        "train": {"epochs": 3, "threads": 1},
        "checkpoint": {"every_epochs": 0, "keep": 1},
        "logging": {"tensorboard": False},
    }
    return Workload(80_000, labels, Recipe.model_validate(recipe), tokens=12.0, ranks=ranks)


def task_of(folder: str, labels: int, ranks: int) -> Task:
    """Return the task of rank 0, with the sizes of the made-up DATA of both sides."""
    work = workload(labels, ranks)
    sizes = Rehearsal(work).sizes(work.queries)
    return Task(folder, sizes, 40.0, work.recipe, 0, ranks)


def compare(folder: Path, labels: int, rounds: int) -> None:
    """Write DATA, run and rehearse in turns, and print the report."""
    figures: dict[str, Any] = {"labels": labels, "rounds": rounds}
    ratios: dict[str, float] = {}
    for ranks in (1, 2):
        sides: dict[str, list[dict[str, Any]]] = {"real": [], "rehearsed": []}
        for number in range(rounds):
            for kind, found in sides.items():
                place = folder / f"{kind}-{ranks}-{number}"
                place.mkdir()
                found.append(_run(kind, place, labels, ranks))
                shutil.rmtree(place)
        if ranks > 1:
            for run, rehearsal in zip(*sides.values(), strict=True):
                rehearsal["step"][0] += rehearsal["messages"] * run["a message"]
            figures["milliseconds a message"] = [1000 * run["a message"] for run in sides["real"]]
            figures["messages a step"] = sides["rehearsed"][0]["messages"]
        for stage in STAGES:
            seconds, size = ({k: [f[stage][n] for f in found] for k, found in sides.items()} for n in (0, 1))
            name = f"{stage}, {ranks} rank(s)"
            figures[name] = {"seconds": seconds, "bytes": {k: v[0] for k, v in size.items()}}
            ratios[f"seconds of {name}"] = _apart(*(min(values) for values in seconds.values()))
            if size["real"][0]:
                ratios[f"bytes of {name}"] = _apart(*(values[0] for values in size.values()))
    report(
        "a rehearsal tells each stage's bytes within 5 % and its seconds within 20 %",
        figures,
        ratios,
        {name: "<1.05" if name.startswith("bytes") else "<1.2" for name in ratios},
        ratio="the larger of rehearsed / real and real / rehearsed",
    )


def _run(kind: str, place: Path, labels: int, ranks: int) -> dict[str, Any]:
    if kind == "real":
        task = task_of(str(place), labels, ranks)
        data = DataLayout(f"{place}/data")
        synthetic_tables.write_data(data.root, task.sizes, linked=False)
        table, run = Table.open(data.queries("train")), RunLayout(f"{place}/run")
        synthetic_tables.write_negatives(run.negatives(2, "queries"), table, task.sizes)
    several = kind == "real" and ranks > 1
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if several else []
    command = [sys.executable, "-m", *launcher, "benchmarks.rehearsed_run", "--work", kind, str(place), str(labels)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REHEARSED_RANKS": str(ranks), "TMPDIR": str(place)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    sys.stderr.write(f"{kind}, {ranks} rank(s): {found}\n")
    return found


def rehearsed(folder: str, labels: int) -> dict[str, Any]:
    """Return (seconds, bytes) by stage of a rehearsal of rank 0."""
    task = task_of(folder, labels, int(os.environ["REHEARSED_RANKS"]))
    rank_stages.make_tables(task)
    done = list(rank_stages.train(task))
    stages = {stage.name: (stage.seconds, stage.network or stage.storage) for stage in done}
    return {**stages, "messages": sum(stage.messages for stage in done)}


def real(folder: str, labels: int) -> dict[str, Any]:
    """Return these figures for rank 0 of a real run: three epochs, a dump after the first, a last table, a resume."""
    group = Group.of_environment()
    recipe, run, data = workload(labels, group.ranks).recipe, RunLayout(f"{folder}/run"), f"{folder}/data"
    trainer, times, sent = Trainer.start(data, run.root, recipe, _say_nothing, group), [0.0], [0]

    def on_step(step: int, total: int, loss: float) -> None:
        times.append(time.perf_counter())
        sent.append(tcp_bytes()[0])

    for epoch in trainer.train(on_step):
        steps = trainer.stream.steps
        assert (epoch.adoption.table_epoch is not None) == (epoch.epoch == 2)
        if epoch.epoch == 0:
            for _ in waiting("the dump to be written", until="it is there"):
                if dump_is_published(run, 0):
                    break
            dumped = time.perf_counter() - times[-1]
    saved = time.perf_counter() - times[-1]
    del trainer
    gc.collect()
    began = time.perf_counter()
    Trainer.resume(data, run.root, recipe, _say_nothing, group).context.tracker.close(False)
    resumed = time.perf_counter() - began
    checkpoint, (_, stop) = latest_checkpoint(run), label_range(labels, 0, group.ranks)
    assert checkpoint is not None
    own = sum(each.bytes for each in checkpoint.table.shards if not each.rows or int(each.path[8:20]) < stop)
    last = slice(-steps + rank_stages.WARM_UP_STEPS, None)
    network = float(np.median(np.diff(sent[last]))) if group.ranks > 1 else 0.0
    return {
        "step": (float(np.diff(times[last]).mean()), network),
        "checkpoint": (saved, own),
        "dump": (dumped, size_of(run.dump(0)) / group.ranks),
        "resume": (resumed, own),
        "a message": _message_seconds(group),
    }


def _message_seconds(group: Group, times: int = 200) -> float:
    """Return the seconds of a small message between ranks, averaged over the kinds of messages in a step."""
    few, part = np.zeros(64), torch.zeros(64, 64)
    sizes = [len(part) // group.ranks] * group.ranks
    began = time.perf_counter()
    for _ in range(times):
        group.sum(part[0])
        group.all_gather(part, [len(part)] * group.ranks)
        group.all_to_all([[few]] * group.ranks)  # two messages
        group.reduce_scatter(part, sizes)
    return (time.perf_counter() - began) / (5 * times)


def _say_nothing(line: str) -> None:
    """Ignore lines, so that only figures are printed."""


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


if __name__ == "__main__":
    main()
