"""Tracking with MLflow, through its own library and settings (MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, …)."""

import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from schemas.errors import InputError, MissingExtra
from schemas.waits import Wait
from trainer.config.merging import flatten
from trainer.tracking.watchers import RunFacts, Watcher

_PARAMETERS = 100  # parameters in one request
_LONGEST = 500  # characters of a parameter
_WAIT_SECONDS = 60.0  # maximum wait for unsent numbers at the end of a run


class MLflow(Watcher):
    """Sends numbers to a run of `experiment` from a separate thread, so that a slow server does not delay training."""

    def __init__(self, facts: RunFacts, experiment: str) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise MissingExtra("logging.mlflow needs mlflow", "mlflow") from None
        self._facts, self._experiment = facts, experiment
        self._open_client = MlflowClient
        self._client: Any = None
        self._run = ""
        self._resumed = False
        self._steps: dict[str, set[int]] = {}  # of a resumed run: the steps of each metric that MLflow already has
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="extremis-mlflow", daemon=True)

    def start(self, step: int, identity: str | None) -> str:
        from mlflow.exceptions import MlflowException

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        self._resumed = identity is not None
        try:
            self._client = self._open_client()
            self._run = identity or self._begin()
            if identity:
                self._client.update_run(identity, status="RUNNING")
        except (MlflowException, ImportError) as error:
            raise InputError(
                f"logging.mlflow = {self._experiment!r}: {error}. Set MLFLOW_TRACKING_URI to a server or a store that "
                'works, or turn MLflow off with --set logging.mlflow=""'
            ) from None
        self._facts.say(f"MLflow: experiment {self._experiment}, run {self._run}")
        self._thread.start()
        return self._run

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        if numbers:
            named = {metric_name(name): value for name, value in numbers.items()}
            self._waiting.put((step, named, int(time.time() * 1000)))

    def close(self, finished: bool) -> None:
        self._waiting.put(None)
        with Wait("MLflow to accept the remaining records", self._facts.say, _WAIT_SECONDS):
            self._thread.join(_WAIT_SECONDS)
        if self._thread.is_alive():
            self._facts.say(
                f"MLflow: some records were not sent within {_WAIT_SECONDS:g} s; metrics.jsonl contains all records"
            )
            return
        try:
            self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")
        except Exception as error:  # of any store or network that the library uses
            self._facts.say(f"MLflow: {error}")

    def _begin(self) -> str:
        """Create a run of the experiment with the recipe as its parameters; return its id."""
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        run = str(self._client.create_run(number, run_name=self._facts.title).info.run_id)
        options = [Param(name, str(value)[:_LONGEST]) for name, value in flatten(self._facts.recipe).items()]
        for first in range(0, len(options), _PARAMETERS):
            self._client.log_batch(run, params=options[first : first + _PARAMETERS])
        return run

    def _send_all(self) -> None:
        failed = False
        while (record := self._waiting.get()) is not None:
            try:
                self._send(*record)
            except Exception as error:  # of any store or network that the library uses: the run continues
                if not failed:
                    self._facts.say(f"MLflow: {error}. Training continues; metrics.jsonl contains all records")
                failed = True

    def _send(self, step: int, numbers: Mapping[str, float], milliseconds: int) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, milliseconds, step)
            for name, value in numbers.items()
            if not self._resumed or step not in self._steps_of(name)
        ]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def _steps_of(self, name: str) -> set[int]:
        """Return the steps of a metric that the run had before it was resumed."""
        if name not in self._steps:
            self._steps[name] = {metric.step for metric in self._client.get_metric_history(self._run, name)}
        return self._steps[name]


def metric_name(name: str) -> str:
    """Return the name in a form that MLflow accepts: `validation/P@1` is `validation/P_at_1`."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))
