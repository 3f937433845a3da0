"""Worker process: Beam's own, but silent; it ends with the process that started it.

Of `boot.py` it serves the one runner that its environment names; of `processes.py` one after the other.
"""

import json
import logging
import os
import sys
import threading

from schemas.waits import waiting

_LOOK_SECONDS = 0.5


def main() -> None:
    """Serve the runner that the environment names, or with an argument one after the other."""
    if len(sys.argv) == 1:
        serve()
    else:
        serve_many(int(sys.argv[1]))


def serve() -> None:
    """Serve the runner that the environment names, to its end."""
    _prepare_process()
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main([])


def serve_many(answers: int) -> None:
    """Serve the runners that come on standard input, until it ends.

    Each line is an object of environment variables, answered by a line on the file descriptor `answers`.
    """
    _prepare_process()
    from apache_beam.runners.worker import sdk_worker_main

    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 Beam prints there what it passes on
    with open(answers, "w", encoding="ascii") as done:
        for line in sys.stdin:
            os.environ.update(json.loads(line))
            sdk_worker_main.main([])
            print("done", file=done, flush=True)
    os._exit(0)  # all is written; taking Beam and gRPC down would keep the launching process for half a second


def _prepare_process() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Beam logs to the runner; without any other handler its first message would open one on standard error.
    logging.getLogger().addHandler(logging.NullHandler())


def _end_with(parent: int) -> None:
    """End with the launching process: a worker that outlived a killed run would write beside the next one."""
    for _ in waiting("", every=_LOOK_SECONDS):
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
