"""The training loop: stream, candidates, encoder, classifier, dumps, checkpoints; nothing here knows about files."""

import itertools
import json
import math
import time
from collections.abc import Callable, Generator
from dataclasses import asdict

import torch

from schemas import storage
from schemas.errors import ExtremisError, InputError
from schemas.layout import CLUSTERS, DataLayout, RunLayout
from schemas.manifest import open_manifest
from trainer.budget import epochs_that_fit
from trainer.checkpoints.checkpoint import Checkpoint, latest_checkpoint
from trainer.checkpoints.writer import CheckpointWriter, Contents
from trainer.config import Recipe, dump_config, load_config, restore_recipe
from trainer.device import denormals_flushed
from trainer.encoders.frozen import FrozenEmbeddings
from trainer.evaluation.evaluate import Scorer, label_statistics, positive_weights
from trainer.group import ALONE, Group, label_range
from trainer.initialise import begin_at_texts, begin_with_encoder
from trainer.losses import is_binary
from trainer.model import DataFacts, Model, open_texts, require_same_data
from trainer.negatives.curriculum import mixtures
from trainer.negatives.in_trainer_index import OwnIndex
from trainer.negatives.planner import Find, Planner
from trainer.progress import EpochReport, Progress
from trainer.refresh import true_ranks
from trainer.refresh.adoption import LEAD, Adoption, adopt, follow
from trainer.refresh.dump import EmbeddingCollector, dump_is_published
from trainer.refresh.hardness import measure
from trainer.schedule import rate_factor
from trainer.setup import open_found, open_stream, require_same_recipe, require_streamable
from trainer.step import Clock, Taken, take_step
from trainer.stream import Batch, Source, open_sources
from trainer.tracking import NoTracker, Tracker, Watcher

Say = Callable[[str], None]
NEGATIVES = "negatives"  # the part of a checkpoint with what sources of negatives keep


class Trainer:
    """One rank of a run of a recipe on DATA, writing RUN. Build with `start` or `resume`, on every rank of `group`.

    Rank 0 decides what is to be decided, and is the only one to report.
    """

    def __init__(self, data: DataLayout, run: RunLayout, recipe: Recipe, say: Say, group: Group = ALONE) -> None:
        self.recipe, self.run = recipe, run
        self._data, self._say, self._group = data, say if group.first else _nothing_said, group
        facts = DataFacts.of(data)
        self._manifest, self.labels = facts.manifest, facts.labels
        if recipe.train.threads:
            torch.set_num_threads(recipe.train.threads)
        chosen = recipe.data
        self._sources = open_sources(data, chosen.split, chosen.label_texts, recipe.encoder.inputs, chosen.mix)
        require_streamable(recipe, self._sources, data.root, group)
        weights = positive_weights(data, recipe.train, self._say)
        part = label_range(self.labels, group.rank, group.ranks) if group.ranks > 1 else None
        negatives = recipe.negatives
        if not is_binary(recipe.loss):  # what it makes of a score depends on all of them
            negatives = negatives.model_copy(update={"chunk": max(1, self.labels)})
        course = mixtures(recipe) if recipe.negatives.curriculum else ()
        frequency = label_statistics(data).frequency if recipe.negatives.frequency_share else None
        known = negatives, self.labels, recipe.train.seed
        self._planner = Planner(*known, weights, part, course, frequency)
        self.model = Model.build(
            recipe, facts.vocabulary, facts.labels, facts.features, group, open_texts(data, recipe)
        )
        self._index = OwnIndex(recipe) if recipe.indexes else None
        self._found = open_found(recipe, self.model, group)
        self._frozen = FrozenEmbeddings(self.model.encoder) if recipe.train.freeze_encoder else None
        # Of several ranks, each plans for the global batch, which a stream does not have; nor has it the model.
        ahead = part is None and self._index is None and self._found is None and recipe.head.kind == "classifier"
        self.stream = open_stream(recipe, self._sources, self.labels, group, self._planner if ahead else None)
        self._steps_an_epoch = self.stream.steps
        self._tracker = Tracker(run, recipe.logging.tensorboard) if group.first else NoTracker()
        self._writer = CheckpointWriter(run, recipe.checkpoint.keep, recipe.checkpoint.background, group)
        self.progress = Progress()

    @classmethod
    def start(cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE) -> "Trainer":
        """A new run. Raises InputError when RUN holds one already, TableError when DATA is not finished."""
        layout = RunLayout(run)
        if group.decide(lambda: storage.exists(layout.config)):
            raise InputError(f"{run}: there is a run here already. Go on with --resume, or choose another RUN.")
        trainer = cls(DataLayout(data), layout, recipe, say, group)
        trainer._prepare()
        facts = {"digest": trainer._manifest.digest, "labels": trainer.labels, "queries": trainer._sources[0].rows}
        if group.first:
            storage.write_bytes(layout.config, dump_config(recipe, data=facts))
        trainer._tracker.start(0)
        return trainer

    @classmethod
    def resume(cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE) -> "Trainer":
        """Go on with the run at RUN from its newest checkpoint, on as many ranks as there are now.

        Raises InputError when RUN was made from other data or by another recipe, TableError.
        """
        layout = RunLayout(run)
        config = load_config(layout.config)
        require_same_data(config, open_manifest(data, "data"), data, run)
        require_same_recipe(restore_recipe(config["recipe"], layout.config), recipe, run)
        trainer = cls(DataLayout(data), layout, recipe, say, group)
        checkpoint = group.decide(lambda: latest_checkpoint(layout))
        if checkpoint is None:
            trainer._prepare()
            trainer._tracker.start(0)
        else:
            trainer._load(checkpoint)
            trainer._tracker.start(trainer.progress.global_step)
        return trainer

    def on_record(self, watcher: Watcher) -> None:
        """Also give `watcher` whatever is recorded from now on."""
        self._tracker.watch(watcher)

    @property
    def epochs(self) -> int:
        """Of the run, as far as is known: with `train.minutes` that is decided before each."""
        return self.progress.budget.epochs(self.progress.global_step, self.recipe.train.epochs)

    @property
    def total_steps(self) -> int:
        """Of the run: clusters that are a row short may add one to an epoch, which the rates do not wait for."""
        return self._steps_an_epoch * self.epochs

    def train(self, on_step: Callable[[int, int, float], None] | None = None) -> Generator[EpochReport]:
        """Run the epochs that are left, a report after each; `on_step(global step, total, loss)` after every step."""
        try:
            while self.progress.epoch < self.epochs:
                with denormals_flushed():
                    report = self._epoch(on_step)
                yield report
            self._writer.wait()
            finished = {"step": self.progress.global_step, "epochs": self.epochs}
            if self._group.first:
                storage.write_bytes(self.run.finished, json.dumps(finished).encode())
        finally:
            self._tracker.close()
            self._writer.close()

    def _epoch(self, on_step: Callable[[int, int, float], None] | None) -> EpochReport:
        progress, clock, began = self.progress, Clock(), time.perf_counter()
        adoption, sources = self._adopt()
        clock.lap("adopt")
        self.stream.set_epoch(progress.epoch, sources)
        if self._frozen is not None:
            self._frozen.begin(sources)
        if progress.step:
            self.stream.load_state_dict({**self.stream.state_dict(), "step": progress.step})
        else:
            progress.loss_sum = 0.0
            progress.budget.begin(progress.global_step, adoption.epochs or self.recipe.train.epochs)
            self._tracker.record("adoption", progress.global_step + 1, {"epoch": progress.epoch, **asdict(adoption)})
        collector = self._collector(sources)
        rows, until = 0, began
        skipped = self.stream.skipped_rows
        try:
            for batch in self.stream:
                clock.lap("stream")
                if batch.step == 0:
                    self._record_staleness(adoption, sources, batch)
                    clock.lap("rest")
                taken = self._take_step(batch, clock)
                until = self._spend(until)
                self._after_step(taken, collector)
                rows += len(taken.rows)
                if on_step is not None:
                    on_step(progress.global_step, self.total_steps, taken.loss)
                clock.lap("rest")
            if collector is not None:
                self._publish_dump(collector)
                clock.lap("dump")
        finally:
            if collector is not None:
                collector.close()
        skipped = sum(self._group.sizes(self.stream.skipped_rows - skipped))
        if skipped:
            self._say(
                f"epoch {progress.epoch}: {skipped:,} rows left out, their row groups are damaged or gone; "
                f"extremis inspect --verify {self._data.root} names the files"
            )
        self._spend(until)
        return self._end_epoch(adoption, clock, rows, skipped, time.perf_counter() - began)

    def _spend(self, since: float) -> float:
        """Count the seconds `since` then as the epoch's. Returns the time."""
        now = time.perf_counter()
        self.progress.budget.spend(now - since)
        return now

    def _adopt(self) -> tuple[Adoption, list[Source]]:
        """What rank 0 decides about the epoch, and the sources joined with it."""
        known = self.run, self.recipe, self._sources, self.progress.epoch
        epochs = epochs_that_fit(self.recipe.train, self.progress.budget.spent)
        decided = adopt(*known, self._say, epochs) if self._group.first else None
        self._group.barrier()
        return decided or follow(*known)

    def _record_staleness(self, adoption: Adoption, sources: list[Source], batch: Batch) -> None:
        """How old the epoch's table is, in epochs and steps, what is new in it, and what its negatives still score."""
        if adoption.table_epoch is None:
            return
        step = self.progress.global_step
        known = None if self.recipe.clusters else measure(self.model, self._group, sources, batch)
        self._tracker.record("staleness", step + 1, adoption.staleness(step) | (known.facts() if known else {}))

    def _take_step(self, batch: Batch, clock: Clock) -> Taken:
        index = self._index if batch.epoch >= self.recipe.refresh.start else None
        step, every = self.progress.global_step, self.recipe.logging.ranks_every
        look = self._look if every and (step + 1) % every == 0 else None
        return take_step(
            self.model,
            self._planner,
            self._group,
            batch,
            step,
            self._rate_factor(step),
            clock,
            self._writer,
            index,
            self._found,
            self.recipe.train,
            self._frozen,
            look,
        )

    def _look(self, batch: Batch, x: torch.Tensor, find: Find | None) -> None:
        """Record which true ranks the hard negatives of a step have; `batch` is the global one."""
        classifier = self.model.classifier
        hard = self._planner.hard(batch, find)
        if hard is None:
            return
        found = true_ranks.measure(classifier.vectors, classifier.start, x, batch, hard, self._group)
        if found is None:
            return
        age = {} if self._index is None or self._index.age is None else {"index_age": self._index.age}
        self._tracker.record(
            "hard", self.progress.global_step + 1, {"epoch": batch.epoch, "of": self.labels, **age, **found.facts()}
        )

    def _rate_factor(self, step: int) -> float:
        options = self.recipe.train
        epochs = self.progress.budget.epochs(step, options.epochs)
        return rate_factor(step, self._steps_an_epoch * epochs, options.warmup, options.final_lr)

    def _after_step(self, taken: Taken, collector: EmbeddingCollector | None) -> None:
        progress, recipe, factor = self.progress, self.recipe, self._rate_factor(self.progress.global_step)
        if not math.isfinite(taken.loss):
            raise ExtremisError(
                f"the loss is {taken.loss} at step {progress.global_step} (epoch {progress.epoch}): training has "
                "diverged. Lower encoder.lr and classifier.lr, or raise train.warmup, and start a new run."
            )
        if collector is not None:
            collector.add(taken.rows, taken.x)
        progress.step = taken.step + 1
        progress.global_step += 1
        progress.loss_sum += taken.loss
        if self._found is not None:
            self._found.after_step(progress.global_step, progress.epoch, taken.step)
        if progress.global_step % recipe.logging.every_steps == 0:
            rates = {
                "encoder_lr": recipe.encoder.lr * factor,
                "classifier_lr": recipe.classifier.lr * factor,
            }
            self._tracker.record("train", progress.global_step, {"epoch": progress.epoch, "loss": taken.loss, **rates})
        every = recipe.checkpoint.every_steps
        if every and progress.global_step % every == 0 and progress.step < self.stream.steps:
            if collector is not None:
                collector.save_part(progress.step)
            self._save()

    def _end_epoch(self, adoption: Adoption, clock: Clock, rows: int, skipped: int, seconds: float) -> EpochReport:
        progress, recipe = self.progress, self.recipe
        epoch, loss = progress.epoch, progress.loss_sum / max(1, self.stream.steps)
        progress.epoch, progress.step = epoch + 1, 0
        last = progress.epoch == self.epochs
        metrics: dict[str, float] = {}
        if recipe.validation.split and (last or progress.epoch % recipe.validation.every_epochs == 0):
            metrics = self._validate()
        spent = {f"seconds_{name}": round(value, 3) for name, value in clock.seconds.items()}
        self._tracker.record(
            "epoch",
            progress.global_step,
            {
                "epoch": epoch,
                "loss": loss,
                "seconds": seconds,
                "rows_per_second": rows / max(seconds, 1e-9),
                "skipped_rows": skipped,
                "table_epoch": adoption.table_epoch,
                "table_age": adoption.age,
                "late": adoption.late,
                **spent,
            },
        )
        if metrics:
            self._tracker.record("validation", progress.global_step, {"epoch": epoch, **metrics})
            self._mark_best(metrics)
        every = recipe.checkpoint.every_epochs
        if last or progress.best_step == progress.global_step or (every and progress.epoch % every == 0):
            self._save()
        self._tracker.sync()
        return EpochReport(epoch, self.epochs, loss, seconds, rows, adoption, metrics)

    def _collector(self, sources: list[Source]) -> EmbeddingCollector | None:
        """A collector when the current epoch's embeddings are wanted by a later epoch's table, restored on resume."""
        progress = self.progress
        if progress.epoch + LEAD not in self.recipe.table_epochs():
            return None
        for_clusters = sources[0].name if self.recipe.clusters else None
        if self._group.decide(lambda: dump_is_published(self.run, progress.epoch, for_clusters)):
            return None
        collector = EmbeddingCollector(self.run, progress.epoch, sources, self.model.width, self._group)
        if progress.step:
            collector.restore(progress.step)
        return collector

    def _publish_dump(self, collector: EmbeddingCollector) -> None:
        recipe = self.recipe
        if recipe.clusters:
            order = recipe.order
            clusters = {"size": order.clusters.at(recipe.train.epochs - 1, order.share), "smallest": order.cluster}
            facts = {"step": self.progress.global_step, "use_from": collector.epoch + LEAD, "split": recipe.data.split}
            collector.publish_for_clusters({**facts, CLUSTERS: clusters, "bias": self.model.classifier.bias})
            return
        collector.publish(
            self.model.classifier.vectors,
            self.labels,
            {
                "step": self.progress.global_step,
                "use_from": collector.epoch + LEAD,
                "table_width": recipe.negatives.table_width,
                "index": recipe.refresh.index,
                "by": recipe.refresh.by,
                "bias": self.model.classifier.bias,
            },
        )

    def _validate(self) -> dict[str, float]:
        options = self.recipe.validation
        scorer = Scorer.open(self._data, self.model, options.split, self._group)
        scores = scorer.score(options.queries, ks=[int(options.metric.partition("@")[2])])
        return self._group.broadcast(scores.metrics.result())

    def _mark_best(self, metrics: dict[str, float]) -> None:
        """Remember the step with the best validation metric; its checkpoint outlives the newer ones."""
        name, progress = self.recipe.validation.metric, self.progress
        if name not in metrics:
            raise InputError(f"validation.metric = {name!r} is not measured on this data; known: {', '.join(metrics)}.")
        if progress.best_metric is None or metrics[name] > progress.best_metric:
            progress.best_metric, progress.best_step = metrics[name], progress.global_step

    def _save(self) -> None:
        model, progress = self.model, self.progress
        if self._index is not None:
            self._index.drop()  # a run that goes on from here has none, and builds it of these very vectors
        # First, so that a resume finds every record up to the checkpoint.
        self._tracker.sync()
        self._writer.save(
            Contents(
                step=progress.global_step,
                parts={**model.parts(), **self._found_part()},
                rows=model.rows(),
                first=model.classifier.start,
                labels=self.labels,
                state={
                    "progress": progress.state(timed=self.recipe.train.minutes > 0),
                    "stream": self.stream.state_dict(),
                    "seed": self.recipe.train.seed,
                },
                parents={"data": self._manifest.digest},
                best=progress.best_step,
            )
        )

    def _load(self, checkpoint: Checkpoint) -> None:
        self.model.load_to_train(checkpoint)
        if self._found is not None and checkpoint.has(NEGATIVES):
            self._found.load({name: value.numpy() for name, value in checkpoint.tensors(NEGATIVES).items()})
        self.progress = Progress.of(checkpoint.state["progress"])

    def _found_part(self) -> dict[str, dict[str, torch.Tensor]]:
        """What the sources of negatives keep beside the classifier, as a part of a checkpoint; none without state."""
        state = {} if self._found is None else self._found.state()
        return {NEGATIVES: {name: torch.from_numpy(array) for name, array in state.items()}} if state else {}

    def _prepare(self) -> None:
        """What the model takes from the data, and from another run, before its first step."""
        began = begin_with_encoder(self.model, self._data, self.recipe)
        for name, encoder in self.model.encoders.items():
            if not (began and name == "encoder"):
                stream = open_stream(self.recipe, self._sources, self.labels, self._group)
                queries = (batch.inputs for batch in stream)
                encoder.fit(itertools.chain(queries, self.model.label_inputs()), self._group)
        if self.recipe.classifier.initial == "labels":
            begin_at_texts(self.model, self._data, self.recipe.classifier.initial_scale)


def _nothing_said(_: str) -> None:
    """What ranks other than 0 say."""
