"""Worker process, which ends with the process that started it: of this machine's runner, or Beam's own, but silent."""

import logging
import os
import signal
import sys
import threading

from pipelines.runners import local
from schemas.waits import waiting

_LOOK_SECONDS = 0.5


def main() -> None:
    """Serve the runner behind a pipe, whose file descriptor is the argument; without one as `serve_beam`."""
    if len(sys.argv) == 1:
        serve_beam()
        return
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process ends this one
    local.serve(int(sys.argv[1]))


def serve_beam() -> None:
    """Serve the Beam runner that the environment names, to its end."""
    _end_with_parent()
    # Beam logs to the runner; without any other handler its first message would open one on standard error.
    logging.getLogger().addHandler(logging.NullHandler())
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main([])


def _end_with_parent() -> None:
    """End with the launching process: a worker that outlived a killed run would write beside the next one."""

    def look(parent: int) -> None:
        for _ in waiting("", every=_LOOK_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=look, args=(os.getppid(),), daemon=True).start()


if __name__ == "__main__":
    main()
