"""Training of a run, watched: the claim on it, a miner process beside, metrics, progress, and what a signal stops."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from extremis.console import Bar, say
from extremis.metrics import MetricsState, serving
from extremis.miner import start_miner
from extremis.ranks import keep_command, owning
from extremis.run_log import logged
from extremis.spinner import doing
from schemas import storage
from schemas.errors import StorageError
from schemas.layout import RunLayout
from trainer.checkpoints.stopping import GRACE, stopping_on_signal
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
    goes_on: Callable[[EpochReport], bool] | None = None,
    title: str = "",
) -> dict[str, Any]:
    """Train `recipe`; `resume` continues a run that is there. With `beam_options`, a miner works beside rank 0.

    `metrics`: host and port where rank 0 serves metrics for Prometheus. `grace`: seconds after SIGTERM or SIGHUP for
    saving a checkpoint; 0: the process ends at once. `goes_on` is asked after each epoch: False leaves the run there.
    `title`: what progress is called; "" is by the recipe.
    Returns {"epochs": [...], "table_versions": {epoch: table epoch or None}}. Raises ExtremisError: ClaimedError while
    another process trains RUN, StoppedError where a signal stopped this one.
    """
    with owning(run, group, data) as claim, stopping_on_signal(grace) as asked, logged(run) as log:
        doing(f"{title or 'train'}: reading the data")
        is_there = resume and group.decide(lambda: storage.exists(RunLayout(run).config))
        trainer = (Trainer.resume if is_there else Trainer.start)(data, run, recipe, say, group, claim)
        if group.first:
            log.begin()
            keep_command(RunLayout(run))
        interrupts = Interrupts(asked)
        trainer.runner.interrupts = interrupts
        state = MetricsState(recipe.order.batch)
        trainer.on_record(state.record)
        recipe, epochs, miner = trainer.recipe, list[dict[str, Any]](), None
        if group.first and beam_options is not None and recipe.table_epochs():
            verb = "cluster" if recipe.clusters else "mine"
            miner = start_miner(data, run, log, beam_options, verb, interrupts.miner_ended)
        try:
            with (
                serving(state, metrics if group.first else None, say),
                Bar(title or f"train {recipe.title}", trainer.runner.total_steps, quiet=not group.first) as bar,
            ):

                def on_step(step: int, total: int, loss: float) -> None:
                    state.step(step, total, loss)
                    bar.update(step, state.note(), total)

                with contextlib.closing(trainer.train(on_step)) as reports:
                    for report in reports:
                        epochs.append(_describe(report))
                        if group.first:
                            say(_line(report, recipe))
                        if goes_on is not None and not goes_on(report):
                            break
        finally:
            if miner is not None:
                miner.stop()
        if miner is not None:
            with contextlib.suppress(StorageError):  # the run is finished, whatever is left of its miner
                discard_unfinished_tables(RunLayout(run))
    return {"epochs": epochs, "table_versions": {row["epoch"]: row["table_epoch"] for row in epochs}}


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


def _line(report: EpochReport, recipe: Recipe) -> str:
    if recipe.negatives.all_labels:
        table = "every label"
    elif recipe.indexed_from is not None and report.epoch >= recipe.indexed_from:
        table = "own index"
    else:
        none = "random order" if recipe.clusters else "random only"
        table = none if report.adoption.table_epoch is None else f"table {report.adoption.table_epoch}"
    scores = "".join(
        f"  {name} {report.metrics[name]:.2f}" for name in ("P@1", "P@5", "PSP@5") if name in report.metrics
    )
    return (
        f"epoch {report.epoch} ({report.epoch + 1} of {report.epochs})  loss {report.loss:.3f}  {table}  "
        f"{report.seconds:.1f} s  {report.rows / max(report.seconds, 1e-9):,.0f} rows/s{scores}"
    )
