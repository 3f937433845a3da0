"""Records of a run while it trains: metrics.jsonl on a local disk or at any URL, and watchers."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from schemas import storage
from schemas.errors import StorageError, TableError
from schemas.json_files import parse_object, read_json, write_json
from schemas.layout import RunLayout
from schemas.owners.claim import Claim, ClaimLostError, Unclaimed
from schemas.storage import join
from trainer.methods.sections import Logging
from trainer.tracking.tensorboard import FOLDER
from trainer.tracking.watchers import RunFacts, Say, numbers_of, open_watchers

Listener = Callable[[str, int, Mapping[str, Any]], None]  # kind, step, values


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
        self._watchers = open_watchers(options, RunFacts(run.root, root, self._folder is not None, recipe or {}, say))

    def watch(self, listener: Listener) -> None:
        """Call `listener` with every record from now on."""
        self._listeners.append(listener)

    def start(self, step: int) -> None:
        """Continue after global `step`: records of an interrupted run after this step will be written again.

        Raises InputError if a watcher's setup fails.
        """
        before = read_metrics(self._run) if step else []
        self._start_watchers(step)
        kept = [json.dumps(record) + "\n" for record in before if record["step"] <= step]
        storage.write_bytes(str(self._metrics), "".join(kept).encode())
        self._file = self._metrics.open("a")

    def _start_watchers(self, step: int) -> None:
        """Start all watchers, and record the identity that each watcher gives this run."""
        before: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, TableError):
            before = read_json(self._run.services) if step else {}
        identities = {name: watcher.start(step, before.get(name)) for name, watcher in self._watchers.items()}
        identities = {name: identity for name, identity in identities.items() if identity}
        if identities:
            write_json(self._run.services, {**before, **identities})

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
