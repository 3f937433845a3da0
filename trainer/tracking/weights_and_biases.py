"""Tracking with Weights & Biases, through its own library and settings (WANDB_MODE, WANDB_ENTITY, `wandb login`, …)."""

import os
import uuid
from collections.abc import Mapping
from typing import Any

from schemas.errors import InputError, MissingExtra
from trainer.tracking.watchers import RunFacts, Watcher

_FINISH_SECONDS = 60.0  # maximum wait for unsent numbers at the end of a run; `wandb sync` sends them later


class WeightsAndBiases(Watcher):
    """Sends numbers to a run of `project`; the files of W&B are in RUN/wandb if RUN is on a local disk."""

    def __init__(self, facts: RunFacts, project: str) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("logging.wandb needs wandb", "wandb") from None
        self._library: Any = wandb
        self._facts, self._project = facts, project
        self._run: Any = None
        self._sent = 0  # the step up to which W&B has all numbers

    def start(self, step: int, identity: str | None) -> str:
        wandb, facts = self._library, self._facts
        in_run = None if facts.is_temporary or "WANDB_DIR" in os.environ else str(facts.folder)
        try:
            self._run = wandb.init(
                project=self._project,
                name=facts.title,
                id=identity or uuid.uuid4().hex[:12],
                resume="allow",
                config=dict(facts.recipe),
                dir=in_run,
                settings=wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_SECONDS),
            )
        except wandb.Error as error:
            raise InputError(
                f"logging.wandb = {self._project!r}: {error}. Log in with `wandb login`, set WANDB_MODE=offline, or "
                'turn it off with --set logging.wandb=""'
            ) from None
        self._sent = self._run.step if identity else 0
        offline = self._run.settings.mode in ("offline", "dryrun")
        facts.say(
            f"W&B: {f'offline; to upload, run wandb sync {self._run.settings.sync_dir}' if offline else self._run.url}"
        )
        return str(self._run.id)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        if numbers and step >= self._sent:  # W&B accepts each step once; a resumed run repeats the same numbers
            self._run.log(dict(numbers), step=step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
