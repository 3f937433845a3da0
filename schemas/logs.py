"""Logs for collectors: one JSON object a line on standard error, also for what libraries write there."""

import contextlib
import io
import json
import logging
import os
import re
import sys
import threading
import traceback
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, TextIO

from schemas import commit
from schemas.errors import redact

LOG_FORMAT = "EXTREMIS_LOG_FORMAT"  # environment variable: json or text; miners and workers inherit it
about = {"run": "", "process": "python"}  # of this process, in each of its lines
_START = '{"time": "'  # of every line


def logs_json() -> bool:
    """Return whether lines on standard error are JSON."""
    return os.environ.get(LOG_FORMAT) == "json"


def json_line(level: str, event: str, message: str, **fields: Any) -> str:
    """Return a line: time (RFC 3339, UTC), level, run, process, commit, event, message, `fields`; no credentials."""
    time = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    body = {"time": time, "level": level, **about, "commit": commit(), "event": event, "message": message, **fields}
    text = json.dumps({name: redact(value) if isinstance(value, str) else value for name, value in body.items()})
    if "NaN" in text or "Infinity" in text:  # perhaps numbers, which JSON does not have
        text = json.dumps(json.loads(text, parse_constant=lambda number: None))
    return f"{text}\n"


def write_line(line: str) -> None:
    """Write a line to standard error; if it cannot be written, it is dropped without an error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk; a closed stream, or none
        sys.stderr.write(line)
        sys.stderr.flush()


def log_as(process: str) -> None:
    """Name this process in its lines. If JSON is asked for, all that Python writes to standard error becomes JSON."""
    about["process"] = process
    if logs_json() and sys.stderr is not None:
        sys.stderr = _JsonStream(sys.stderr)
        logging.captureWarnings(True)
        logging.getLogger().addHandler(_LibraryLogs(logging.WARNING))
        sys.excepthook = _log_exception
        threading.excepthook = lambda ended: _log_exception(ended.exc_type, ended.exc_value, ended.exc_traceback)


def _log_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    message = "".join(traceback.format_exception(kind, error, trace)).strip()
    write_line(json_line("error", "error", message, kind=kind.__name__))


class _LibraryLogs(logging.Handler):
    """Writes warnings of Python and logs of libraries."""

    def emit(self, record: logging.LogRecord) -> None:
        write_line(json_line(record.levelname.lower(), "log", self.format(record).strip(), logger=record.name))


class _JsonStream(io.TextIOBase):
    """A stream whose lines are JSON: it keeps lines of `json_line`, and makes such a line of any other line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begun = stream, threading.local()  # lines of different threads do not mix

    def write(self, text: str) -> int:
        *lines, self._begun.text = re.split(r"[\r\n]", getattr(self._begun, "text", "") + text)
        for line in filter(str.strip, lines):
            self._stream.write(f"{line}\n" if line.startswith(_START) else json_line("info", "output", line))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()
