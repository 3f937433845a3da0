"""A miner process beside a trainer: it is watched and restarted, and ends with its trainer. Loads no PyTorch."""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence

from extremis.console import relay, say
from pipelines.options import DumpOptions
from schemas.errors import FRONT_END, LASTING_STATUSES, ExtremisError, InputError, PeerError, option
from schemas.process import RESERVED, end_with_parent, python_command
from schemas.waits import Say, Wait, waiting

RESTART_PAUSES = 2.0, 10.0, 30.0  # seconds before the restarts of a dead miner
_POLL_SECONDS = 0.2
TRAINER_PID = "EXTREMIS_ATTACHED"  # environment variable of a miner: the trainer's pid


def start_miner(
    data: str,
    run: str,
    log: Say,
    beam_options: Sequence[str],
    verb: str = "mine",
    ended: threading.Event | None = None,
    beside: int = 0,
) -> "Miner":
    """Start `extremis mine --watch` (or `cluster`) as a process; its output goes to `log`. Raises ExtremisError.

    `beside`: bytes of memory that the trainer plans to use.
    """
    words = (verb, "--watch", "--", data, run, *beam_options)  # a name may begin with a dash
    return Miner(python_command("from extremis.cli import main; main()", *words), log, ended, beside)


class Miner:
    """A miner process that is watched. If it dies, this is reported at once, and it is restarted after a pause.

    RESTART_PAUSES limits the number of restarts. `ended` is set when the miner has ended and is not restarted.
    """

    def __init__(self, command: Sequence[str], log: Say, ended: threading.Event | None = None, beside: int = 0) -> None:
        self._command, self._log, self._last = command, log, ""
        self._environment = {FRONT_END: "python", **os.environ, TRAINER_PID: str(os.getpid()), RESERVED: str(beside)}
        self._stopping, self._ended = threading.Event(), ended or threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, name="extremis-miner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the miner if it is still running after the end of the run; no epoch would use its unfinished table."""
        self._stopping.set()
        self._thread.join()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                with Wait("the miner to end", seconds=10):
                    self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _start(self) -> subprocess.Popen:
        try:
            process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise PeerError(f"cannot start the miner ({self._command[0]}): {error}.") from error
        output = process.stderr
        assert output is not None

        def read() -> None:
            for line in output:
                for self._last in relay(line, "miner").splitlines():
                    self._log(f"miner: {self._last}")

        self._reader = threading.Thread(target=read, name="extremis-miner-log", daemon=True)
        self._reader.start()
        return process

    def _watch(self) -> None:
        self._watch_and_restart()
        self._ended.set()

    def _watch_and_restart(self) -> None:
        for number, pause in enumerate([*RESTART_PAUSES, None], 1):
            for _ in waiting("", every=_POLL_SECONDS, stop=self._stopping):
                if self.process.poll() is not None:
                    break
            if self._stopping.is_set() or self.process.returncode == 0:
                return
            self._reader.join(_POLL_SECONDS)
            status = self.process.returncode
            ended = f"ended with status {status}"
            if status < 0:
                name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
                ended = f"was killed by {name}" + (" (perhaps out of memory)" if -status == signal.SIGKILL else "")
            ended += f": {self._last}" if self._last else ""
            if pause is None or status in LASTING_STATUSES:
                later = "later epochs use older tables, or only random negatives"
                say(f"the miner {ended} and is not started again: {later}", "miner", status=status)
                return
            say(
                f"the miner {ended}; restart in {pause:g} s ({number} of {len(RESTART_PAUSES)})",
                "miner",
                status=status,
                restart=number,
            )
            if self._stopping.wait(pause):
                return
            try:
                self.process = self._start()
            except ExtremisError as error:
                say(f"{error}")
                return


def end_with_trainer() -> None:
    """End this process when the trainer that started it ends, even by `kill -9`; without a trainer do nothing.

    A miner that outlived its trainer could write the same files as the miner of the resumed run. Ctrl-C is left to the
    trainer, which stops its miner.
    """
    if TRAINER_PID in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent(int(os.environ[TRAINER_PID]))


def require_watchable(watch: bool, options: DumpOptions, epoch: int | None) -> None:
    """Check that `watch` is not combined with options for a single dump or output. Raises InputError."""
    one_dump = {"epoch": epoch, "queries": options.queries, "out": options.out, "for_epoch": options.for_epoch}
    given = [option(name) for name, value in one_dump.items() if value is not None]
    given += [option("overwrite", True)] if options.overwrite else []
    if watch and given:
        both = f"{option('watch', True)} processes every dump and publishes each table in RUN"
        raise InputError(f"{both}. Leave out {' and '.join(given)}.")
