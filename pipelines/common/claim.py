"""Claim on the tables of a dump: one process at a time holds it, by a file beside them that it renews while it works.

Nothing rests on it but work done once: two miners of one dump would publish the same bytes, but remove each other's
candidates on the way. A claim whose owner was killed is taken over: at once where the process is known to be gone,
else after LEASE_SECONDS without a change, by the observer's own clock.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from schemas import storage
from schemas.errors import InputError, StorageError
from schemas.storage import join

FILE = ".claim.json"
BEAT_SECONDS = 2.0
LEASE_SECONDS = 15.0
SETTLE_SECONDS = 0.2


class ClaimedError(InputError):
    """Error: another process is mining this dump."""


@contextlib.contextmanager
def claimed(root: str) -> Iterator[None]:
    """Hold the claim on the tables under `root`. Raises ClaimedError while another process holds it; StorageError."""
    place = join(root, FILE)
    before = _read(place)
    if before is not None and _alive(place, before):
        raise _claimed_by(root, before)
    owner = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
    ended = threading.Event()
    storage.write_bytes(place, _body(owner, 0), durable=False)
    time.sleep(SETTLE_SECONDS)  # of several that found it free at the same time the last to write has it
    after = _read(place)
    if after is not None and json.loads(after)["id"] != owner["id"]:
        raise _claimed_by(root, after)
    beating = threading.Thread(target=_beat, args=(place, owner, ended), name="extremis-claim", daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
        storage.remove(place)


def _claimed_by(root: str, claim: bytes) -> ClaimedError:
    owner = json.loads(claim)
    return ClaimedError(
        f"{root}: being mined by process {owner['pid']} on {owner['host']}. Let it finish, or end it and run the same "
        "command again."
    )


def _beat(place: str, owner: dict[str, object], ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT_SECONDS):
        count += 1
        with contextlib.suppress(StorageError):  # the next one may pass
            storage.write_bytes(place, _body(owner, count), durable=False)


def _alive(place: str, before: bytes) -> bool:
    """Tell whether the process that wrote `before` still works; waits for up to LEASE_SECONDS to see."""
    owner = json.loads(before)
    if owner["host"] == socket.gethostname() and not _runs(owner["pid"]):
        return False
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(0.2, LEASE_SECONDS / 10))
        claim = _read(place)
        if claim != before:
            return claim is not None  # gone: it is done, and the claim is free
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(place: str) -> bytes | None:
    try:
        claim = storage.read_bytes(place)
        json.loads(claim)["id"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return claim


def _body(owner: dict[str, object], count: int) -> bytes:
    return json.dumps({**owner, "beat": count}).encode()
