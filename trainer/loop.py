"""The training loop: a run is started or resumed, and its epochs run one after the other."""

import json
from collections.abc import Generator

from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from trainer.checkpoints.checkpoint import latest_checkpoint
from trainer.config import Recipe, dump_config, load_config, restore_recipe
from trainer.device import denormals_flushed
from trainer.epoch import EpochRunner, OnStep
from trainer.group import ALONE, Group
from trainer.model import require_same_data
from trainer.progress import EpochReport, Progress
from trainer.setup import Parts, Say, initialise_model, require_same_recipe, set_up
from trainer.tracking import Watcher


class Trainer:
    """One rank of a run of a recipe on DATA, writing RUN. Build with `start` or `resume`, on every rank of `group`.

    Rank 0 decides what is to be decided, and is the only one to report.
    """

    def __init__(self, parts: Parts, progress: Progress | None = None) -> None:
        self.parts, self.recipe, self.run = parts, parts.recipe, parts.run
        self.model, self.stream = parts.model, parts.stream
        self.progress = progress or Progress()
        self.runner = EpochRunner(parts, self.progress)

    @classmethod
    def start(cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE) -> "Trainer":
        """Start a new run. Raises InputError when RUN holds one already, TableError when DATA is not finished."""
        layout = RunLayout(run)
        if group.decide(lambda: storage.exists(layout.config)):
            raise InputError(f"{run}: there is a run here already. Go on with --resume, or choose another RUN.")
        parts = set_up(DataLayout(data), layout, recipe, say, group)
        initialise_model(parts)
        facts = {"digest": parts.manifest.digest, "labels": parts.labels, "queries": parts.tables[0].rows}
        if group.first:
            storage.write_bytes(layout.config, dump_config(recipe, data=facts))
        parts.tracker.start(0)
        return cls(parts)

    @classmethod
    def resume(cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE) -> "Trainer":
        """Go on with the run at RUN from its newest checkpoint, on as many ranks as there are now.

        Raises InputError when RUN was made from other data or by another recipe, TableError.
        """
        layout = RunLayout(run)
        config = load_config(layout.config)
        require_same_data(config, open_manifest(data, "data"), data, run)
        require_same_recipe(restore_recipe(config["recipe"], layout.config), recipe, run)
        parts = set_up(DataLayout(data), layout, recipe, say, group)
        checkpoint = group.decide(lambda: latest_checkpoint(layout))
        if checkpoint is None:
            initialise_model(parts)
            progress = Progress()
        else:
            progress = Progress.of(parts.saver.load(checkpoint)["progress"])
        parts.tracker.start(progress.global_step)
        return cls(parts, progress)

    def on_record(self, watcher: Watcher) -> None:
        """Also give `watcher` whatever is recorded from now on."""
        self.parts.tracker.watch(watcher)

    def train(self, on_step: OnStep | None = None) -> Generator[EpochReport]:
        """Run the epochs that are left, a report after each; `on_step(global step, total, loss)` after every step."""
        writer = self.parts.saver.writer
        try:
            while self.progress.epoch < self.runner.epochs:
                with denormals_flushed():
                    report = self.runner.run(on_step)
                yield report
            writer.wait()
            finished = {"step": self.progress.global_step, "epochs": self.runner.epochs}
            if self.parts.group.first:
                storage.write_bytes(self.run.finished, json.dumps(finished).encode())
        finally:
            self.parts.tracker.close()
            writer.close()
