"""The training loop: start or resume a run, and run the epochs one after another."""

import json
from collections.abc import Generator
from typing import Any

import torch

from schemas import storage
from schemas.cores import cores
from schemas.errors import InputError, StorageError
from schemas.layout import DataLayout, RunLayout
from schemas.owners.claim import Claim, Unclaimed
from schemas.table import Table
from schemas.waits import Say
from trainer.checkpoints.checkpoint import latest_checkpoint
from trainer.config.load import changed_versions, dump_config, load_config, validate
from trainer.device import denormals_flushed
from trainer.epoch import EpochRunner, OnStep
from trainer.evaluation.split import trained_frequency
from trainer.group import ALONE, Group
from trainer.methods.recipe import Recipe
from trainer.model import require_same_data
from trainer.progress import NEGATIVES, EpochReport, Progress
from trainer.refresh.adoption import discard_refreshes
from trainer.setup import RunContext, initialise_model, require_room_for_run, require_same_recipe, set_up
from trainer.tracking.tracker import Listener


class Trainer:
    """One rank of a run, which trains a recipe on DATA and writes RUN. Every rank calls `start` or `resume`.

    Only rank 0 decides and reports. Rank 0 also holds the `claim` on RUN, if a claim is given; without a claim,
    no other process may write to RUN.
    """

    def __init__(
        self, context: RunContext, progress: Progress | None = None, mix: list[list[Any]] | None = None
    ) -> None:
        self.context, self.recipe, self.run = context, context.recipe, context.run
        self.model, self.stream = context.model, context.stream
        self.progress = progress or Progress()
        self.runner = EpochRunner(context, self.progress, mix)

    @classmethod
    def start(
        cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE, claim: Claim | None = None
    ) -> "Trainer":
        """Start a new run. Raises InputError if RUN already contains a run, TableError if DATA is not finished."""
        layout = RunLayout(run)
        if group.decide(lambda: storage.exists(layout.config)):
            raise InputError(f"{run}: a run exists here already. Continue it with --resume, or choose another RUN.")
        threads = group.decide(lambda: min(torch.get_num_threads(), cores()))
        context = set_up(DataLayout(data), layout, recipe, say, group, claim or Unclaimed(), threads)
        require_room_for_run(context)
        initialise_model(context)
        if group.first and not (recipe.data.mix or recipe.data.label_texts):
            unused = int((trained_frequency(context.data, recipe.data) == 0).sum())
            if unused:
                context.say(f"{unused:,} of {context.labels:,} labels have no row that this run trains on")
        context.tracker.start(0)
        _write_config(context)
        context.dump_writer.dump_first(context.sources, context.model)
        return cls(context)

    @classmethod
    def resume(
        cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE, claim: Claim | None = None
    ) -> "Trainer":
        """Continue with the run at RUN from its newest checkpoint, on any number of ranks.

        Without a checkpoint the run starts again, and may have a different recipe. With a checkpoint, only the mix of
        sources may differ; the new mix applies from the next epoch on. Raises InputError if RUN was trained on
        different data or with a different recipe; TableError.
        """
        layout = RunLayout(run)
        config = load_config(layout.config)
        require_same_data(config, Table.open(data, "data").manifest, data, run)
        started = validate(config["recipe"], layout.config)
        checkpoint = group.decide(lambda: latest_checkpoint(layout))
        if checkpoint is not None:
            require_same_recipe(started, recipe, run)
        threads = config.get("machine", {}).get("threads", 0)
        context = set_up(DataLayout(data), layout, recipe, say, group, claim or Unclaimed(), threads)
        if checkpoint is None:
            initialise_model(context)
            progress = Progress()
            if started != recipe:
                if group.first:
                    context.claim.require()
                    discard_refreshes(layout)
                _write_config(context)
                group.barrier()
            context.dump_writer.dump_first(context.sources, context.model)
            mix = None
        else:
            context.model.load(checkpoint, optimizer=True)
            if changed := changed_versions(config):
                context.say(f"{run}: {changed}; results may differ in the last digits or more")
            if checkpoint.has(NEGATIVES):
                context.step.negative_sources.load(
                    {name: value.numpy() for name, value in checkpoint.tensors(NEGATIVES).items()}
                )
            progress, mix = Progress.of(checkpoint.state["progress"]), checkpoint.state["stream"].get("mix")
            if started.data != recipe.data:
                context.claim.require()
                _write_config(context)
                context.say(f"the mix of sources changes from epoch {progress.epoch + bool(progress.step)} on")
        context.tracker.start(progress.global_step)
        return cls(context, progress, mix)

    def on_record(self, listener: Listener) -> None:
        """Also pass all later records to `listener`."""
        self.context.tracker.watch(listener)

    def train(self, on_step: OnStep | None = None) -> Generator[EpochReport]:
        """Run the remaining epochs, and yield a report of each; call `on_step(global step, total, loss)` every step."""
        writer, is_finished = self.context.writer, False
        try:
            while self.progress.epoch < self.runner.epochs:
                with denormals_flushed():
                    report = self.runner.run(on_step)
                yield report
            writer.wait()
            finished = {"step": self.progress.global_step, "epochs": self.runner.epochs}
            if self.context.group.first:
                self.context.claim.require()
                storage.write_bytes(self.run.finished, json.dumps(finished).encode())
            is_finished = True
        except StorageError:
            storage.cleaning_up.set()
            raise
        finally:
            self.context.tracker.close(is_finished)
            writer.close()


def _write_config(context: RunContext) -> None:
    made_from = {"digest": context.manifest.digest, "labels": context.labels, "queries": context.sources[0].rows}
    if context.group.first:
        machine = {"threads": torch.get_num_threads()}
        storage.write_bytes(context.run.config, dump_config(context.recipe, data=made_from, machine=machine))
