"""Phases of building a data set; a resumed run continues after the last finished phase.

    <kind>-<attempt>/    files of a phase, in folders that belong to one attempt
    <phase>.json         record of a finished phase: the folders that later phases need, with their contents

Only the owner of the output's claim writes records and removes files. When a phase is done, its input is removed. Two
runs do the same work if the digests of their input files are equal.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from pipelines.common.progress import Progress
from pipelines.flow import group_by_key
from pipelines.formats import lines
from pipelines.formats.base import Inputs
from pipelines.job import Summary
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import storage
from schemas.errors import TableError
from schemas.manifest import code_version
from schemas.owners.claim import Claim
from schemas.storage import join


@dataclass
class Phases:
    """Records and files of phases below `root`, written by the owner of `claim`. `digest` identifies the work."""

    root: str
    digest: str
    claim: Claim
    needed: set[str] = field(default_factory=set)  # names under the root that stay for a later run

    def folder(self, kind: str) -> str:
        """Return the folder for this attempt's files of one kind."""
        return join(self.root, f"{kind}-{self.claim.attempt}")

    def find(self, *phases: str) -> tuple[str, Any] | None:
        """Return the last of the ordered `phases` that is finished and undamaged, and its output; remove other phases.

        Raises ClaimLostError, StorageError.
        """
        self.claim.require()
        for phase in reversed(phases):
            record = self._read(phase)
            if record is not None:
                self.needed = {_file(phase), *record["folders"]}
                self.clear()
                return phase, record["left"]
        self.clear()
        return None

    def finish(self, phase: str, left: Any, kinds: Sequence[str]) -> None:
        """Record that `phase` is finished, with its output `left`; remove all folders except those of `kinds`.

        Raises ClaimLostError, StorageError.
        """
        own = [f"{kind}-{self.claim.attempt}" for kind in kinds]
        folders = {*own, *(name for name in self.needed if name.rpartition("-")[0] in kinds)}
        sizes = {name: storage.list_sizes(join(self.root, name)) for name in sorted(folders)}
        record = {"digest": self.digest, "folders": sizes, "left": left}
        self.claim.require()
        storage.write_sealed(join(self.root, _file(phase)), json.dumps(record).encode(), durable=True)
        self.needed = {_file(phase), *folders}
        self.clear()

    def clear(self) -> None:
        """Remove all files that no finished phase needs. Raises ClaimLostError, StorageError."""
        self.claim.require()
        for name in storage.list_names(self.root):
            if name not in self.needed:
                storage.remove(join(self.root, name), recursive=True)

    def _read(self, phase: str) -> Mapping[str, Any] | None:
        """Return the record of a phase; None if it is missing, belongs to other work, or a file has changed."""
        try:
            content = storage.read_sealed(join(self.root, _file(phase)), remedy="The file is written again.")
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


Identity = dict[str, dict[str, Any]]

_THREADS = 8
BLOCKS, REJECTS, LABELS, IDS, ROWS = "blocks", "rejects", "labels", "ids", "rows"  # folders that phases write
READ, JOINED, TOKENIZED = "read", "joined", "tokenized"
_DONE = {
    READ: "rows have been read",
    JOINED: "rows have been read, and label ids are known",
    TOKENIZED: "rows have been read and tokenized",
}
_NEEDED = {READ: (BLOCKS, REJECTS), JOINED: (BLOCKS, REJECTS, LABELS, IDS), TOKENIZED: (REJECTS, LABELS, ROWS)}


@dataclass(frozen=True)
class Finished:
    """Summaries of the phases up to `phase`. raw: summary of the first flow; later: summary of the later flows.

    frozen: the tokenizer, or None before the tokenizer is chosen.
    """

    phase: str
    raw: Summary
    later: Summary
    frozen: FrozenTokenizer | None = None


_AS_JSON = TypeAdapter(Finished)


def digest(inputs: Inputs, recorded: Mapping[str, Any], version: Mapping[str, Any] | None) -> str:
    """Return the digest of everything that determines the work, except file contents, which are compared separately."""
    parts = [[part.table, part.name, dict(part.files), part.rows, vars(part.contents)] for part in inputs.parts]
    work = [code_version(), inputs.format, parts, dict(inputs.filters), dict(recorded), version and dict(version)]
    return storage.sha256(json.dumps(work, sort_keys=True).encode())


def find_finished(phases: Phases, inputs: Inputs, data: str, say: Progress) -> Finished | None:
    """Return the phases that an earlier run of the same work finished, if any; remove other files.

    Raises ClaimLostError, StorageError.
    """
    record = phases.find(*_DONE)
    if record is None:
        return None
    finished = _AS_JSON.validate_python(record[1])
    say(f"{data}: an earlier run was interrupted; checking whether INPUT has changed")
    if finished.raw.files != read_files(inputs):
        say(f"{data}: INPUT has changed; starting from the beginning")
        phases.find()
        return None
    say(f"{data}: resuming: {_DONE[finished.phase]}")
    return finished


def record_phase(phases: Phases, finished: Finished) -> None:
    """Record a finished phase and its output; remove its input, unless a later phase needs this input.

    Raises ClaimLostError, StorageError.
    """
    raw = replace(finished.raw, blocks=()) if finished.phase == TOKENIZED else finished.raw
    left = _AS_JSON.dump_python(replace(finished, raw=raw), mode="json")
    phases.finish(finished.phase, left, _NEEDED[finished.phase])


def files_of(inputs: Inputs) -> tuple[str, ...]:
    """List the distinct URLs of all input files."""
    return tuple(sorted({url for _, url in _places(inputs)}))


def read_files(inputs: Inputs) -> dict[str, tuple[int, str]]:
    """Return each input file's size in bytes and SHA-256, by URL. Raises InputError, StorageError."""
    urls = files_of(inputs)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(urls, pool.map(lines.identify, urls), strict=True))


def identity(inputs: Inputs, files: Mapping[str, tuple[int, str]]) -> Identity:
    """Return the name, size in bytes and SHA-256 of the files of each kind.

    In a format with keys, the names and the order of files do not matter, so several files of one kind are identified
    by their sorted digests.
    """
    return {kind: _described(urls, files, inputs.keyed) for kind, urls in group_by_key(_places(inputs))}


def _described(urls: list[str], files: Mapping[str, tuple[int, str]], keyed: bool) -> dict[str, Any]:
    size = sum(files[url][0] for url in urls)
    digests = [files[url][1] for url in urls]
    if keyed:
        digests.sort()
    digest = digests[0] if len(urls) == 1 else storage.sha256("".join(digests).encode())
    name = urls[0].rsplit("/", 1)[-1] if not keyed and len(urls) == 1 else f"{len(urls)} file(s)"
    return {"file": name, "bytes": size, "sha256": digest}


def _places(inputs: Inputs) -> list[tuple[str, str]]:
    """List (kind, URL) of every file: `train`, or `train/text` if a part has several files."""
    places = [
        (part.table if len(part.files) == 1 else f"{part.table}/{role}", url)
        for part in inputs.parts
        for role, url in part.files.items()
    ]
    return [*places, *((f"filter/{split}", url) for split, url in inputs.filters.items())]
