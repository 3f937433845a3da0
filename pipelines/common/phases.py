"""Phases of a long piece of work: a finished one is kept in staging, and a run after one that was cut off uses it.

    <kind>-<attempt>/    files of a phase, in folders that no other attempt writes
    <phase>.json         record of a finished phase: the folders that are needed from then on, and what they hold

The holder of the output's claim alone writes records, and removes what no record needs: the input of a phase goes when
the phase is done.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas import storage
from schemas.errors import TableError
from schemas.owners.claim import Claim
from schemas.storage import join


@dataclass
class Phases:
    """Phases below `root` by the owner of `claim`; `digest`: of all that decides what they hold."""

    root: str
    digest: str
    claim: Claim
    _needed: set[str] = field(default_factory=set)  # names under the root that stay

    def folder(self, kind: str) -> str:
        """Return the prefix of this attempt's files of one kind."""
        return join(self.root, f"{kind}-{self.claim.attempt}")

    def find(self, *phases: str) -> tuple[str, Any] | None:
        """Return the last of `phases` (in their order) that is finished and whole, and what it left; remove the rest.

        Raises LostError, StorageError.
        """
        self.claim.require()
        for phase in reversed(phases):
            record = self._read(phase)
            if record is not None:
                self._needed = {_file(phase), *record["folders"]}
                self.clear()
                return phase, record["left"]
        self.clear()
        return None

    def finish(self, phase: str, left: Any, kinds: Sequence[str]) -> None:
        """Record that `phase` is finished and what it `left`; remove all but folders of `kinds`.

        Raises LostError, StorageError.
        """
        own = [f"{kind}-{self.claim.attempt}" for kind in kinds]
        folders = {*own, *(name for name in self._needed if name.rpartition("-")[0] in kinds)}
        sizes = {name: storage.list_sizes(join(self.root, name)) for name in sorted(folders)}
        record = {"digest": self.digest, "folders": sizes, "left": left}
        self.claim.require()
        storage.write_sealed(join(self.root, _file(phase)), json.dumps(record).encode(), durable=True)
        self._needed = {_file(phase), *folders}
        self.clear()

    def clear(self) -> None:
        """Remove all that no finished phase needs. Raises LostError, StorageError."""
        self.claim.require()
        for name in storage.list_names(self.root):
            if name not in self._needed:
                storage.remove(join(self.root, name), recursive=True)

    @property
    def any_finished(self) -> bool:
        """Tell whether a later run could go on from what is there."""
        return bool(self._needed)

    def _read(self, phase: str) -> Mapping[str, Any] | None:
        """Return the record of a phase; None where there is none, it is of other work, or a file is not as it was."""
        try:
            content = storage.read_sealed(join(self.root, _file(phase)), remedy="It is made again.")
            record: Mapping[str, Any] = json.loads(content)
        except (FileNotFoundError, TableError):
            return None
        if record["digest"] != self.digest:
            return None
        for name, sizes in record["folders"].items():
            listed = storage.list_sizes(join(self.root, name)) if sizes else {}
            if any(listed.get(file) != size for file, size in sizes.items()):
                return None
        return record


def _file(phase: str) -> str:
    return f"{phase}.json"
