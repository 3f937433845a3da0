"""A run with its miner, its ranks, its metrics and its log."""

import contextlib
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from extremis.console import Bar, current_output, logger, say, show_activity
from extremis.metrics import serve_metrics
from extremis.miner import start_miner
from extremis.retention import STAGING, find_unneeded, remove, tidy
from extremis.stopping import GRACE, stopping_on_signal
from schemas import code_version, commit, storage
from schemas.errors import ExtremisError, StorageError, recognise, redact
from schemas.layout import RunLayout
from schemas.owners import Claim, Unclaimed, claimed, forget_ended, reading, require_output_folder
from schemas.states import showing
from schemas.storage import read_json, write_json
from scoring.fitting import carry_fusion
from scoring.memory import FACTS, describe_memory
from trainer.group import ALONE, Group
from trainer.loop import EpochReport, Trainer
from trainer.methods.recipe import Recipe
from trainer.refresh.adoption import Interrupts
from trainer.sizes import planned_bytes


def train(
    data: str,
    run: str,
    recipe: Recipe,
    resume: bool = False,
    beam_options: Sequence[str] | None = None,
    group: Group = ALONE,
    metrics: tuple[str, int] | None = None,
    grace: float = GRACE,
    should_continue: Callable[[EpochReport], bool] | None = None,
    title: str = "",
) -> dict[str, Any]:
    """Train `recipe`; `resume` continues an existing run. With `beam_options`, a miner runs next to rank 0.

    `metrics`: host and port at which rank 0 serves metrics for Prometheus. `grace`: seconds after SIGTERM or SIGHUP for
    saving a checkpoint; 0: the process ends at once. `should_continue` is called after each epoch; if it returns False,
    the run stops. `title`: title of the progress bar; "": the recipe's name. Returns {"epochs": [...],
    "table_versions": {epoch: table epoch or None}}. Raises ExtremisError: ClaimedError while another process trains
    RUN, StoppedError if a signal stopped this process.
    """
    with (
        claimed_by_first_rank(run, group, data) as claim,
        stopping_on_signal(grace) as stop_requested,
        logged(run) as log,
        reading(data, say) if group.first else contextlib.nullcontext(),
    ):
        show_activity(f"{title or 'train'}: reading the data")
        run_exists = resume and group.decide(lambda: storage.exists(RunLayout(run).config))
        trainer = (Trainer.resume if run_exists else Trainer.start)(data, run, recipe, say, group, claim)
        if group.first:
            log.begin()
            record_command(RunLayout(run))
        interrupts = trainer.interrupts = Interrupts(stop_requested)
        state = RunMetrics(recipe.order.batch)
        trainer.context.tracker.watch(state.record)
        recipe, epochs, miner = trainer.recipe, list[dict[str, Any]](), None
        if group.first and beam_options is not None and recipe.table_epochs():
            verb = "cluster" if recipe.is_clustered else "mine"
            beside = planned_bytes(recipe, trainer.context.sizes, group.ranks)
            miner = start_miner(data, run, log.add, beam_options, verb, interrupts.miner_ended, beside)
        show_activity(f"{title or 'train'}: ending the run")  # after the bar
        try:
            with (
                showing(state.values),
                serve_metrics(metrics if group.first else None, say),
                Bar(title or f"train {recipe.title}", trainer.total_steps, quiet=not group.first) as bar,
            ):

                def on_step(step: int, total: int, loss: float) -> None:
                    state.step(step, total, loss)
                    bar.update(step, state.note(), total)

                with contextlib.closing(trainer.train(on_step)) as reports:
                    for report in reports:
                        adoption = report.adoption
                        epochs.append(
                            {
                                "epoch": report.epoch,
                                "loss": report.loss,
                                "seconds": round(report.seconds, 2),
                                "rows": report.rows,
                                "table_epoch": adoption.table_epoch,
                                "table_age": adoption.age,
                                "late": adoption.late,
                                **({"validation": report.metrics} if report.metrics else {}),
                            }
                        )
                        if group.first:
                            say(_epoch_line(report, recipe), "epoch", **epochs[-1])
                            if recipe.tables is not None and recipe.tables.keep:
                                tidy(run, recipe.tables.keep)
                        if should_continue is not None and not should_continue(report):
                            break
        finally:
            if miner is not None:
                miner.stop()
        if miner is not None:
            with contextlib.suppress(StorageError):  # the run is finished even if files of its miner remain
                forget_ended(run)
                remove(each for each in find_unneeded(run, older_than=-math.inf) if each.kind == STAGING)
    return {"epochs": epochs, "table_versions": {row["epoch"]: row["table_epoch"] for row in epochs}}


def carry(data: str, run: str, earlier: str, device: str) -> None:
    """If the earlier run has a fusion, carry it over to the refreshed run. Raises ExtremisError."""
    fusion = carry_fusion(data, run, earlier, device)
    if fusion is not None:
        memory = fusion.parameters.get(FACTS)
        own = f", with the training points of this run: {describe_memory(memory)}" if memory else ""
        say(f"scores are fused with the weights of {earlier}{own}")


def _epoch_line(report: EpochReport, recipe: Recipe) -> str:
    if recipe.negatives.all_labels:
        table = "every label"
    elif recipe.first_indexed_epoch is not None and report.epoch >= recipe.first_indexed_epoch:
        table = "own index"
    elif report.adoption.table_epoch is None:
        table = "random order" if recipe.is_clustered else "random only"
    else:
        adopted = report.adoption
        recall = "" if adopted.recall is None else f", recall {adopted.recall:.2f}"
        table = f"table {adopted.table_epoch}{recall}, {adopted.age} epochs old"
    shown = (name for name in ("P@1", "P@5", "PSP@5") if name in report.metrics)
    scores = "".join(f"  {name} {report.metrics[name]:.2f}" for name in shown)
    return (
        f"epoch {report.epoch} ({report.epoch + 1} of {report.epochs})  loss {report.loss:.3f}  {table}  "
        f"{report.seconds:.1f} s  {report.rows / max(report.seconds, 1e-9):,.0f} rows/s{scores}"
    )


@contextlib.contextmanager
def joined_ranks() -> Iterator[Group]:
    """Join this process's group until the block ends.

    The first rank that fails raises its error, others exit with its status. Raises ExtremisError, SystemExit.
    """
    group = Group.of_environment()
    try:
        yield group
        group.barrier()
    except BaseException as error:
        known = recognise(error)
        first = group.first_to_report(1 if known is None else known.exit_status)
        if first is not None and isinstance(error, ExtremisError):
            sys.exit(first)
        raise
    group.close()


@contextlib.contextmanager
def claimed_by_first_rank(run: str, group: Group, data: str) -> Iterator[Claim]:
    """Let rank 0 hold the claim on RUN for all ranks until the block ends. Raises ExtremisError on every rank."""
    with contextlib.ExitStack() as held:
        claim: Claim = Unclaimed()
        refused: ExtremisError | None = None
        if group.first:
            try:
                require_output_folder(run, "trained", [data])
                claim = held.enter_context(claimed(run, "trained", say))
            except ExtremisError as error:
                refused = error
        if refused := group.broadcast(refused):
            raise refused
        yield claim


def record_command(run: RunLayout) -> None:
    """Append the current command line, if any, and its commit to those of RUN. Raises TableError, StorageError."""
    if line := redact(current_output().command):
        commands, commits = read_commands(run)
        write_json(run.commands, {"commands": [*commands, line], "commits": [*commits, commit()]}, indent=1)


def read_commands(run: RunLayout) -> tuple[list[str], list[str]]:
    """Return the command lines that created RUN, oldest first, and their commits. Raises TableError for a bad file."""
    body = read_json(run.commands) if storage.exists(run.commands) else {}
    return list(body.get("commands", [])), list(body.get("commits", []))


class RunMetrics:
    """Metrics of one run by name. The trainer calls `step` and `record`; any thread may call the other methods."""

    def __init__(self, batch: int) -> None:
        self._batch, self._lock = batch, threading.Lock()
        self._values: dict[str, float] = {}
        self._rate_start: tuple[float, int] | None = None  # second and step at which the rate starts

    def step(self, step: int, total: int, loss: float) -> None:
        """Record a training step."""
        second = time.monotonic()
        with self._lock:
            self._values |= {"step": step, "steps_total": total, "loss": loss}
            if self._rate_start is None:
                self._rate_start = second, step
            seconds = second - self._rate_start[0]
            if seconds > 0.5:
                self._values["rows_per_second"] = (step - self._rate_start[1]) * self._batch / seconds
            if seconds >= 10.0:  # a rate is averaged over these seconds
                self._rate_start = second, step

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Process a record of the run: numbers set the metric `<kind>_<name>`, and other values remove the metric."""
        with self._lock:
            for name, value in values.items():
                metric = re.sub(r"\W+", "_", f"{kind}_{name}".replace("@", "_at_"))
                if isinstance(value, int | float):
                    self._values[metric] = float(value)
                else:
                    self._values.pop(metric, None)

    def values(self) -> dict[str, float]:
        """Return all metrics."""
        with self._lock:
            return dict(self._values)

    def note(self) -> str:
        """Describe the loss, the rate, and the table in use: the table's epoch, and how late the next table is."""
        values = self.values()
        parts = [f"loss {values['loss']:.3f}"] if "loss" in values else []
        if rate := values.get("rows_per_second"):
            parts.append(f"{rate:,.0f} rows/s")
        made_for, late = values.get("adoption_table_epoch"), values.get("adoption_late")
        if made_for is not None:
            overdue = f", {values['adoption_epoch'] - made_for:.0f} epoch(s) late" if late else ""
            parts.append(f"table {made_for:.0f}{overdue}{', stale' if values.get('adoption_stale') else ''}")
        elif late:
            parts.append("waiting for the first table")
        return "  ".join(parts)


class RunLog(logging.Handler):
    """The log RUN/run.log: every line that a run and its miner print, with timestamps.

    Lines are buffered in memory until `begin`, so that a command that fails early leaves no file. Object stores cannot
    append, so `end` writes the whole file there. If a line cannot be written, it is dropped without an error.
    """

    def __init__(self, run: str) -> None:
        super().__init__()
        self._url, self._lines_lock = RunLayout(run).log, threading.Lock()
        self._lines, self._has_begun = f"{_now()}  Extremis {code_version()}, commit {commit()}\n", False

    def emit(self, record: logging.LogRecord) -> None:
        """Add the line of an event."""
        self.add(record.getMessage())

    def add(self, line: str) -> None:
        """Add a line, from any thread."""
        with self._lines_lock:
            self._lines += f"{_now()}  {line}\n"
            self._append()

    def begin(self) -> None:
        """Write all earlier lines."""
        with self._lines_lock, contextlib.suppress(ExtremisError):
            if not self._has_begun:
                self._has_begun = True
                self._append()
                if self._lines and storage.exists(self._url):
                    self._lines = storage.read_bytes(self._url).decode() + self._lines

    def _append(self) -> None:
        if self._has_begun and storage.is_local(self._url):
            with contextlib.suppress(OSError), open(storage.filesystem(self._url)[1], "a") as file:
                file.write(self._lines)
            self._lines = ""

    def end(self) -> None:
        """Write the lines to an object store. (Not `close`: libraries that configure logging close all handlers.)"""
        with self._lines_lock, contextlib.suppress(OSError, ExtremisError):
            if self._has_begun and self._lines:
                storage.write_bytes(self._url, self._lines.encode())


def _now() -> str:
    return datetime.now().isoformat(" ", "seconds")


@contextlib.contextmanager
def logged(run: str) -> Iterator[RunLog]:
    """Write all lines to RUN's log until the block ends; inside another such block, use that block's log."""
    for outer in logger.handlers:
        if isinstance(outer, RunLog):
            yield outer
            return
    log = RunLog(run)
    logger.addHandler(log)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        log.end()
