"""Claim on an output: one process at a time writes it, and says so in small files beside it while it works.

    .claim.json                the first claim on the output, written only if there is none
    .claim-after-<id>.json     the claim that took over from claim <id>, whose owner was gone: at most one
    .claim-beat-<id>.json      changes every BEAT_SECONDS while the owner of claim <id> works

A claim file is never changed. Whoever stands last in the chain owns the output. An owner is missing if it ran on this
machine and its process has ended; else if its beat has not changed for LEASE_SECONDS by the observer's own clock: no
two clocks are compared. If an owner's own beats are late, because the process was paused or cut off from storage, it
checks its claim before it writes anything (`Claim.require`); meanwhile its files have the name of its attempt.

On a disk only one process can create a file, and the same holds for stores with conditional writes, such as S3 and GCS.
Without conditional writes, the last of several writers within SETTLE_SECONDS wins, and all of them check who won.
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
from schemas.owners.place import mark, unmark
from schemas.storage import join
from schemas.waits import Say, waiting

FILE = ".claim.json"
BEAT_SECONDS = 2.0
LEASE_SECONDS = 30.0
SETTLE_SECONDS = 0.2  # until a write is seen by whoever looks
_JOIN_SECONDS = 10.0  # for a beat that storage does not answer
_FRESH = 0.8  # share of the lease after which an owner looks again: clocks do not run at quite the same rate


class ClaimedError(InputError):
    """Error: another process writes this output."""


class LostError(ClaimedError):
    """Error: the claim of this process has been taken over by another."""


@dataclass(frozen=True)
class Owner:
    """Process that claims an output: what it does (`sharded`, `trained`), and how to check whether it runs.

    `pid` is unique among the processes of `machine`; `born` is the start of the process.
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
        """Read a claim file; an unreadable file has an unknown owner."""
        try:
            owner = Owner(**json.loads(content))
            if not re.fullmatch("[0-9a-f]{32}", owner.id) or type(owner.pid) is not int:
                raise ValueError("no claim of ours")
            return owner
        except (ValueError, TypeError, RecursionError):
            return Owner(storage.sha256(content)[:32], "written", "unknown", "", 0, "", "an unknown time")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def has_ended(self) -> bool:
        """Tell whether this is a process of this machine that no longer runs; False if that cannot be known."""
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
        """Name of what this claim's owner writes until it is put in place; no other claim has it."""
        return self.owner.id[:16]

    def require(self) -> None:
        """Raise LostError unless this process still owns the output; without a request if its last beat is fresh."""
        if self._lost is None and _clock() - self._confirmed < _FRESH * LEASE_SECONDS:
            return
        with self._lock:
            self._confirm()
        if self._lost is not None:
            raise LostError(
                f"{self.root}: {self._lost}, after this process gave no sign of life for {LEASE_SECONDS:g} seconds (it "
                "was paused, or could not reach storage). This process leaves the output as it is. Run the same "
                "command again if no other process continues the work."
            )

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def release(self) -> None:
        """Release the output, if this process still owns it."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)
        with contextlib.suppress(LostError, StorageError):
            self.require()
            chain = _chain(self.root)
            storage.remove(join(self.root, FILE))  # which gives the output free
            for owner in chain:
                storage.remove(_after(self.root, owner))
                storage.remove(_beat_of(self.root, owner))
            return
        with contextlib.suppress(StorageError):
            storage.remove(_beat_of(self.root, self.owner))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with self._lock, contextlib.suppress(StorageError):  # the next one may pass
                if self._lost is None:
                    self._confirm()

    def _confirm(self) -> None:
        """Beat; after a pause that another process may have taken for the end, look who owns the output."""
        if self._lost is not None:
            return
        second = _clock()
        self._beats += 1
        beat = storage.seal(json.dumps({"beat": self._beats}).encode())
        if second - self._confirmed < _FRESH * LEASE_SECONDS:
            storage.write_bytes(_beat_of(self.root, self.owner), beat, durable=False)
            self._confirmed = second
            return
        chain = _chain(self.root)
        if chain and chain[-1] == self.owner:
            storage.write_bytes(_beat_of(self.root, self.owner), beat, durable=False)
            time.sleep(SETTLE_SECONDS)  # whoever is taking over sees the beat, or is seen
            chain = _chain(self.root)
        if chain and chain[-1] == self.owner:
            self._confirmed = second
        else:
            self._lost = f"taken over by {chain[-1]}" if chain else "its claim is gone"


class Unclaimed(Claim):
    """Claim on an output that nobody else can know of: always held."""

    def __init__(self) -> None:
        super().__init__("", Owner.here("made"))

    def require(self) -> None: ...


@contextlib.contextmanager
def claimed(root: str, doing: str, say: Say | None = None) -> Iterator[Claim]:
    """Hold the claim on the output at `root` for the block; a claim that this thread holds already continues.

    A claim whose owner has ended is taken over, and `say` gets a line. What is made there is marked (`place`). Raises
    ClaimedError while another process has the claim; LostError, instead of an error of the block, if another process
    took over meanwhile; StorageError.
    """
    key = threading.get_ident(), root
    if key in _HELD:
        yield _HELD[key]
        return
    is_new = storage.is_local(root) and not os.path.exists(storage.filesystem(root)[1])
    claim = _acquire(root, Owner.here(doing), say)
    claim.start()
    _HELD[key] = claim
    marked = False
    try:
        marked = mark(root, doing)
        yield claim
    except Exception:
        with contextlib.suppress(StorageError):
            claim.require()  # whatever failed, failed because another process has the output now
        raise
    finally:
        del _HELD[key]
        if marked:
            with contextlib.suppress(LostError, StorageError, TableError):
                claim.require()
                unmark(root, doing)
        claim.release()
        if is_new:
            with contextlib.suppress(OSError):  # something is in it
                os.rmdir(storage.filesystem(root)[1])


_HELD: dict[tuple[int, str], Claim] = {}  # of this process, by thread and root


def _acquire(root: str, owner: Owner, say: Say | None) -> Claim:
    """Claim `root`. Raises ClaimedError, StorageError."""
    body = storage.seal(json.dumps(asdict(owner)).encode())
    while True:
        claim, chain = Claim(root, owner), _chain(root)
        last, beat = (chain[-1], _read(_beat_of(root, chain[-1]))) if chain else (None, None)
        if last is not None and not _is_gone(root, last, say):
            continue  # it has just ended, and the output is free
        place = join(root, FILE) if last is None else _after(root, last)
        storage.create_bytes(place, body)
        if last is not None or not storage.is_local(root):
            time.sleep(SETTLE_SECONDS)
        chain = _chain(root)
        is_ours = bool(chain) and chain[-1] == owner
        if is_ours and (last is None or _read(_beat_of(root, last)) == beat):
            if last is not None and say is not None:
                say(f"{root}: taken over from {last}, which has ended")
            return claim
        is_cut_off = owner not in chain and Owner.read(_read(place) or b"") == owner
        if is_ours or is_cut_off:  # the one before is back, or has left meanwhile
            storage.remove(place)


def _is_gone(root: str, owner: Owner, say: Say | None) -> bool:
    """Tell whether the last owner is missing, False if it has just released `root`; watches for up to LEASE_SECONDS.

    Raises ClaimedError as soon as the owner shows a sign of life.
    """
    beat, every = _read(_beat_of(root, owner)), min(0.2 if storage.is_local(root) else 1.0, LEASE_SECONDS / 10)
    for _ in waiting(f"a sign of life from {owner}, which was working on {root},", say, LEASE_SECONDS, every):
        if owner.has_ended():  # a process that is being killed takes a moment
            return True
        changed = _read(_beat_of(root, owner)) != beat
        chain = _chain(root)
        if not chain or chain[-1] != owner:
            return False
        if changed:
            raise ClaimedError(
                f"{root}: being {owner.doing} by {owner} since {owner.since}. Wait until that process has finished, or "
                "end it and run the same command again."
            )
    return True


def _chain(root: str) -> list[Owner]:
    """Return the owners of `root`, each taken over from the one before. Raises StorageError."""
    chain: list[Owner] = []
    place = join(root, FILE)
    while (content := _read(place)) is not None:
        chain.append(Owner.read(content))
        place = _after(root, chain[-1])
    return chain


def _after(root: str, owner: Owner) -> str:
    return join(root, f".claim-after-{owner.id}.json")


def _beat_of(root: str, owner: Owner) -> str:
    return join(root, f".claim-beat-{owner.id}.json")


def _read(place: str) -> bytes | None:
    """Return the content of a claim or a beat, or of the file in its place; None if there is no file."""
    try:
        sealed = storage.read_matching(lambda: storage.read_bytes(place), lambda data: storage.unseal(data) is not None)
    except FileNotFoundError:
        return None
    content = storage.unseal(sealed)
    return sealed if content is None else content


def _clock() -> float:
    """Return seconds of a clock that nobody sets, and that also runs in sleep, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _machine() -> str:
    """Name the set of processes whose numbers this process sees: this boot of this machine, or of a container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _born(pid: int) -> str:
    """Return a mark of the start of process `pid`; "" if it does not run, or has ended and is not yet reaped."""
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
