"""Records of a run while it trains: metrics.jsonl and TensorBoard, on a local disk or behind any URL."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas import storage
from schemas.layout import RunLayout
from schemas.owners.claim import Claim, LostError, Unclaimed
from schemas.storage import join

Watcher = Callable[[str, int, Mapping[str, Any]], None]  # kind, step, values


class Tracker:
    """Appends records to metrics.jsonl and mirrors their numbers to TensorBoard.

    Object stores cannot append, so there the files are kept locally and published whole by `sync`, by the owner of
    the run's `claim`.
    """

    def __init__(self, run: RunLayout, tensorboard: bool = True, claim: Claim | None = None) -> None:
        self._run, self._claim = run, claim or Unclaimed()
        self._local = storage.is_local(run.root)
        self._folder: tempfile.TemporaryDirectory | None = None
        if self._local:
            root = Path(storage.filesystem(run.root)[1])
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="extremis-")
            root = Path(self._folder.name)
        root.mkdir(parents=True, exist_ok=True)
        self._metrics = root / "metrics.jsonl"
        self._events = root / "tensorboard"
        self._tensorboard = tensorboard
        self._writer: Any = None
        self._file: Any = None
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with every record from now on."""
        self._watchers.append(watcher)

    def start(self, step: int) -> None:
        """Go on after global `step`: what an interrupted run recorded beyond it will be recorded again."""
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            lines = storage.read_bytes(self._run.metrics).decode().splitlines()
        kept = [line for line in lines if _step_of(line) <= step] if step else []
        storage.write_bytes(str(self._metrics), "".join(f"{line}\n" for line in kept).encode())
        self._file = self._metrics.open("a")
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._events), purge_step=step if step else None)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line {"kind", "step", ...}; numbers also go to TensorBoard under `tag(kind, name)`."""
        for watcher in self._watchers:
            watcher(kind, step, values)
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(tag(kind, name), value, step)

    def sync(self) -> None:
        """Publish what was recorded so far. Raises LostError, StorageError."""
        self._file.flush()
        if self._writer is not None:
            self._writer.flush()
        if self._local:
            return
        self._claim.require()
        storage.write_bytes(self._run.metrics, self._metrics.read_bytes())
        for event in sorted(self._events.glob("*")) if self._events.exists() else []:
            storage.write_bytes(join(self._run.tensorboard, event.name), event.read_bytes())

    def close(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(LostError):  # the records there are another's
            self.sync()
        self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            self._folder.cleanup()


def tag(kind: str, name: str) -> str:
    """Return the name of a scalar in TensorBoard, which shows those with the same first part together."""
    if name.startswith("seconds_"):
        return f"time/{name.removeprefix('seconds_')}"
    if name.endswith("_lr"):
        return f"rate/{name.removesuffix('_lr')}"
    if kind in ("adoption", "epoch") and name.startswith("table_"):
        return f"table/{name.removeprefix('table_')}"
    return {"rows_per_second": "throughput/rows_per_second"}.get(name, f"{kind}/{name}")


class NoTracker:
    """The tracker of a rank that does not report."""

    def watch(self, watcher: Watcher) -> None: ...

    def start(self, step: int) -> None: ...

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def read_metrics(run: RunLayout) -> list[dict[str, Any]]:
    """Read all records of a run, oldest first; a line cut off by a crash is left out."""
    try:
        lines = storage.read_bytes(run.metrics).decode().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return records


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
