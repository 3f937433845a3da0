"""Records of a run: metrics.jsonl, and their numbers in TensorBoard, W&B, MLflow or a watcher of one's own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schemas import storage
from schemas.errors import (
    ClaimLostError,
    InputError,
    StorageError,
    TableError,
    missing_extra,
    option,
    redact,
)
from schemas.layout import RunLayout
from schemas.owners import Claim, Unclaimed
from schemas.storage import join, parse_object, read_json, write_json
from schemas.waits import Say, Wait
from trainer.methods.keys import flatten
from trainer.methods.kinds import import_name
from trainer.methods.sections import WATCHERS, Logging

FOLDER = "tensorboard"
_FINISH_SECONDS = 60.0  # maximum wait for unsent numbers at the end of a run; `wandb sync` sends them later
_PARAMETERS = 100  # parameters in one request
_LONGEST = 500  # characters of a parameter
_WAIT_SECONDS = 60.0  # maximum wait for unsent numbers at the end of a run
Listener = Callable[[str, int, Mapping[str, Any]], None]  # kind, step, values


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run at `url` for its watchers.

    `folder`: a local folder for files, which persists unless `is_temporary`; `recipe`: the run's options by section;
    `say`: prints a line on the terminal.
    """

    url: str
    folder: Path
    is_temporary: bool
    recipe: Mapping[str, Any]
    say: Say

    @property
    def title(self) -> str:
        """Last component of the run's URL."""
        return redact(self.url).rstrip("/").rpartition("/")[2]


class Tracker:
    """Appends records to metrics.jsonl and sends their numbers to the watchers that `options` name.

    Object stores cannot append, so files for an object store are kept locally, and `sync` publishes whole files if this
    process owns the run's `claim`. Raises InputError if a watcher's library is not installed.
    """

    def __init__(
        self,
        run: RunLayout,
        options: Logging,
        recipe: Mapping[str, Any] | None = None,
        claim: Claim | None = None,
        say: Say = print,
    ) -> None:
        self._run, self._claim, self._say = run, claim or Unclaimed(), say
        self._folder = None if storage.is_local(run.root) else tempfile.TemporaryDirectory(prefix="extremis-")
        root = Path(self._folder.name if self._folder else storage.filesystem(run.root)[1])
        root.mkdir(parents=True, exist_ok=True)
        self._metrics = root / "metrics.jsonl"
        self._events = root / FOLDER
        self._file: Any = None
        self._failed = False
        self._listeners: list[Listener] = []
        facts = RunFacts(run.root, root, self._folder is not None, recipe or {}, say)
        values = {option: getattr(options, option) for option in WATCHERS}
        self._watchers: dict[str, Watcher] = {
            option: import_name(WATCHERS[option])(facts, value) for option, value in values.items() if value
        }

    def watch(self, listener: Listener) -> None:
        """Call `listener` with every record from now on."""
        self._listeners.append(listener)

    def start(self, step: int) -> None:
        """Continue after global `step`: later records will be written again. Raises InputError of a watcher's setup."""
        records, services = read_metrics(self._run) if step else [], dict[str, Any]()
        with contextlib.suppress(FileNotFoundError, TableError):
            services = read_json(self._run.services) if step else {}
        started = {name: watcher.start(step, services.get(name)) for name, watcher in self._watchers.items()}
        if identities := {name: identity for name, identity in started.items() if identity}:
            write_json(self._run.services, {**services, **identities})
        kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
        storage.write_bytes(str(self._metrics), "".join(kept).encode())
        self._file = self._metrics.open("a")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line {"kind", "step", ...}, and send the numbers in the record to the watchers, named by `tag`."""
        for listener in self._listeners:
            listener(kind, step, values)
        with self._goes_on():
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
            for watcher in self._watchers.values():
                watcher.record(step, numbers_of(kind, values))

    def sync(self) -> None:
        """Publish all records so far. Raises ClaimLostError, StorageError."""
        with self._goes_on():
            self._file.flush()
            for watcher in self._watchers.values():
                watcher.flush()
        if self._folder is None:
            return
        self._claim.require()
        storage.write_bytes(self._run.metrics, self._metrics.read_bytes())
        for event in sorted(self._events.glob("*")) if self._events.exists() else []:
            storage.write_bytes(join(self._run.tensorboard, event.name), event.read_bytes())

    def close(self, finished: bool = False) -> None:
        """Publish the remaining records; `finished`: whether the run reached its end. Raises StorageError only then."""
        if self._file is None:
            return
        # Another process may own the records of the run, or storage may have failed already.
        with contextlib.suppress(ClaimLostError, *([] if finished else [StorageError])):
            self.sync()
        with self._goes_on():
            self._file.close()
        for watcher in self._watchers.values():
            watcher.close(finished)
        if self._folder is not None:
            self._folder.cleanup()

    @contextlib.contextmanager
    def _goes_on(self) -> Iterator[None]:
        """Continue if a record cannot be written, and report the error once: logging never stops training."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._say(f"{self._run.metrics}: records are lost: {error.strerror}. Training continues")
            self._failed = True


class NoTracker:
    """The tracker of a rank that does not report: it accepts the same calls and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def read_metrics(run: RunLayout) -> list[dict[str, Any]]:
    """Read all records of a run, oldest first, without lines that a crash truncated or records without a step."""
    try:
        records = map(parse_object, storage.read_bytes(run.metrics).splitlines())
    except FileNotFoundError:
        return []
    return [record for record in records if record and isinstance(record.get("step"), int | float)]


class Watcher:
    """A destination for a run's numbers, with its own library; created from `RunFacts` and the value of an option."""

    def start(self, step: int, identity: str | None) -> str | None:
        """Begin a run, or continue the run `identity` after global `step`; return its identity. Raises InputError."""

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the `numbers_of` a record, without waiting for a response."""

    def flush(self) -> None:
        """Write pending numbers to local files."""

    def close(self, finished: bool) -> None:
        """Send pending numbers, and whether the run reached its end."""


def tag(kind: str, name: str) -> str:
    """Return the name of a number in watchers, which group names with the same first part."""
    if name.startswith("seconds_"):
        return f"time/{name.removeprefix('seconds_')}"
    if name.endswith("_lr"):
        return f"rate/{name.removesuffix('_lr')}"
    if kind in ("adoption", "epoch") and name.startswith("table_"):
        return f"table/{name.removeprefix('table_')}"
    return {"rows_per_second": "throughput/rows_per_second"}.get(name, f"{kind}/{name}")


def numbers_of(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, keyed by `tag`."""
    return {
        tag(kind, name): value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard(Watcher):
    """Writes numbers to RUN/tensorboard."""

    def __init__(self, facts: RunFacts) -> None:
        self._events = facts.folder / FOLDER
        self._writer: Any = None

    def start(self, step: int, identity: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._events), purge_step=step if step else None)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


def open_tensorboard(facts: RunFacts, wanted: bool | str) -> Watcher:
    """Return TensorBoard's watcher; one that does nothing if `wanted` is "auto" and tensorboard is not installed."""
    if find_spec("tensorboard") is not None:
        return TensorBoard(facts)
    if wanted != "auto":
        raise missing_extra("logging.tensorboard = true needs tensorboard", "tensorboard")
    facts.say(f"{facts.url}/{FOLDER} is not written: tensorboard is not installed (extra `tensorboard`)")
    return Watcher()


class WeightsAndBiases(Watcher):
    """Sends numbers to a run of `project`; the files of W&B are in RUN/wandb if RUN is on a local disk."""

    def __init__(self, facts: RunFacts, project: str) -> None:
        try:
            import wandb
        except ImportError:
            raise missing_extra("logging.wandb needs wandb", "wandb") from None
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
                f"turn it off with {option('set', {'logging.wandb': ''})}"
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


class MLflow(Watcher):
    """Sends numbers to a run of `experiment` from a separate thread, so that a slow server does not delay training."""

    def __init__(self, facts: RunFacts, experiment: str) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise missing_extra("logging.mlflow needs mlflow", "mlflow") from None
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
                f"works, or turn MLflow off with {option('set', {'logging.mlflow': ''})}"
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
        if name not in self._steps:
            self._steps[name] = {metric.step for metric in self._client.get_metric_history(self._run, name)}
        return self._steps[name]


def metric_name(name: str) -> str:
    """Return the name in a form that MLflow accepts: `validation/P@1` is `validation/P_at_1`."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))
