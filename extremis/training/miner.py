"""A miner process beside the trainer: it starts and ends with the trainer, however that ends."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

from extremis.console import say
from schemas.errors import ExtremisError

ATTACHED = "EXTREMIS_ATTACHED"  # set for a miner whose standard input a trainer holds open


def start_miner(data: str, run: str, beam_options: Sequence[str], verb: str = "mine") -> subprocess.Popen:
    """Start `extremis mine --watch`, or `extremis cluster`, as a process of its own. Raises ExtremisError."""
    command = [sys.executable, "-m", "extremis", verb, data, run, "--watch"]
    if beam_options:
        command += ["--", *beam_options]
    try:
        return subprocess.Popen(command, env={**os.environ, ATTACHED: "1"}, stdin=subprocess.PIPE)
    except OSError as error:
        raise ExtremisError(f"cannot start the miner ({' '.join(command)}): {error}.") from error


def stop_miner(miner: subprocess.Popen) -> None:
    """Stop the miner. It ends by itself when the run is finished; a table it still makes would not be used."""
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


def end_with_trainer() -> None:
    """End this process as soon as the trainer that started it is gone, even by `kill -9`; else do nothing.

    A miner that outlived its trainer would write the same files as the miner of the resumed run.
    """
    if ATTACHED not in os.environ:
        return

    def wait() -> None:
        while os.read(0, 1024):  # nothing is sent: the read returns when the other end is closed
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
