"""Calls side by side, each in a process whose lines this process shows and logs; or in a row, in this process."""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple, TypeVar, cast

from extremis.console import Bar, Event, current_output, logger, output, say
from extremis.stopping import stopping_on_signal
from extremis.supervisor import RunLog
from schemas.errors import FRONT_END, PeerError, option, recognise
from schemas.logs import log_as
from schemas.process import end_with_parent, python_command
from trainer.refresh.adoption import StoppedError
from trainer.threads import set_threads

_POLL_SECONDS = 0.2
Result = TypeVar("Result")


class _Process(NamedTuple):
    """A process that makes one call after the other."""

    popen: subprocess.Popen
    pipe: Connection

    @classmethod
    def start(cls, threads: int) -> "_Process":
        pipe, theirs = Pipe()
        command = python_command(f"from extremis.processes import serve; serve({theirs.fileno()}, {os.getpid()})")
        env = {**os.environ, FRONT_END: os.environ.get(FRONT_END, "python"), "OMP_NUM_THREADS": str(threads)}
        with theirs:
            return cls(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]), pipe)


class Calls:
    """Makes calls in at most `count` processes, which share `threads`; with one, here, when a result is wanted.

    A context manager. Signals reach the processes as in `stopping_on_signal`.
    """

    def __init__(self, count: int, threads: int, log: RunLog, grace: float) -> None:
        self.count, self._threads, self._log, self._grace = count, threads, log, grace
        self._pool, self._all, self._idle = ThreadPoolExecutor(count), list[_Process](), list[_Process]()
        self._lock, self._bar, self._steps = threading.Lock(), Bar("", None, quiet=True), dict[str, tuple[int, int]]()
        self._is_told = False

    def __enter__(self) -> "Calls":
        self._held = contextlib.ExitStack()  # with one process, what runs here takes the signals
        self._stop = self._held.enter_context(stopping_on_signal(self._grace if self.count > 1 else 0))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(self._grace if kind is StoppedError else 0)
        self._held.close()

    @contextlib.contextmanager
    def bar(self, title: str) -> Iterator[None]:
        """Show one bar for the steps of all calls in the block."""
        with Bar(title, None) if self.count > 1 else contextlib.nullcontext(self._bar) as self._bar:
            self._steps.clear()
            yield

    def start(self, work: Callable[[], Result], name: str, share: int = 0) -> Callable[[], Result]:
        """Begin the call, and return a function that waits for its result. Lines of the process begin with `name`.

        `share`: number of calls that share the threads; 0: as many as there are processes.
        """
        if self.count == 1:
            return work
        self._log.begin()
        future = self._pool.submit(self._do, work, name, max(1, self._threads // (share or self.count)))
        return lambda: self._wait(future)

    def end(self, grace: float = 0) -> None:
        """End all processes, with `grace` seconds to save a checkpoint after a signal."""
        for process in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(grace)
            process.popen.kill()
            process.popen.wait()
        self._pool.shutdown(cancel_futures=True)
        self._pool, self._all, self._idle = ThreadPoolExecutor(self.count), [], []

    def _wait(self, future: "Future[Result]") -> Result:
        while not wait_for([future], _POLL_SECONDS).done:
            if self._stop.is_set() and not self._is_told:  # a second signal would end a run without a checkpoint
                self._is_told = True
                for process in self._all:
                    process.popen.terminate()
        return future.result()

    def _do(self, work: Callable[[], Result], name: str, threads: int) -> Result:
        with self._lock:
            if not self._idle:
                self._idle.append(_Process.start(threads))
                self._all.append(self._idle[-1])
            process = self._idle.pop()
        try:
            now = current_output()
            process.pipe.send((work, threads, {"verbose": now.verbose, "command": now.command}))
            while not isinstance(answer := process.pipe.recv(), tuple):
                self._show(answer, name)
        except (EOFError, OSError):
            if self._stop.is_set():
                raise StoppedError(f"stopped by a signal. Continue with {option('resume', True)}.") from None
            raise PeerError(
                f"{name} ended with status {process.popen.wait()}; most likely it ran out of memory. Free some memory, "
                f"or give {option('threads', 1)}, which makes one call after the other."
            ) from None
        self._idle.append(process)
        result, error = answer
        if error is not None:
            raise error
        return cast(Result, result)

    def _show(self, line: Event | str, name: str) -> None:
        text = str(line) if str(line).startswith(name) else f"{name}: {line}"
        if isinstance(line, str):
            self._log.add(text)
        elif not line.title:
            say(text, line.kind, **line.fields)
        else:
            with self._lock:
                self._steps[line.title] = line.done or 0, line.total or 0
                done, total = map(sum, zip(*self._steps.values(), strict=True))
                self._bar.update(done, total=total)


class _Sender(RunLog):
    """Sends the lines that only a run's log gets."""

    def __init__(self, send: Callable[[str], None]) -> None:
        super().__init__("")
        self.add = send  # type: ignore[method-assign, assignment]

    def begin(self) -> None: ...

    def emit(self, record: logging.LogRecord) -> None:
        if current_output().log_only and not current_output().verbose:
            self.add(record.getMessage())


def serve(place: int, parent: int) -> None:
    """Make the calls that arrive on the pipe with the file descriptor `place`, until it closes or `parent` ends."""
    log_as("trainer")
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process stops this process
    pipe, sends, error = Connection(place), threading.Lock(), None

    def send(answer: object) -> None:
        with sends:
            pipe.send(answer)

    logger.addHandler(_Sender(send))
    while not isinstance(error, StoppedError):
        try:
            work, threads, changes = pipe.recv()
        except EOFError:
            return
        set_threads(threads)
        result, error = None, None
        try:
            with output(listener=send, **changes):
                result = work()
        except Exception as raised:
            error = recognise(raised) or RuntimeError("".join(traceback.format_exception(raised)))
        send((result, error))
