"""Process each dump of a trainer as soon as it is complete, until the run is finished."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from schemas import storage
from schemas.errors import LASTING_STATUSES, ClaimedError, ExtremisError, InputError, PlanError, RoomError, option
from schemas.layout import RunLayout
from schemas.manifest import Manifest
from schemas.owners import watched
from schemas.states import showing
from schemas.storage import join, read_json
from schemas.waits import Say, waiting

Tables = Mapping[str, Manifest]  # by source
RETRIES = 5  # further attempts if the work on a dump fails; work on wrong input is not retried
_POLL_LOCAL, _POLL_REMOTE = 0.5, 5.0  # seconds between two checks for a dump


def watch_dumps(
    run: str, doing: str, complete: Callable[[], dict[int, str]], make: Callable[[int], Tables], say: Say
) -> int:
    """Call `make(epoch)` for every dump in `complete()`, which maps epochs to digests, until the run is finished.

    The oldest dump comes first. `make` returns the tables that it built; this function returns the number of dumps with
    new tables. Heartbeats at RUN show what it is `doing`, or waits for. If a trainer resumes from an earlier checkpoint
    and withdraws dumps, the function waits for the new dumps. While another process is working on a dump, the function
    waits. If storage fails or is full, or if processing a dump fails, the function waits and retries, up to RETRIES
    times in a row. Raises the errors of `make`.
    """
    pause = _POLL_LOCAL if storage.is_local(run) else _POLL_REMOTE
    layout, seen, after, failures, again = RunLayout(run), dict[int, str](), "", 0, 0.0
    facts: dict[str, Any] = {"tables": 0, "retries": 0}
    until = "the process is stopped, or the run is finished"
    with watched(run, doing), showing(facts.copy):
        for wait in waiting(f"a run at {run}", say, every=pause, until=until):
            epoch, digest = None, ""
            try:
                while time.monotonic() >= again:
                    if storage.exists(layout.finished):
                        return facts["tables"]
                    dumps = complete()
                    seen = {epoch: seen[epoch] for epoch in seen if epoch in dumps}  # a run may be started again
                    new = [(epoch, digest) for epoch, digest in dumps.items() if seen.get(epoch) != digest]
                    if not new:
                        failures = 0
                        begun = storage.exists(layout.config)
                        wait.change(f"the next dump of {run}{after}" if begun else f"a run at {run}")
                        break
                    epoch, digest = new[0]
                    facts["epoch"], began = epoch, time.monotonic()
                    if made := make(epoch):
                        facts |= {"tables": facts["tables"] + 1, "table_seconds": time.monotonic() - began}
                        recalls = [recall for table in made.values() if (recall := table.quality.get("recall_at_k"))]
                        facts["recall"] = min(recalls, default=None)
                    seen[epoch], failures, after = digest, 0, f" after epoch {epoch}"
            except ClaimedError:
                wait.change(f"another process that is working on the dump of epoch {epoch} of {run},")
            except ExtremisError as error:
                lasts = error.exit_status in LASTING_STATUSES and not isinstance(error, PlanError)
                if lasts and epoch is not None and complete().get(epoch) != digest:
                    continue
                failures, facts["retries"] = failures + 1, facts["retries"] + 1
                if failures > RETRIES and isinstance(error, PlanError):  # for a watcher, which has begun, it may pass
                    raise RoomError(str(error)) from error
                if lasts or failures > RETRIES:
                    raise
                say(f"{error} Retry {failures} of {RETRIES}.")
                again = time.monotonic() + pause * 2**failures
                wait.change(f"attempt {failures + 1} to read the dumps of {run}")
    raise AssertionError  # the wait has no end


def require_unused(run: str, url: str, manifest: Manifest) -> None:
    """Raise InputError if an unfinished run trains on this table.

    A trainer reads a table until the trainer adopts the next table, and reads the table again when the run resumes.
    """
    layout = RunLayout(run)
    if storage.exists(layout.finished):
        return
    for name in storage.list_names(layout.adoptions):
        record = read_json(join(layout.adoptions, name))
        if manifest.digest in record["digests"].values():
            raise InputError(
                f"{url}: epoch {record['epoch']} of this run trains on this table, and the run has not finished, so "
                f"the table cannot be replaced. Publish the new table with {option('out')}, or use a newer dump."
            )
