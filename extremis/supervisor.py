"""Training of a run, including the claim, a miner process, metrics, progress, the log, and signals."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from extremis.console import Bar, current_output, output, say
from extremis.miner import start_miner
from extremis.ranks import claimed_by_first_rank, record_command
from extremis.run_metrics import RunMetrics, serve_metrics
from extremis.spinner import show_activity
from schemas import storage
from schemas.errors import ExtremisError, StorageError
from schemas.layout import RunLayout
from trainer.checkpoints.stopping import GRACE, stopping_on_signal
from trainer.evaluation.fitting import carry_fusion
from trainer.evaluation.memory import FACTS, describe_memory
from trainer.group import ALONE, Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.progress import EpochReport
from trainer.refresh.adoption import Interrupts, discard_unfinished_tables


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
    ):
        show_activity(f"{title or 'train'}: reading the data")
        run_exists = resume and group.decide(lambda: storage.exists(RunLayout(run).config))
        trainer = (Trainer.resume if run_exists else Trainer.start)(data, run, recipe, say, group, claim)
        if group.first:
            log.begin()
            record_command(RunLayout(run))
        interrupts = Interrupts(stop_requested)
        trainer.runner.interrupts = interrupts
        state = RunMetrics(recipe.order.batch)
        trainer.on_record(state.record)
        recipe, epochs, miner = trainer.recipe, list[dict[str, Any]](), None
        if group.first and beam_options is not None and recipe.table_epochs():
            verb = "cluster" if recipe.is_clustered else "mine"
            miner = start_miner(data, run, log, beam_options, verb, interrupts.miner_ended)
        show_activity(f"{title or 'train'}: ending the run")  # after the bar
        try:
            with (
                serve_metrics(state, metrics if group.first else None, say),
                Bar(title or f"train {recipe.title}", trainer.runner.total_steps, quiet=not group.first) as bar,
            ):

                def on_step(step: int, total: int, loss: float) -> None:
                    state.step(step, total, loss)
                    bar.update(step, state.note(), total)

                with contextlib.closing(trainer.train(on_step)) as reports:
                    for report in reports:
                        epochs.append(_describe(report))
                        if group.first:
                            say(_epoch_line(report, recipe))
                        if should_continue is not None and not should_continue(report):
                            break
        finally:
            if miner is not None:
                miner.stop()
        if miner is not None:
            with contextlib.suppress(StorageError):  # the run is finished even if files of its miner remain
                discard_unfinished_tables(RunLayout(run))
    return {"epochs": epochs, "table_versions": {row["epoch"]: row["table_epoch"] for row in epochs}}


def carry(data: str, run: str, earlier: str, device: str) -> None:
    """If the earlier run has a fusion, carry it over to the refreshed run. Raises ExtremisError."""
    fusion = carry_fusion(data, run, earlier, device)
    if fusion is not None:
        memory = fusion.parameters.get(FACTS)
        own = f", with the training points of this run: {describe_memory(memory)}" if memory else ""
        say(f"scores are fused with the weights of {earlier}{own}")


def _describe(report: EpochReport) -> dict[str, Any]:
    return {
        "epoch": report.epoch,
        "loss": report.loss,
        "seconds": round(report.seconds, 2),
        "rows": report.rows,
        "table_epoch": report.adoption.table_epoch,
        "table_age": report.adoption.age,
        "late": report.adoption.late,
        **({"validation": report.metrics} if report.metrics else {}),
    }


def _epoch_line(report: EpochReport, recipe: Recipe) -> str:
    if recipe.negatives.all_labels:
        table = "every label"
    elif recipe.first_indexed_epoch is not None and report.epoch >= recipe.first_indexed_epoch:
        table = "own index"
    else:
        none = "random order" if recipe.is_clustered else "random only"
        table = none if report.adoption.table_epoch is None else f"table {report.adoption.table_epoch}"
    scores = "".join(
        f"  {name} {report.metrics[name]:.2f}" for name in ("P@1", "P@5", "PSP@5") if name in report.metrics
    )
    return (
        f"epoch {report.epoch} ({report.epoch + 1} of {report.epochs})  loss {report.loss:.3f}  {table}  "
        f"{report.seconds:.1f} s  {report.rows / max(report.seconds, 1e-9):,.0f} rows/s{scores}"
    )


class RunLog:
    """The log RUN/run.log: every line that a run and its miner print, with timestamps.

    Lines are buffered in memory until `begin`, so that a command that fails early leaves no file. Object stores cannot
    append, so `close` writes the whole file there. If a line cannot be written, it is dropped without an error.
    """

    def __init__(self, run: str) -> None:
        self._url, self._lock = RunLayout(run).log, threading.Lock()
        self._early: list[str] = []
        self._file: IO[str] | None = None

    def __call__(self, line: str) -> None:
        """Add a line, from any thread."""
        timed = f"{datetime.now().isoformat(' ', 'seconds')}  {line}\n"
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._file is None:
                self._early.append(timed)
            else:
                self._file.write(timed)
                self._file.flush()

    def begin(self) -> None:
        """Open the file, and write all earlier lines."""
        with self._lock, contextlib.suppress(OSError, ExtremisError):
            if self._file is None:
                if storage.is_local(self._url):
                    self._file = Path(storage.filesystem(self._url)[1]).open("a")  # noqa: SIM115
                else:
                    self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115
                    if storage.exists(self._url):
                        self._file.write(storage.read_bytes(self._url).decode())
                self._file.writelines(self._early)

    def close(self) -> None:
        """Close the file."""
        with self._lock, contextlib.suppress(OSError, ExtremisError):
            if self._file is not None:
                if not storage.is_local(self._url):
                    self._file.seek(0)
                    storage.write_bytes(self._url, self._file.read().encode())
                self._file.close()


@contextlib.contextmanager
def logged(run: str) -> Iterator[RunLog]:
    """Write all lines to RUN's log until the block ends; inside another such block, use that block's log."""
    outer = current_output().log
    if isinstance(outer, RunLog):
        yield outer
        return
    with contextlib.closing(RunLog(run)) as log, output(log=log):
        yield log
