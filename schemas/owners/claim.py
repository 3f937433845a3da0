"""Claim on an output: one process at a time writes the output, and small files next to the output record the claim.

    .claim.json                the first claim on the output, written only if there is none
    .claim-after-<id>.json     the claim that took over from claim <id> after its owner was gone: at most one
    .claim-beat-<id>.json      changes every BEAT_SECONDS while the owner of claim <id> works

A claim file is never changed. The last claim in the chain owns the output. An owner is gone if it ran on this machine
and its process has ended, or if its beat has not changed for LEASE_SECONDS on the observer's clock; the clocks of two
machines are never compared. If an owner's beats are late, because the process was paused or cut off from storage, the
owner checks its claim before it writes anything (`Claim.require`). Until then, the owner's files are in the folder of
its attempt.

On a disk, and on stores with conditional writes such as S3 and GCS, only one process can create a file. Without
conditional writes, the last of several writers within SETTLE_SECONDS wins, and all writers check which writer won.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas import storage
from schemas.errors import InputError, StorageError, TableError
from schemas.owners.outputs import mark_kind, unmark_kind
from schemas.storage import join
from schemas.waits import Say, waiting

CLAIM_FILE = ".claim.json"
BEAT_SECONDS = 2.0
LEASE_SECONDS = 30.0
SETTLE_SECONDS = 0.2  # until every reader sees a write
_JOIN_SECONDS = 10.0  # wait for a beat while storage does not answer
_FRESH = 0.8  # share of the lease after which an owner checks again, because the rates of clocks differ a little


class ClaimedError(InputError):
    """Another process is writing this output."""


class ClaimLostError(ClaimedError):
    """Another process has taken over the claim of this process."""


@dataclass(frozen=True)
class Owner:
    """Process that claims an output: the kind of its work (`sharded`, `trained`), and facts that identify the process.

    `pid` is unique among the processes of `machine`; `born` identifies the start of the process.
    """

    id: str
    doing: str
    host: str
    machine: str
    pid: int
    born: str
    since: str

    @staticmethod
    def here(doing: str) -> "Owner":
        """Return this process as an owner."""
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return Owner(uuid.uuid4().hex, doing, socket.gethostname(), _machine(), pid, _born(pid), since)

    @staticmethod
    def read(content: bytes) -> "Owner":
        """Read a claim file; the owner of an unreadable file is unknown."""
        try:
            owner = Owner(**json.loads(content))
            if not re.fullmatch("[0-9a-f]{32}", owner.id) or type(owner.pid) is not int:
                raise ValueError("not a claim file of Extremis")
            return owner
        except (ValueError, TypeError, RecursionError):
            return Owner(storage.sha256(content)[:32], "written", "unknown", "", 0, "", "an unknown time")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def work(self) -> str:
        return f"being {self.doing} by {self} since {self.since}"

    def has_ended(self) -> bool:
        """Return whether this owner's process ran on this machine and has ended; False if this is unknown."""
        return self.machine == _machine() and _born(self.pid) != self.born


class Claim:
    """Claim of this process on the output at `root`, kept alive by a thread. Made by `claimed`."""

    def __init__(self, root: str, owner: Owner) -> None:
        self.root, self.owner = root, owner
        self._beats = 0
        self._confirmed = _clock()
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="extremis-claim", daemon=True)

    @property
    def attempt(self) -> str:
        """Name of the folder of the owner's unfinished files; no other claim has this name."""
        return self.owner.id[:16]

    def require(self) -> None:
        """Raise ClaimLostError unless this process still owns the output; after a recent beat, no request is made."""
        if self._lost is None and _clock() - self._confirmed < _FRESH * LEASE_SECONDS:
            return
        with self._lock:
            self._confirm()
        if self._lost is not None:
            raise ClaimLostError(
                f"{self.root}: {self._lost}, after this process gave no sign of life for {LEASE_SECONDS:g} seconds (it "
                "was paused, or could not reach storage). This process leaves the output as it is. Run the same "
                "command again if no other process continues the work."
            )

    def start(self) -> None:
        """Start the beats."""
        self._thread.start()

    def release(self) -> None:
        """Release the output, if this process still owns it."""
        self._ended.set()
        self._thread.join(storage.CLEAN_UP_SECONDS if storage.cleaning_up.is_set() else _JOIN_SECONDS)
        with contextlib.suppress(ClaimLostError, StorageError):
            self.require()
            chain = _chain(self.root)
            storage.remove(join(self.root, CLAIM_FILE))  # the output is free now
            for owner in chain:
                storage.remove(_successor_url(self.root, owner))
                storage.remove(_beat_url(self.root, owner))
            return
        with contextlib.suppress(StorageError):
            storage.remove(_beat_url(self.root, self.owner))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with self._lock, contextlib.suppress(StorageError):  # the next beat may succeed
                if self._lost is None:
                    self._confirm()

    def _confirm(self) -> None:
        """Beat; after a pause in which another process may have taken over, check who owns the output."""
        if self._lost is not None:
            return
        second = _clock()
        self._beats += 1
        beat = storage.seal(json.dumps({"beat": self._beats}).encode())
        if second - self._confirmed < _FRESH * LEASE_SECONDS:
            storage.write_bytes(_beat_url(self.root, self.owner), beat, durable=False)
            self._confirmed = second
            return
        chain = _chain(self.root)
        if chain and chain[-1] == self.owner:
            storage.write_bytes(_beat_url(self.root, self.owner), beat, durable=False)
            time.sleep(SETTLE_SECONDS)  # a process that takes over sees the beat, or this process sees its claim
            chain = _chain(self.root)
        if chain and chain[-1] == self.owner:
            self._confirmed = second
        else:
            self._lost = f"taken over by {chain[-1]}" if chain else "its claim is gone"


class Unclaimed(Claim):
    """Claim on an output that no other process can find; this claim is never lost."""

    def __init__(self) -> None:
        super().__init__("", Owner.here("made"))

    def require(self) -> None: ...


@contextlib.contextmanager
def claimed(root: str, doing: str, say: Say | None = None) -> Iterator[Claim]:
    """Hold the claim on the output at `root` within the block; reuse a claim that this thread already holds.

    If the owner of the claim has ended, the claim is taken over, and `say` reports this. The output is marked with its
    kind (`outputs`). Raises ClaimedError while another process holds the claim; ClaimLostError, in place of an error of
    the block, if another process took over during the block; StorageError.
    """
    key = threading.get_ident(), root
    if key in _HELD_CLAIMS:
        yield _HELD_CLAIMS[key]
        return
    is_new = storage.is_local(root) and not os.path.exists(storage.filesystem(root)[1])
    claim = _acquire(root, Owner.here(doing), say)
    claim.start()
    _HELD_CLAIMS[key] = claim
    marked = False
    try:
        marked = mark_kind(root, doing)
        yield claim
    except Exception as error:
        if isinstance(error, StorageError):
            storage.cleaning_up.set()  # the error is printed after the clean-up
        with contextlib.suppress(StorageError):
            claim.require()  # ClaimLostError replaces the error, which another process caused by taking over
        raise
    finally:
        del _HELD_CLAIMS[key]
        if marked:
            with contextlib.suppress(ClaimLostError, StorageError, TableError):
                claim.require()
                unmark_kind(root, doing)
        claim.release()
        storage.cleaning_up.clear()
        if is_new:
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(storage.filesystem(root)[1])


_HELD_CLAIMS: dict[tuple[int, str], Claim] = {}  # claims of this process, by thread and root


def describe_work(root: str) -> str:
    """Describe which process is working on the output at `root`; "" if none is. Raises StorageError."""
    return next((owner.work for owner in _chain(root)[-1:] if not owner.has_ended()), "")


def _acquire(root: str, owner: Owner, say: Say | None) -> Claim:
    """Claim `root`. Raises ClaimedError, StorageError."""
    body = storage.seal(json.dumps(asdict(owner)).encode())
    while True:
        claim, chain = Claim(root, owner), _chain(root)
        last, beat = (chain[-1], _read(_beat_url(root, chain[-1]))) if chain else (None, None)
        if last is not None and not _is_gone(root, last, say):
            continue  # the owner has just released the output
        place = join(root, CLAIM_FILE) if last is None else _successor_url(root, last)
        storage.create_bytes(place, body)
        if last is not None or not storage.is_local(root):
            time.sleep(SETTLE_SECONDS)
        chain = _chain(root)
        is_ours = bool(chain) and chain[-1] == owner
        if is_ours and (last is None or _read(_beat_url(root, last)) == beat):
            if last is not None and say is not None:
                say(f"{root}: taken over from {last}, which has ended")
            return claim
        is_cut_off = owner not in chain and Owner.read(_read(place) or b"") == owner
        if is_ours or is_cut_off:  # the earlier owner works again, or has released the output meanwhile
            storage.remove(place)


def _is_gone(root: str, owner: Owner, say: Say | None) -> bool:
    """Watch the last owner for up to LEASE_SECONDS; return whether it is gone, or False if it has just released `root`.

    Raises ClaimedError as soon as the owner's beat changes.
    """
    beat, every = _read(_beat_url(root, owner)), min(0.2 if storage.is_local(root) else 1.0, LEASE_SECONDS / 10)
    for _ in waiting(f"a sign of life from {owner}, which was working on {root},", say, LEASE_SECONDS, every):
        if owner.has_ended():  # a killed process ends after a short delay
            return True
        changed = _read(_beat_url(root, owner)) != beat
        chain = _chain(root)
        if not chain or chain[-1] != owner:
            return False
        if changed:
            raise ClaimedError(
                f"{root}: {owner.work}. Wait until that process has finished, or end it and run the same command again."
            )
    return True


def _chain(root: str) -> list[Owner]:
    """Return the owners of `root`, oldest first; each owner took over from the previous owner. Raises StorageError."""
    chain: list[Owner] = []
    place = join(root, CLAIM_FILE)
    while (content := _read(place)) is not None:
        chain.append(Owner.read(content))
        place = _successor_url(root, chain[-1])
    return chain


def _successor_url(root: str, owner: Owner) -> str:
    return join(root, f".claim-after-{owner.id}.json")


def _beat_url(root: str, owner: Owner) -> str:
    return join(root, f".claim-beat-{owner.id}.json")


def _read(place: str) -> bytes | None:
    """Return the content of a claim file or a beat file; None if there is no file."""
    try:
        sealed = storage.read_matching(lambda: storage.read_bytes(place), lambda data: storage.unseal(data) is not None)
    except FileNotFoundError:
        return None
    content = storage.unseal(sealed)
    return sealed if content is None else content


def _clock() -> float:
    """Return the time in seconds of a clock that cannot be set, and that continues during sleep if possible."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _machine() -> str:
    """Return a name for the space in which this process's pid is unique: one boot of this machine or a container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _born(pid: int) -> str:
    """Return text that identifies the start of process `pid`; "" if the process is not running or is a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass
    return "running"
