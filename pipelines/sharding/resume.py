"""Going on from what a sharding run that was cut off has finished."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipelines.common.phases import Phases
from pipelines.common.progress import Progress
from pipelines.common.summary import Summary, as_json, from_json
from pipelines.formats.base import Inputs
from pipelines.sharding import identity
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas.manifest import code_version

BLOCKS, REJECTS, LABELS, IDS, ROWS = "blocks", "rejects", "labels", "ids", "rows"  # folders that phases leave
READ, JOINED, TOKENIZED = "read", "joined", "tokenized"
_DONE = {
    READ: "rows are read",
    JOINED: "rows are read, and the ids of their labels known",
    TOKENIZED: "rows are read and tokenized",
}
_NEEDED = {READ: (BLOCKS, REJECTS), JOINED: (BLOCKS, REJECTS, LABELS, IDS), TOKENIZED: (REJECTS, LABELS, ROWS)}


@dataclass(frozen=True)
class Finished:
    """Summaries that phases up to `phase` left. raw: of the first pipeline; later: of those after it.

    frozen: the tokenizer, once it is chosen.
    """

    phase: str
    raw: Summary
    later: Summary
    frozen: FrozenTokenizer | None = None


def digest(inputs: Inputs, recorded: Mapping[str, Any], version: Mapping[str, Any] | None) -> str:
    """Return the digest of what decides the work, but for the content of files, which is compared by itself."""
    parts = [[part.table, part.name, dict(part.files), part.rows] for part in inputs.parts]
    work = [code_version(), inputs.format, parts, dict(inputs.filters), dict(recorded), version and dict(version)]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


def find_finished(phases: Phases, inputs: Inputs, data: str, say: Progress) -> Finished | None:
    """Return what an earlier run at `data` left of the same work; remove all else. Raises LostError, StorageError."""
    record = phases.find(*_DONE)
    if record is None:
        return None
    phase, values = record
    raw = from_json(values["raw"])
    say(f"{data}: an earlier run was cut off here; looking whether INPUT is the same")
    if raw.files != identity.read_files(inputs):
        say(f"{data}: INPUT has changed: begun anew")
        phases.find()
        return None
    say(f"{data}: going on from there: {_DONE[phase]}")
    return Finished(phase, raw, from_json(values["later"]), _tokenizer_of(values["tokenizer"]))


def keep(phases: Phases, finished: Finished) -> None:
    """Record that a phase is finished, and what it left; what it was made from is removed, unless it is needed again.

    Raises LostError, StorageError.
    """
    raw = replace(finished.raw, blocks=()) if finished.phase == TOKENIZED else finished.raw
    summaries = {"raw": as_json(raw), "later": as_json(finished.later)}
    phases.finish(finished.phase, {**summaries, "tokenizer": _tokenizer_json(finished.frozen)}, _NEEDED[finished.phase])


def _tokenizer_json(tokenizer: FrozenTokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    files = {name: base64.b64encode(content).decode() for name, content in tokenizer.files.items()}
    facts = {"vocabulary": tokenizer.vocabulary, "max_tokens": tokenizer.max_tokens, "kept": [*tokenizer.kept]}
    return {"files": files, **facts}


def _tokenizer_of(values: Mapping[str, Any] | None) -> FrozenTokenizer | None:
    if values is None:
        return None
    files = {name: base64.b64decode(content) for name, content in values["files"].items()}
    kept = {name: files[name] for name in values["kept"]}
    return FrozenTokenizer(files, values["vocabulary"], values["max_tokens"], kept)
