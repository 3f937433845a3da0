"""Worker process of `processes.py`: Beam's own, but silent, and it ends with its launching process."""

import logging
import os
import sys
import threading
import time

_LOOK_SECONDS = 0.5


def main() -> None:
    """Serve the runner that started this process until it is done, or gone."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Beam logs to the runner; without any other handler its first message would open one on standard error.
    logging.getLogger().addHandler(logging.NullHandler())
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main(sys.argv)


def _end_with(parent: int) -> None:
    """End with the launching process: a worker that outlived a killed run would write beside the next one."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
