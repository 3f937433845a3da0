"""One rank of a run: start or resume it, train its epochs step by step, save checkpoints, record and report.

`train` runs epochs. An epoch adopts a table, takes its steps, publishes a dump if a later table needs one, validates,
and ends with a report. Rank 0 decides and records; all ranks take the same steps.
"""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from schemas import storage
from schemas.errors import DivergedError, InputError, StorageError, option
from schemas.layout import DataLayout, RunLayout
from schemas.owners import Claim, Unclaimed
from schemas.process import cores
from schemas.table import Table
from schemas.waits import Say
from trainer.checkpoints import CheckpointContents, latest_checkpoint
from trainer.device import CPU, denormals_flushed, describe_device
from trainer.evaluation.evaluate import trained_frequency
from trainer.evaluation.metrics import Metrics
from trainer.group import ALONE, Group
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.methods.sections import LEAD
from trainer.model import require_same_data
from trainer.modules import digests
from trainer.negatives.base import Sampled
from trainer.recipe_files import changed_versions, dump_config, load_config, validate
from trainer.refresh import hardness
from trainer.refresh.adoption import Adoption, Interrupts, StoppedError, adopt, discard_refreshes, follow
from trainer.refresh.dump import EmbeddingCollector
from trainer.schedule import Budget, epochs_that_fit, rate_factor
from trainer.setup import RunContext, initialise_model, require_room_for_run, require_same_recipe, set_up
from trainer.step import StepResult, take_step
from trainer.stream import Batch, Source

NEGATIVES = "negatives"  # the part of a checkpoint with the state of sources of negatives
_WINDOW = 100  # number of previous steps to compare a loss with
_JUMP = 3.0  # a loss has jumped if it exceeds this multiple of the largest previous loss
_IN_A_ROW = 3  # consecutive steps that must have jumped: a single step may have a row with hundreds of labels


@dataclass
class Progress:
    """Position of the training loop, saved with each checkpoint."""

    epoch: int = 0
    step: int = 0  # next step of the epoch
    global_step: int = 0
    loss_sum: float = 0.0  # over the epoch's steps so far
    best_metric: float | None = None
    best_step: int | None = None
    worse: int = 0  # validations since the best validation
    stopped: bool = False  # stopped early: no further epochs run
    budget: Budget = field(default_factory=Budget)

    def state(self, timed: bool, patient: bool = False) -> dict[str, Any]:
        """Return the state for a checkpoint: with seconds if `timed`, with validations since the best if `patient`."""
        state = asdict(self)
        if not timed:
            del state["budget"]
        if not patient:
            del state["worse"], state["stopped"]
        return state

    @staticmethod
    def of(state: Mapping[str, Any]) -> "Progress":
        """Restore the progress from a `state`."""
        return Progress(**{**state, "budget": Budget(**state.get("budget", {}))})


@dataclass(frozen=True)
class EpochReport:
    """Report of an epoch, the first of which is number 0. `epochs`: number of planned epochs of the run."""

    epoch: int
    epochs: int
    loss: float
    seconds: float
    rows: int
    adoption: Adoption
    metrics: dict[str, float]
    scored: Metrics | None = None  # of the validation, in the order of the split's rows


OnStep = Callable[[int, int, float], None]  # global step, steps of the run, loss


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
        self.interrupts = Interrupts()  # requests to end the run after the current step, or to end a wait
        self._mix = mix  # weights of the sources with which a resumed epoch began
        self._steps_an_epoch = context.stream.steps
        self._more_steps = 0  # additional steps of earlier epochs, which had other weights
        self._watch = LossWatch()
        self._unread: list[tuple[int, torch.Tensor]] = []  # step of the run, and its loss on the device
        self._loss = math.nan  # the last loss that was read
        self._saved = self.progress.global_step  # step of the newest checkpoint; 0: none

    @classmethod
    def start(
        cls, data: str, run: str, recipe: Recipe, say: Say = print, group: Group = ALONE, claim: Claim | None = None
    ) -> "Trainer":
        """Start a new run. Raises InputError if RUN already contains a run, TableError if DATA is not finished."""
        layout = RunLayout(run)
        if group.decide(lambda: storage.exists(layout.config)):
            raise InputError(f"{run}: a run exists here already. Give {option('resume', True)}, or another RUN.")
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
        # A setting that is newer than the run has its default.
        started = validate(config["recipe"], layout.config).model_dump(mode="json")
        stated = recipe.model_dump(mode="json")
        checkpoint = group.decide(lambda: latest_checkpoint(layout))
        if checkpoint is not None:
            require_same_recipe(started, stated, run)
        machine = config.get("machine", {})
        context = set_up(DataLayout(data), layout, recipe, say, group, claim or Unclaimed(), machine.get("threads", 0))
        if checkpoint is None:
            initialise_model(context)
            progress = Progress()
            if started != stated:
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
            for name, digest in digests(recipe.method, recipe.loss.kind).items():
                if (before := config.get("modules", {}).get(name, digest)) != digest:
                    context.say(
                        f"{run}: {name} has changed since the run was started (SHA-256 {before[:12]}…, now "
                        f"{digest[:12]}…); results may differ"
                    )
            if (kernels := machine.get("kernels", context.kernels)) != context.kernels:
                context.say(
                    f"{run}: started with kernels {kernels}, resumed with {context.kernels}; results may differ in the "
                    "last digits"
                )
            if checkpoint.has(NEGATIVES):
                context.step.negative_sources.load(
                    {name: value.numpy() for name, value in checkpoint.tensors(NEGATIVES).items()}
                )
            progress, mix = Progress.of(checkpoint.state["progress"]), checkpoint.state["stream"].get("mix")
            if started["data"] != stated["data"]:
                context.claim.require()
                _write_config(context)
                context.say(f"the mix of sources changes from epoch {progress.epoch + bool(progress.step)} on")
        context.tracker.start(progress.global_step)
        return cls(context, progress, mix)

    def train(self, on_step: OnStep | None = None) -> Generator[EpochReport]:
        """Run the remaining epochs, and yield a report of each; call `on_step(global step, total, loss)` every step."""
        writer, is_finished = self.context.writer, False
        try:
            while self.progress.epoch < self.epochs:
                with denormals_flushed():
                    report = self._run_epoch(on_step)
                yield report
            writer.wait()
            finished = {"step": self.progress.global_step, "epochs": self.epochs}
            if self.context.group.first:
                self.context.claim.require()
                storage.write_bytes(self.run.finished, json.dumps(finished).encode())
            is_finished = True
        except StorageError:
            storage.thread_state.cleaning_up = True
            raise
        finally:
            self.context.tracker.close(is_finished)
            writer.close()

    @property
    def epochs(self) -> int:
        """Planned number of epochs of the run; with `train.minutes`, each epoch begins with a new plan."""
        if self.progress.stopped:
            return self.progress.epoch
        return self.progress.budget.epochs(self.progress.global_step, self.recipe.train.epochs)

    @property
    def total_steps(self) -> int:
        """Number of planned steps; the learning rates ignore an additional step of clusters that lack a row."""
        return self._steps_an_epoch * self.epochs + self._more_steps

    def rate_factor(self, step: int) -> float:
        """Return the learning rate at global `step`, as a fraction of the full rate."""
        options = self.recipe.train
        total = self._steps_an_epoch * self.progress.budget.epochs(step, options.epochs) + self._more_steps
        return rate_factor(step, total, options.warmup, options.final_lr, options.decay)

    def _run_epoch(self, on_step: OnStep | None) -> EpochReport:
        """Run the rest of the current epoch. Raises StoppedError; DivergedError."""
        context, progress, stream, clock = self.context, self.progress, self.stream, self.context.step.clock
        clock.restart()
        began = counted_until = time.perf_counter()
        try:
            adoption, sources = self.adopt()
        except StoppedError:  # during the wait for a table: no rank has begun the epoch
            if context.group.ranks == 1:
                self._save_and_stop()
            raise
        clock.lap("adopt")
        self._begin(adoption, sources)
        rows, skipped = 0, stream.skipped_rows
        dump = context.dump_writer.dump(progress.epoch, progress.step, sources, self.model.width)
        batches_with_requests = replace(context.batches, is_stop_requested=self.interrupts.stop.is_set)
        with contextlib.closing(iter(batches_with_requests)) as batches:
            for batch in batches:
                clock.lap("stream")
                step, every = progress.global_step, self.recipe.logging.ranks_every
                if batch.local.step == 0 and adoption.table_epoch is not None:
                    figures = adoption.staleness(step)
                    if not self.recipe.is_clustered:
                        figures |= hardness.measure(self.model, context.group, sources, batch.local)
                    context.tracker.record("staleness", step + 1, figures)
                    clock.lap("rest")
                hook = self._record_ranks if every and (step + 1) % every == 0 else None
                result = take_step(context.step, batch, step, self.rate_factor(step), hook)
                counted_until = self._spend(counted_until)
                # A single rank stops at once; several ranks stop after the batch that informed all ranks.
                must_stop = self.interrupts.stop.is_set() if context.group.ranks == 1 else batch.stop_requested
                self._after_step(result, dump, must_stop)
                rows += len(result.rows)
                if on_step is not None:
                    on_step(progress.global_step, self.total_steps, self._loss)
                clock.lap("rest")
        self._read_losses()
        if dump:
            vectors = "" if self.recipe.is_clustered else f" and {context.labels:,} label vectors"
            dumped = f"{stream.rows:,} embeddings{vectors}"
            context.say(f"epoch {progress.epoch}: dumps {dumped}, for table {progress.epoch + LEAD}")
            context.dump_writer.publish(dump, self.model, progress.global_step)
            clock.lap("dump")
        skipped = sum(context.group.sizes(stream.skipped_rows - skipped))
        if skipped:
            context.say(
                f"epoch {progress.epoch}: {skipped:,} rows were skipped, because their row groups are damaged or "
                f"missing; extremis inspect --verify {context.data.root} lists the files"
            )
        self._spend(counted_until)
        return self._end(adoption, rows, skipped, time.perf_counter() - began)

    def adopt(self) -> tuple[Adoption, list[Source]]:
        """Return rank 0's decision about the epoch's table, and the joined sources. Raises StoppedError."""
        context, options = self.context, self.recipe.train
        context.claim.require()
        epochs = epochs_that_fit(options.minutes, options.epochs, self.progress.budget.spent)
        interrupts = replace(self.interrupts, check=context.writer.check)
        arguments = self.run, self.recipe, context.sources, self.progress.epoch
        decision = adopt(*arguments, context.say, epochs, interrupts) if context.group.first else None
        context.group.barrier()
        return decision or follow(*arguments)

    def save(self) -> None:
        """Start writing a checkpoint of the current state. Raises StorageError."""
        context, progress, head = self.context, self.progress, self.model.head
        # The records come first, so that a resumed run finds every record up to the checkpoint.
        context.tracker.sync()
        stream = self.stream.state_dict()
        if progress.step:  # threads may already have taken batches of later steps
            stream["step"] = progress.step
        state = {
            "progress": progress.state(self.recipe.train.minutes > 0, self.recipe.validation.patience > 0),
            "stream": stream,
            "seed": self.recipe.train.seed,
        }
        for source in context.step.negative_sources:
            source.before_checkpoint()
        step, tensors = progress.global_step, self.model.checkpoint_tensors()
        if negatives := context.step.negative_sources.state():
            tensors[NEGATIVES] = {name: torch.from_numpy(array) for name, array in negatives.items()}
        parents = {"data": context.sizes.manifest.digest}
        rows = head.rows(), head.start, context.labels
        context.writer.save(CheckpointContents(step, tensors, *rows, state, parents, progress.best_step))
        self._saved = step

    def _begin(self, adoption: Adoption, sources: list[Source]) -> None:
        context, progress, stream = self.context, self.progress, self.stream
        stream.set_epoch(progress.epoch, sources)
        context.step.queries.begin(sources)
        if context.step.second_loss is not None:
            context.step.second_loss.begin(sources)
        if progress.step:
            state = stream.state_dict()
            stream.load_state_dict({**state, "mix": self._mix or state["mix"], "step": progress.step})
        self._mix = None
        if self.recipe.data.mix:
            first = progress.global_step - progress.step
            self._more_steps = first + stream.steps - (progress.epoch + 1) * self._steps_an_epoch
        if progress.step:
            return
        progress.loss_sum = 0.0
        progress.budget.begin(progress.global_step, adoption.epochs or self.recipe.train.epochs)
        context.tracker.record("adoption", progress.global_step + 1, {"epoch": progress.epoch, **asdict(adoption)})
        if adoption.table_epoch == progress.epoch:
            table, rows = f"table {adoption.table_epoch}", f"{stream.rows:,} rows"
            joined = f"orders {rows} by {table}" if self.recipe.is_clustered else f"joins {table} to {rows}"
            context.say(f"epoch {progress.epoch}: {joined}")

    def _spend(self, since: float) -> float:
        time_now = time.perf_counter()
        self.progress.budget.spend(time_now - since)
        return time_now

    def _record_ranks(self, batch: Batch, x: torch.Tensor, sampled: list[Sampled]) -> None:
        """Record the true ranks of a step's hard negatives; `batch` is the global batch."""
        context, head = self.context, self.model.head
        hard = context.step.planner.hard(batch, sampled)
        if hard is None:
            return
        ranks = hardness.measure_true_ranks(head.vectors, head.start, x, batch, hard, context.group)
        if len(ranks):
            figures = {"epoch": batch.epoch, "of": context.labels, **context.step.negative_sources.figures()}
            figures |= hardness.describe(ranks)
            context.tracker.record("hard", self.progress.global_step + 1, figures)

    def _after_step(self, result: StepResult, dump: EmbeddingCollector | None, must_stop: bool) -> None:
        context, progress, recipe = self.context, self.progress, self.recipe
        context.claim.require()
        factor = self.rate_factor(progress.global_step)
        logged = (progress.global_step + 1) % recipe.logging.every_steps == 0
        self._unread.append((progress.global_step, result.loss))
        # A GPU has the next steps queued while it computes this step: reading the loss here would stall the GPU.
        if logged or math.isnan(self._loss) or self.model.device == CPU:
            self._read_losses()
        if dump:
            dump.add(result.rows, result.x)
        progress.step = result.step + 1
        progress.global_step += 1
        for source in context.step.negative_sources:
            source.after_step(progress.global_step, progress.epoch, result.step)
        if logged:
            rates = {"encoder_lr": recipe.encoder.lr * factor}
            if isinstance(recipe, ClassifierRecipe):
                rates["classifier_lr"] = recipe.classifier.lr * factor
            figures = {"epoch": progress.epoch, "loss": self._loss, **rates}
            context.tracker.record("train", progress.global_step, figures)
        every = recipe.checkpoint.every_steps
        is_last = progress.step == self.stream.steps
        if (must_stop or (every and progress.global_step % every == 0)) and not is_last:
            self._read_losses()
            if dump:
                context.dump_writer.save_part(dump, progress.step, progress.global_step)
            self.save()
            if must_stop:
                self._save_and_stop()

    def _save_and_stop(self) -> None:
        """End the run here, and save a checkpoint of the last step. Raises StoppedError; StorageError."""
        step = self.progress.global_step
        if self._saved != step:
            self.save()
        self.context.writer.wait()
        kept = f"after step {step:,}; the checkpoint is saved" if step else "before its first step"
        raise StoppedError(f"{self.run.root}: stopped by a signal {kept}. Continue with {option('resume', True)}.")

    def _read_losses(self) -> None:
        """Read the losses of all steps since the last read, in one copy. Raises DivergedError for NaN or infinity."""
        if not self._unread:
            return
        progress, unread, self._unread = self.progress, self._unread, []
        losses = torch.stack([loss for _, loss in unread])
        self.context.group.wait_for(losses, self.interrupts.stop.is_set)
        for (step, _), loss in zip(unread, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                raise DivergedError(
                    f"the loss is {loss} at step {step} (epoch {progress.epoch}): training has "
                    "diverged. Lower encoder.lr and classifier.lr, or raise train.warmup, and start a new run."
                )
            if (before := self._watch.jumped(loss)) is not None:
                self.context.say(
                    f"odd: at step {step} the loss jumped from {before:.3g} to {loss:.3g}. If this happens again, "
                    "lower encoder.lr and classifier.lr"
                )
            progress.loss_sum += loss
            self._loss = loss

    def _end(self, adoption: Adoption, rows: int, skipped: int, seconds: float) -> EpochReport:
        context, progress = self.context, self.progress
        epoch, loss = progress.epoch, progress.loss_sum / max(1, self.stream.steps)
        progress.epoch, progress.step = epoch + 1, 0
        last = progress.epoch == self.epochs
        scored = context.validator.measure(self.model) if context.validator.is_due(progress.epoch, last) else None
        metrics = scored.result() if scored else {}
        figures = {
            "epoch": epoch,
            "loss": loss,
            "seconds": seconds,
            "rows_per_second": rows / max(seconds, 1e-9),
            "skipped_rows": skipped,
            "table_epoch": adoption.table_epoch,
            "table_age": adoption.age,
            "late": adoption.late,
            "device": describe_device(self.model.device),
            "kernels": context.kernels,
            "seconds_background": round(context.writer.seconds(), 3),
        }
        seconds_of = {f"seconds_{name}": round(value, 3) for name, value in context.step.clock.seconds.items()}
        context.tracker.record("epoch", progress.global_step, {**figures, **seconds_of})
        if scored:
            context.tracker.record("validation", progress.global_step, {"epoch": epoch, **metrics})
            self._record_validation(metrics, last)
            last = last or progress.stopped
            odd = [context.validator.odd(metrics)]
            if last:
                odd.append(context.validator.fell(scored, progress.best_metric))
            for line in filter(None, odd):
                context.tracker.record("odd", progress.global_step, {"epoch": epoch, "line": line})
                context.say(f"odd: after epoch {epoch} {line}")
        every = self.recipe.checkpoint.every_epochs
        if last or progress.best_step == progress.global_step or (every and progress.epoch % every == 0):
            self.save()
        context.tracker.sync()
        if not last and any(context.group.all_gather_objects(self.interrupts.stop.is_set())):
            self._save_and_stop()
        return EpochReport(epoch, self.epochs, loss, seconds, rows, adoption, metrics, scored)

    def _record_validation(self, metrics: dict[str, float], last: bool) -> None:
        """Record the best validation; end the run after `validation.patience`, the same on all ranks."""
        context, progress, options = self.context, self.progress, self.recipe.validation
        metric = metrics[options.metric]
        if progress.best_metric is None or metric > progress.best_metric:
            progress.best_metric, progress.best_step, progress.worse = metric, progress.global_step, 0
            return
        progress.worse += 1
        progress.stopped = not last and 0 < options.patience <= progress.worse
        if not progress.stopped:
            return
        figures = {"best": progress.best_metric, "best_step": progress.best_step, "validations": progress.worse}
        context.tracker.record("stopped", progress.global_step, {"epoch": progress.epoch - 1, **figures})
        context.say(
            f"stopped early after epoch {progress.epoch - 1}: {options.metric} was best at step {progress.best_step:,} "
            f"({progress.best_metric:.2f}), {progress.worse} validation(s) ago. The best checkpoint is kept: extremis "
            f"evaluate {context.data.root} {self.run.root} --step {progress.best_step}"
        )


class LossWatch:
    """Detects a loss far above the largest recent loss. The recent steps may include rows of different sources."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = 0  # number of consecutive losses that have jumped

    def jumped(self, loss: float) -> float | None:
        """Record the loss of a step; if it jumped and stayed high, return the earlier maximum and reset."""
        largest = max(self._losses) if len(self._losses) == _WINDOW else math.inf
        if loss <= _JUMP * largest:
            self._high = 0
            self._losses.append(loss)
            return None
        self._high += 1
        if self._high < _IN_A_ROW:
            return None
        self._losses.clear()
        self._high = 0
        return largest


def _write_config(context: RunContext) -> None:
    made_from = {"digest": context.sizes.manifest.digest, "labels": context.labels, "queries": context.sources[0].rows}
    if context.group.first:
        machine = {"threads": torch.get_num_threads(), "kernels": context.kernels}
        modules = digests(context.recipe.method, context.recipe.loss.kind)
        facts: dict[str, Any] = {"data": made_from, "machine": machine, **({"modules": modules} if modules else {})}
        storage.write_bytes(context.run.config, dump_config(context.recipe, **facts))
