"""Train, alone or with a miner of its own beside."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from extremis.console import Bar, say
from schemas import storage
from schemas.errors import ExtremisError
from schemas.layout import RunLayout
from trainer.config import Recipe
from trainer.loop import EpochReport, Trainer

PARENT = "EXTREMIS_PARENT"  # process id of the trainer that a miner works for


def train(
    data: str, run: str, recipe: Recipe, resume: bool = False, beam_options: Sequence[str] | None = None
) -> dict[str, Any]:
    """Train `recipe`; `resume` goes on where a run is already. With `beam_options` given, a miner works beside.

    Returns {"epochs": [...], "table_versions": {epoch: table epoch or None}}. Raises ExtremisError.
    """
    if resume and storage.exists(RunLayout(run).config):
        trainer = Trainer.resume(data, run, recipe, say)
    else:
        trainer = Trainer.start(data, run, recipe, say)
    miner = None
    if beam_options is not None and trainer.recipe.table_epochs():
        miner = _start_miner(data, run, beam_options)
    try:
        return _watch(trainer)
    finally:
        if miner is not None:
            _stop_miner(miner)


def _watch(trainer: Trainer) -> dict[str, Any]:
    recipe = trainer.recipe
    epochs: list[dict[str, Any]] = []
    with Bar(f"train {recipe.method}", trainer.total_steps) as bar:
        for report in trainer.train(lambda step, total, loss: bar.update(step, f"loss {loss:.3f}")):
            epochs.append(_describe(report))
            bar.say(_line(report, recipe.train.epochs))
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


def _line(report: EpochReport, epochs: int) -> str:
    table = "random negatives" if report.adoption.table_epoch is None else f"table {report.adoption.table_epoch}"
    scores = "".join(
        f"  {name} {report.metrics[name]:.2f}" for name in ("P@1", "P@5", "PSP@5") if name in report.metrics
    )
    return (
        f"epoch {report.epoch + 1}/{epochs}  loss {report.loss:.3f}  {table}  "
        f"{report.seconds:.1f} s  {report.rows / max(report.seconds, 1e-9):,.0f} rows/s{scores}"
    )


def _start_miner(data: str, run: str, beam_options: Sequence[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "extremis", "mine", data, run, "--watch"]
    if beam_options:
        command += ["--", *beam_options]
    try:
        return subprocess.Popen(command, env={**os.environ, PARENT: str(os.getpid())}, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ExtremisError(f"cannot start the miner ({' '.join(command)}): {error}.") from error


def _stop_miner(miner: subprocess.Popen) -> None:
    """A miner ends by itself when the run is finished; one still at work after that makes a table nobody will use."""
    status = miner.poll()
    if status not in (None, 0):
        say(f"the miner ended early with status {status}; later epochs used older tables or random negatives")
    if status is None:
        miner.terminate()
        try:
            miner.wait(10)
        except subprocess.TimeoutExpired:
            miner.kill()
            miner.wait()
