"""Attempts to build an output: the owner builds it in a separate folder, and then moves it into place as a whole."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas import storage
from schemas.errors import InputError, RoomError, StorageError, TableError
from schemas.layout import MANIFEST, phases, staging
from schemas.manifest import Manifest, publish_new, unpublish
from schemas.owners.claim import CLAIM_FILE, Claim, ClaimedError, ClaimLostError, Say, claimed
from schemas.storage import join
from schemas.table import Table


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
    again. After a full disk (RoomError) this output is also kept, because space may be freed. Raises ClaimedError while
    another process holds the claim; StorageError.
    """
    with claimed(out, doing, say) as claim:
        _clear_staging(out, in_phases)  # files of interrupted attempts
        build = Build(out, join(staging(out), claim.attempt), claim)
        try:
            yield build
        except BaseException as error:
            with contextlib.suppress(StorageError):  # the first of the two errors is the cause
                _clear(build, in_phases and (isinstance(error, RoomError) or not isinstance(error, InputError)))
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
