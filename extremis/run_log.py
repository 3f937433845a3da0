"""RUN/run.log: every line of a run with its time, and those of its miner, which nothing else shows."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from extremis.console import output, present_output
from schemas import storage
from schemas.errors import ExtremisError
from schemas.layout import RunLayout


class RunLog:
    """Lines that are kept until `begin`, and then appended to RUN/run.log: a command that fails early leaves no file.

    Object stores cannot append: there the file is written whole, by `close`. What cannot be written is lost, and stops
    nothing.
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
        """Open the file, for this line and all before."""
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
        """End the file."""
        with self._lock, contextlib.suppress(OSError, ExtremisError):
            if self._file is not None:
                if not storage.is_local(self._url):
                    self._file.seek(0)
                    storage.write_bytes(self._url, self._file.read().encode())
                self._file.close()


@contextlib.contextmanager
def logged(run: str) -> Iterator[RunLog]:
    """Write what is said until the block ends to RUN's log, or to that of the block around."""
    around = present_output().log
    if isinstance(around, RunLog):
        yield around
        return
    with contextlib.closing(RunLog(run)) as log, output(log=log):
        yield log
