"""Rehearsal stages of one trainer rank. The stages run the trainer's own code, with simulated peers."""

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.rehearsal import synthetic_tables
from benchmarks.rehearsal.faked_ranks import FakedRanks, Operators
from benchmarks.rehearsal.stage import Stage, Task, size_of
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Shard, publish
from schemas.owners import Unclaimed
from schemas.process import peak_bytes
from schemas.table import Table
from schemas.waits import waiting
from trainer.checkpoints import latest_checkpoint
from trainer.device import open_device
from trainer.group import ALONE, Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.methods.sections import LEAD
from trainer.recipe_files import dump_config
from trainer.refresh.dump import dump_is_published
from trainer.setup import initialise_model, open_stream, set_up
from trainer.step import GlobalBatches
from trainer.stream import JoinedStream, Source

WARM_UP_STEPS = 10  # warm-up steps that are not counted: code is compiled, memory is allocated
_EMBEDDED_ROWS = 1 << 14  # rows whose embeddings represent all embeddings of a dump


def make_tables(task: Task) -> list[Stage]:
    """Write DATA, and the tables of negatives for the first epoch that uses tables."""
    data, run, epoch = DataLayout(f"{task.folder}/data"), _run(task), first_epoch(task.recipe)
    synthetic_tables.write_data(data.root, task.sizes)
    places = {"queries": data.queries("train"), **({"labels": data.labels} if task.recipe.data.label_texts else {})}
    for name, url in places.items() if epoch else ():
        synthetic_tables.write_negatives(run.negatives(epoch, name), Table.open(url), task.sizes)
    return []


def train(task: Task) -> list[Stage]:
    """Run the stages of a rank on the tables that `make_tables` has written."""
    recipe, note = _standalone_recipe(task.recipe)
    group = FakedRanks(task.rank, task.ranks) if task.ranks > 1 else ALONE
    rank = _Rank(task, recipe, group, note)
    try:
        return [*rank.start(), *rank.steps(), *rank.stream(), *rank.plan(), *rank.dump(), *rank.resume()]
    finally:
        group.close()


def first_epoch(recipe: Recipe) -> int:
    """Return the first epoch that uses hard negatives from tables; 0 if there is no such epoch."""
    return next(iter(recipe.table_epochs()), 0)


def _run(task: Task) -> RunLayout:
    return RunLayout(f"{task.folder}/run")


def _standalone_recipe(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe without settings that need other runs, services, splits or a missing GPU, and a note on it."""
    train, note = {"start_from": "", "encoder_from": "", "minutes": 0.0}, ""
    try:
        open_device(recipe.train.device)
    except InputError:
        train["device"], note = "cpu", f"on this CPU; the time on {recipe.train.device} was not measured"
    sections: dict[str, dict[str, Any]] = {
        "logging": {"tensorboard": False, "wandb": "", "mlflow": ""},
        "validation": {"split": ""},
        "data": {"holdout": 0.0, "share": 1.0},
        "train": train,
    }
    return recipe.model_copy(update={n: getattr(recipe, n).model_copy(update=u) for n, u in sections.items()}), note


class _EnoughStepsError(Exception):
    pass


@dataclass
class _Rank:
    """A rank during the rehearsal. Call `start` first and `resume` last."""

    task: Task
    recipe: Recipe
    group: Group
    note: str
    tables: list[Source] = field(default_factory=list)

    def start(self) -> Iterator[Stage]:
        """Build the model, and start to use the existing table."""
        recipe, run, began = self.recipe, _run(self.task), time.perf_counter()
        context = set_up(
            DataLayout(f"{self.task.folder}/data"), run, recipe, lambda line: None, self.group, Unclaimed()
        )
        initialise_model(context)
        made_from = {
            "digest": context.sizes.manifest.digest,
            "labels": context.labels,
            "queries": context.sources[0].rows,
        }
        storage.write_bytes(run.config, dump_config(recipe, data=made_from))
        yield Stage("train", "start", time.perf_counter() - began)
        self.trainer, began = Trainer(context), time.perf_counter()
        self.trainer.progress.epoch = first_epoch(recipe)
        _, self.tables = self.trainer.adopt()
        yield Stage("train", "adoption", time.perf_counter() - began)

    def in_line(self) -> JoinedStream:
        """Return the epoch's stream without additional threads."""
        order = self.recipe.order.model_copy(update={"threads": 0})
        recipe = self.recipe.model_copy(update={"order": order})
        stream = open_stream(recipe, self.tables, self.trainer.context.labels, self.group)
        stream.set_epoch(first_epoch(recipe))
        return stream

    def stream(self) -> Iterator[Stage]:
        """Read, decode and deal whole windows."""
        stream, rows, steps, began = self.in_line(), 0, 0, time.perf_counter()
        for steps, batch in enumerate(stream, 1):
            rows += len(batch)
            if steps % stream.order.steps_per_window == 0 and time.perf_counter() - began > self.task.seconds / 20:
                break
        seconds, tables = time.perf_counter() - began, [at for t in self.tables for at in (t.table, t.negatives) if at]
        a_row = sum(shard.bytes for at in tables for shard in at.shards) / stream.rows
        yield Stage("train", "stream", seconds / steps, storage=a_row * rows / steps, note=f"{rows:,} rows")

    def plan(self) -> Iterator[Stage]:
        """Plan the candidates for global batches, if planning does not need the model."""
        spent, planner = [0.0], self.trainer.context.step.planner
        if not self.trainer.context.batches.plans:
            return
        for batch in GlobalBatches(self.in_line(), planner, self.group, 0):
            began = time.perf_counter()
            planner(batch.gathered)
            spent.append(time.perf_counter() - began)
            if len(spent) > 2 * WARM_UP_STEPS and sum(spent) > self.task.seconds / 40:
                break
        yield Stage("train", "plan", float(np.mean(spent[len(spent) // 4 :])), note=f"{len(spent) - 1:,} steps")

    def steps(self) -> Iterator[Stage]:
        """Train for some steps with the same threads as in a run, and write a checkpoint."""
        trainer, times, sent, operators, saved = self.trainer, [0.0], [(0.0, 0)], Operators(), 0.0
        until = time.perf_counter() + self.task.seconds / 4

        def on_step(step: int, total: int, loss: float) -> None:
            nonlocal saved
            times.append(time.perf_counter())
            sent.append((self.group.sent, self.group.messages) if isinstance(self.group, FakedRanks) else (0.0, 0))
            if len(times) in (3, 4):  # before and after one step
                operators.__enter__() if len(times) == 3 else operators.__exit__(None, None, None)
            if (len(times) > 3 * WARM_UP_STEPS and times[-1] > until) or trainer.progress.step == trainer.stream.steps:
                trainer.save()
                trainer.context.writer.wait()
                saved = time.perf_counter() - times[-1]
                raise _EnoughStepsError

        trainer.context.tracker.start(0)
        with contextlib.suppress(_EnoughStepsError):
            next(trainer.train(on_step))
        first, memory = min(WARM_UP_STEPS, len(times) // 2), peak_bytes()
        seconds = float(np.diff(times[first:]).mean())
        network, messages = np.median(np.diff(sent[first:], axis=0), axis=0).tolist()
        note = "; ".join(filter(None, [f"{len(times) - first - 1:,}, of {operators.count} operators", self.note]))
        yield Stage("train", "step", seconds, memory, network=network or None, messages=messages, note=note)
        yield Stage("train", "checkpoint", saved, storage=size_of(_run(self.task).checkpoints))

    def dump(self) -> Iterator[Stage]:
        """Write a dump with the rank's vectors and embeddings; only part of the embeddings if there is little time."""
        if not (epoch := first_epoch(self.recipe)):
            return
        epoch, run, context, ranks = epoch - LEAD, _run(self.task), self.trainer.context, self.task.ranks
        sources = [_first_shards(source, self.task.dump_share) for source in self.tables]
        dump = context.dump_writer.dump(epoch, 0, sources, context.model.width)
        assert dump is not None
        few = itertools.islice(self.in_line(), max(1, _EMBEDDED_ROWS * ranks // self.recipe.order.batch))
        embedded = [context.model.embed(batch.inputs) for batch in few]
        rows, margin = sum(source.rows for source in sources), synthetic_tables.LINKED_ROWS  # ranks get whole shards
        low = max(0, rows * self.task.rank // ranks - margin)
        high = min(rows, rows * (self.task.rank + 1) // ranks + margin)
        for x in itertools.cycle(embedded):
            dump.add(np.arange(low, low + len(x)), x)
            if (low := low + len(x)) >= high:
                break
        if context.model.head.has_rows:
            vectors, steps = context.model.head.vectors, (epoch + 1) * self.trainer.stream.steps
            draw = np.random.default_rng(epoch)
            # Zeros take no space: rows that no step trains before the dump stay zero.
            unmet = 1 - vectors.any(1).float().mean().item()
            kept = unmet ** (steps / self.trainer.progress.step - 1) if unmet else 0.0
            for some in vectors.split(1 << 16):
                met = np.flatnonzero(~some.any(1).numpy() & (draw.random(len(some)) >= kept))
                some[met] = some[met].normal_()
        began = time.perf_counter()
        context.dump_writer.publish(dump, context.model, self.trainer.progress.global_step)
        for _ in waiting("a dump to be written", until="the dump exists"):
            if dump_is_published(run, epoch):
                break
        seconds, size = time.perf_counter() - began, size_of(run.dump(epoch))
        done = rows / sum(source.rows for source in self.tables)
        times = 1 + (size - size_of(run.vectors(epoch))) * (1 / done - 1) / size
        note = f"{done:.0%} of its embeddings" if done < 1 else ""
        yield Stage("train", "dump", seconds * times, storage=size * times, note=note)

    def resume(self) -> Iterator[Stage]:
        """Resume from the checkpoint in a new trainer. The files of lower ranks are listed but not read."""
        checkpoint, first = latest_checkpoint(_run(self.task)), self.trainer.model.head.start
        assert checkpoint is not None
        own = checkpoint.table.shards
        peers = Shard(path="vectors-of-peers", rows=first, bytes=0, sha256="0" * 64)
        shards = (*(each for each in own if not each.rows), peers, *(each for each in own if each.rows))
        publish(checkpoint.table.url, checkpoint.table.manifest.model_copy(update={"shards": shards}))
        del self.trainer
        gc.collect()
        began, data = time.perf_counter(), f"{self.task.folder}/data"
        trainer = Trainer.resume(data, _run(self.task).root, self.recipe, lambda line: None, self.group)
        seconds = time.perf_counter() - began
        trainer.context.tracker.close(False)
        yield Stage("train", "resume", seconds, storage=sum(each.bytes for each in own))


def _first_shards(source: Source, part: float) -> Source:
    """Return the first shards of a source, without negatives."""
    manifest = source.table.manifest
    shards = manifest.shards[: max(1, round(part * len(manifest.shards)))]
    rows = sum(shard.rows for shard in shards)
    update = {"shards": shards, "rows": rows, "id_range": (0, rows)}
    return replace(source, table=Table(source.table.url, manifest.model_copy(update=update)), negatives=None)
