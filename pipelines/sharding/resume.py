"""Going on from what a sharding run that was cut off has finished: rows that are read, or read and tokenized."""

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

BLOCKS, REJECTS, ROWS = "blocks", "rejects", "rows"  # folders that phases leave
_READ, _TOKENIZED = "read", "tokenized"


@dataclass(frozen=True)
class Left:
    """What finished phases left. raw: of the first pipeline; assembled: of the second, None where it was cut off.

    frozen: the tokenizer of the assembled rows.
    """

    raw: Summary
    assembled: Summary | None = None
    frozen: FrozenTokenizer | None = None


def digest(inputs: Inputs, recorded: Mapping[str, Any], version: Mapping[str, Any] | None) -> str:
    """Return the digest of what decides the work, but for the content of files, which is compared by itself."""
    parts = [[part.table, part.name, dict(part.files), part.rows] for part in inputs.parts]
    work = [code_version(), inputs.format, parts, dict(inputs.filters), dict(recorded), version and dict(version)]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


def find_left(phases: Phases, inputs: Inputs, data: str, say: Progress) -> Left | None:
    """Return what an earlier run at `data` left of the same work; remove all else. Raises LostError, StorageError."""
    found = phases.find(_READ, _TOKENIZED)
    if found is None:
        return None
    phase, values = found
    raw = from_json(values["raw"])
    say(f"{data}: an earlier run was cut off here; looking whether INPUT is the same")
    if raw.files != identity.read_files(inputs):
        say(f"{data}: INPUT has changed: begun anew")
        phases.find()
        return None
    if phase == _READ:
        say(f"{data}: going on from there: rows are read")
        return Left(raw)
    say(f"{data}: going on from there: rows are read and tokenized")
    return Left(raw, from_json(values["assembled"]), _thaw(values["tokenizer"]))


def keep_read(phases: Phases, raw: Summary) -> None:
    """Record that rows are read. Raises LostError, StorageError."""
    phases.finish(_READ, {"raw": as_json(raw)}, (BLOCKS, REJECTS))


def keep_tokenized(phases: Phases, raw: Summary, assembled: Summary, frozen: FrozenTokenizer | None) -> None:
    """Record that rows are tokenized; what was read is removed. Raises LostError, StorageError."""
    summaries = {"raw": as_json(replace(raw, blocks=())), "assembled": as_json(assembled)}
    phases.finish(_TOKENIZED, {**summaries, "tokenizer": _frozen(frozen)}, (ROWS, REJECTS))


def _frozen(tokenizer: FrozenTokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    files = {name: base64.b64encode(content).decode() for name, content in tokenizer.files.items()}
    facts = {"vocabulary": tokenizer.vocabulary, "max_tokens": tokenizer.max_tokens, "kept": [*tokenizer.kept]}
    return {"files": files, **facts}


def _thaw(values: Mapping[str, Any] | None) -> FrozenTokenizer | None:
    if values is None:
        return None
    files = {name: base64.b64decode(content) for name, content in values["files"].items()}
    kept = {name: files[name] for name in values["kept"]}
    return FrozenTokenizer(files, values["vocabulary"], values["max_tokens"], kept)
