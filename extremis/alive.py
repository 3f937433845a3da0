"""A sign of life on this machine for a health check (images/health.py). It needs no storage, which may be away."""

import contextlib
import os
import threading
import time
from pathlib import Path

ALIVE = "EXTREMIS_ALIVE"  # environment variable: a folder for the signs of all processes
_SECONDS = 2.0


def show_alive() -> None:
    """If ALIVE is set, start a thread that writes this process's file there every two seconds."""
    if not os.environ.get(ALIVE):
        return
    from schemas.owners import Owner

    here = Owner.here("at work")
    place = Path(os.environ[ALIVE], f"extremis-{here.pid}.alive")

    def work() -> None:
        while True:
            with contextlib.suppress(OSError):
                place.write_text(here.born)
            time.sleep(_SECONDS)

    threading.Thread(target=work, name="extremis-alive", daemon=True).start()
