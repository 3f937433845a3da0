"""One owner per output: a process claims an output, builds it apart from readers, and publishes it.

First the claim, which a thread keeps alive and which another process takes over when its owner has ended; then the
build; then the kinds of outputs, which are not written over one another.
"""

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from schemas import storage
from schemas.errors import ClaimedError, ClaimLostError, InputError, StorageError, TableError
from schemas.layout import ABLATION_PAGE, BESIDE_TABLES, CLUSTERS, MANIFEST, RUN_FILE, phases, staging
from schemas.manifest import Manifest, is_published, publish_new, unpublish
from schemas.states import state
from schemas.storage import join
from schemas.table import Table
from schemas.waits import Say, waiting

CLAIM_FILE, HEARTBEAT = ".claim.json", ".claim-beat-"
BEAT_SECONDS = 2.0
_READER_SECONDS = 20.0  # between two heartbeats of a process that only reads
LEASE_SECONDS = 30.0
SETTLE_SECONDS = 0.2  # until every reader sees a write
_FORGET_SECONDS = 86400.0  # age of a heartbeat that nobody looks for any more
_JOIN_SECONDS = 10.0  # wait for a beat while storage does not answer
_FRESH = 0.8  # share of the lease after which an owner checks again, because the rates of clocks differ a little

KIND_FILE = ".kind"
_OTHER = "other files"
# Work of an owner, by the kind of the table that the owner makes.
_WORK_BY_KIND = {"data": "sharded", "export": "exported", "negatives": "mined", "tuples": "handed over"}
_WORK_BY_KIND |= dict.fromkeys(("embeddings", "vectors"), "embedded")
_NAMES = {"sharded": "a data set", "trained": "a run", "exported": "an export", "embedded": "embeddings"}
_NAMES |= {"mined": "hard negatives", "clustered": "queries in cluster order", "compared": "a comparison of recipes"}
_NAMES |= {"handed over": "tuples"}


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
        self._is_new = bool(root) and storage.is_local(root) and not os.path.exists(storage.filesystem(root)[1])
        self._beats, self._every = 0, BEAT_SECONDS
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

    def release(self) -> None:
        """Release the output, if this process still owns it, and end the heartbeats."""
        self._ended.set()
        self._thread.join(storage.CLEAN_UP_SECONDS if storage.thread_state.cleaning_up else _JOIN_SECONDS)
        with contextlib.suppress(ClaimLostError, StorageError):
            self._free()
        with contextlib.suppress(StorageError):
            storage.remove(_beat_url(self.root, self.owner))
        if self._is_new:
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(storage.filesystem(self.root)[1])

    def _free(self) -> None:
        self.require()
        chain = _chain(self.root)
        storage.remove(join(self.root, CLAIM_FILE))  # the output is free now
        for owner in chain:
            storage.remove(_successor_url(self.root, owner))
            if owner != self.owner:
                storage.remove(_beat_url(self.root, owner))

    def _beat(self) -> None:
        storage.thread_state.patient = False  # the next beat comes soon, and who requires the claim waits for this one
        while not self._ended.wait(self._every):
            with self._lock, contextlib.suppress(StorageError):  # the next beat may succeed
                if self._lost is None:
                    self._confirm()

    def _confirm(self) -> None:
        """Beat; after a pause in which another process may have taken over, check who owns the output."""
        if self._lost is not None:
            return
        second = _clock()
        if second - self._confirmed < _FRESH * LEASE_SECONDS:
            self._write_beat()
            self._confirmed = second
            return
        chain = _chain(self.root)
        if chain and chain[-1] == self.owner:
            self._write_beat()
            time.sleep(SETTLE_SECONDS)  # a process that takes over sees the beat, or this process sees its claim
            chain = _chain(self.root)
        if chain and chain[-1] == self.owner:
            self._confirmed = second
        else:
            self._lost = f"taken over by {chain[-1]}" if chain else "its claim is gone"

    def _write_beat(self) -> None:
        self._beats += 1
        beat = {"beat": self._beats, "at": time.time(), "owner": asdict(self.owner), "state": state()}
        storage.write_sealed(_beat_url(self.root, self.owner), json.dumps(beat, default=float).encode())


class Unclaimed(Claim):
    """Claim that excludes nobody and is never lost: on an output of this process alone, or that several watch."""

    def __init__(self, root: str = "", doing: str = "made") -> None:
        super().__init__(root, Owner.here(doing))

    def require(self) -> None: ...

    def _free(self) -> None: ...

    _confirm = Claim._write_beat


_HELD_CLAIMS: dict[tuple[int, str], Claim] = {}  # claims of this process, by thread and root


@contextlib.contextmanager
def claimed(root: str, doing: str, say: Say | None = None) -> Iterator[Claim]:
    """Hold the claim on the output at `root` within the block; reuse a claim that this thread already holds.

    If the owner of the claim has ended, the claim is taken over, and `say` reports this. The output is marked with its
    kind. Raises ClaimedError while another process holds the claim; ClaimLostError, in place of an error of
    the block, if another process took over during the block; StorageError.
    """
    key = threading.get_ident(), root
    if key in _HELD_CLAIMS:
        yield _HELD_CLAIMS[key]
        return
    claim = _acquire(root, Owner.here(doing), say)
    claim._thread.start()
    _HELD_CLAIMS[key] = claim
    marked = doing == "removed"  # by an earlier owner
    try:
        if doing in _NAMES:  # before all other files
            storage.write_bytes(join(root, KIND_FILE), f"{doing}\n".encode())
            marked = True
        yield claim
    except Exception as error:
        if isinstance(error, StorageError):
            storage.thread_state.cleaning_up = True  # the error is printed after the clean-up
        with contextlib.suppress(StorageError):
            claim.require()  # ClaimLostError replaces the error, which another process caused by taking over
        raise
    finally:
        del _HELD_CLAIMS[key]
        if marked:
            with contextlib.suppress(ClaimLostError, StorageError, TableError, FileNotFoundError):
                claim.require()
                # The mark goes if other files show the kind, or if no other file is left.
                names = [name for name in storage.list_names(root) if name != KIND_FILE]
                if ".staging" not in names and (MANIFEST in names or _kind_at(root, names) in (None, _mark_at(root))):
                    storage.remove(join(root, KIND_FILE))
        claim.release()
        storage.thread_state.cleaning_up = False


@contextlib.contextmanager
def watched(root: str, doing: str, say: Say | None = None, every: float = 0.0) -> Iterator[None]:
    """Show by heartbeats, `every` so many seconds, that this process is at `root` until the block ends; many may be.

    A reader is given `say`, which is told if no heartbeat can be written.
    """
    watch = Unclaimed(root, doing)
    watch._every = every or BEAT_SECONDS
    try:
        forget_ended(root)
        if say is not None:
            watch._write_beat()
    except StorageError as error:
        if say is not None:
            say(f"{root}: in use without a lease, so that extremis clean does not know of it: {error}")
    watch._thread.start()
    try:
        yield
    finally:
        watch.release()


def reading(root: str, say: Say) -> contextlib.AbstractContextManager[None]:
    """Hold a lease on the output at `root` until the block ends, so that nobody removes it; `say` if this cannot be."""
    return watched(root, "read", say, _READER_SECONDS)


class Sign(NamedTuple):
    """Newest sign of a process at an output: `beat` has `at` (seconds since 1970) and `state`, or nothing yet."""

    owner: Owner
    beat: dict[str, Any]
    claims: bool  # the output

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or nobody has heard of it for a day."""
        return self.owner.has_ended() or self.beat.get("at", math.inf) < time.time() - _FORGET_SECONDS


def find_signs(root: str) -> list[Sign]:
    """Return a sign of each process that works at `root`, the owner's first. Raises StorageError."""
    chain = _chain(root)
    signs = {owner.id: Sign(owner, {}, True) for owner in chain[-1:]}
    for name in storage.list_names(root):
        content = _read(join(root, name)) if name.startswith(HEARTBEAT) else None
        if content is not None and (beat := storage.parse_object(content)) is not None:
            owner = Owner.read(json.dumps(beat.get("owner")).encode())
            if owner not in chain[:-1]:
                signs[owner.id] = Sign(owner, beat, owner in chain)
    return list(signs.values())


def forget_ended(root: str) -> None:
    """Remove heartbeats of processes that have ended without a claim at `root`. Raises StorageError."""
    for sign in find_signs(root):
        if not sign.claims and sign.is_over:
            storage.remove(_beat_url(root, sign.owner))


def _require_claim_on(url: str) -> None:
    """Raise ClaimLostError if `url` is in an output whose claim this process has lost, other than the claim's files."""
    for (_, root), claim in tuple(_HELD_CLAIMS.items()):
        if url.startswith(f"{root.rstrip('/')}/") and not url.rpartition("/")[2].startswith(".claim"):
            claim.require()


storage.before_late_write.append(_require_claim_on)


def describe_work(root: str) -> str:
    """Describe which process is working on the output at `root`; "" if none is. Raises StorageError."""
    return next((owner.work for owner in _chain(root)[-1:] if not owner.has_ended()), "")


def _acquire(root: str, owner: Owner, say: Say | None) -> Claim:
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
    return join(root, f"{HEARTBEAT}{owner.id}.json")


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


@dataclass(frozen=True)
class Build:
    """Attempt to build the output `out`. Its files are written below `url`, which no other attempt uses.

    Files that a process writes after losing its claim are never read.
    """

    out: str
    url: str
    claim: Claim

    def put(self, names: Sequence[str]) -> None:
        """Move the files `names` from the attempt to the output. Raises ClaimLostError, StorageError."""
        self.claim.require()
        storage.move_files(self.url, self.out, names)

    def publish(self, manifest: Manifest, names: Sequence[str] | None = None) -> Manifest:
        """Move the manifest's files (or the files `names`) into place; publish the manifest over any earlier manifest.

        Raises ClaimLostError if another process has taken over, and keeps that process's output; StorageError.
        """
        self.claim.require()
        old = set[str]()
        with contextlib.suppress(TableError):
            old = {*Table.open(self.out).manifest.files}
        unpublish(self.out)
        new = manifest.files if names is None else names
        self.put(new)
        self.claim.require()
        if not publish_new(self.out, manifest):
            raise ClaimLostError(
                f"{join(self.out, MANIFEST)}: another process has published this output in the meantime. That output "
                "is kept."
            )
        for name in old.difference(new):
            storage.remove(join(self.out, name))
        return manifest


@contextlib.contextmanager
def building(out: str, doing: str, say: Say | None = None, in_phases: bool = False) -> Iterator[Build]:
    """Claim `out` for the block, and build it in a separate folder; unpublished files are removed.

    `in_phases`: after an error, the output of finished phases is kept, except after an InputError, which would occur
    again. Raises ClaimedError while another process holds the claim; StorageError.
    """
    with claimed(out, doing, say) as claim:
        _clear_staging(out, in_phases)  # files of interrupted attempts
        build = Build(out, join(staging(out), claim.attempt), claim)
        try:
            yield build
        except BaseException as error:
            with contextlib.suppress(StorageError):  # the first of the two errors is the cause
                _clear(build, in_phases and not isinstance(error, InputError))
            raise
        _clear(build, False)


def clean_up(out: str, doing: str) -> None:
    """Remove the files of a process that stopped right after publishing `out`, unless another process works there."""
    if storage.list_names(staging(out)) or storage.exists(join(out, CLAIM_FILE)):
        with contextlib.suppress(ClaimedError), claimed(out, doing):  # no other process works there
            storage.remove(staging(out), recursive=True)


def _clear(build: Build, keep_phases: bool) -> None:
    """Remove the attempt's files, or the whole staging folder if this process still owns the output."""
    with contextlib.suppress(ClaimLostError):
        build.claim.require()
        _clear_staging(build.out, keep_phases)
        return
    storage.remove(build.url, recursive=True)


def _clear_staging(out: str, keep_phases: bool) -> None:
    """Remove the output's staging folder, or everything in it except the output of finished phases."""
    places = [staging(out)]
    if keep_phases and storage.list_names(phases(out)):
        places = [join(staging(out), name) for name in storage.list_names(staging(out))]
    for place in places:
        if place != phases(out):
            storage.remove(place, recursive=True)


def require_output_folder(out: str, doing: str, reads: Iterable[str | None] = ()) -> None:
    """Refuse to write an output of kind `doing` at the prefix `out` over another kind, or inside a path in `reads`.

    Raises InputError, StorageError; TableError if the existing files are damaged.
    """
    _require_apart(out, reads)
    if storage.is_stream(out) or storage.exists(out):
        raise InputError(f"{out}: expected a folder to write to, got a file. Give another path.")
    present = _kind_at(out, storage.list_names(out))
    if present not in (None, doing):
        wanted = _NAMES.get(doing, doing)
        raise InputError(
            f"{out}: contains {_NAMES.get(present, present)}, but this command writes {wanted}. Nothing was changed; "
            "give another path."
        )


def require_output_file(out: str, reads: Iterable[str | None], remedy: str, may_replace: bool = False) -> None:
    """Refuse to write a file at `out` over or inside a path in `reads`, or over a file unless `may_replace`.

    A device, a pipe or another file that is not regular is allowed. Raises InputError, with `remedy` at the end of the
    message, if a file exists; StorageError.
    """
    _require_apart(out, reads)
    if storage.is_folder(out):
        raise InputError(f"{out}: expected a file to write, got a folder. Give the path of a file in this folder.")
    if not (may_replace or storage.is_stream(out)) and storage.exists(out):
        raise InputError(f"{out}: this file exists already. {remedy}")


def _require_apart(out: str, reads: Iterable[str | None]) -> None:
    for read in () if storage.is_stream(out) else reads:
        if read is not None and storage.is_within(out, read):
            if storage.is_within(read, out):
                raise InputError(f"{out}: the command reads this path, and would overwrite it. Give another path.")
            raise InputError(f"{out}: is inside {read}, which the command reads. Give a path outside this folder.")


def _kind_at(url: str, names: list[str]) -> str | None:
    """Return the kind of the output at `url` with the files `names`, or None. Raises TableError, StorageError."""
    if MANIFEST in names:
        return _kind_of(url)
    if RUN_FILE in names:
        return "trained"
    if ABLATION_PAGE in names:
        return "compared"
    visible = [name for name in names if not name.startswith(".") and name not in BESIDE_TABLES]
    if not visible and ".staging" not in names:
        return None
    if KIND_FILE in names:
        return _mark_at(url)
    made = {_kind_of(join(url, name)) if is_published(join(url, name)) else _OTHER for name in visible}
    return _OTHER if len(made) > 1 else made.pop() if made else None


def _mark_at(url: str) -> str:
    return storage.read_bytes(join(url, KIND_FILE)).decode(errors="replace").strip()


def _kind_of(url: str) -> str:
    """Return the kind of work that produced the finished table at `url`. Raises TableError."""
    table = Table.open(url)
    made = "clustered" if CLUSTERS in table.parameters else f"a table of {table.kind}"
    return _WORK_BY_KIND.get(table.kind, made)
