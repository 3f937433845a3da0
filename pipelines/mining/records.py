"""Records of what is finished: a shard of a table, a block's index; and the summary of a table from its records.

A worker leaves a record beside what it has finished. The launching process makes the manifest of the records, and an
attempt after one that was cut off takes the records of the same work over, with their files.
"""

import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from pipelines.common.vectors import Source
from pipelines.mining.audit import Audit, Profile, measure, stack
from pipelines.mining.plan import RECORD, REMEDY, MinePlan, Place
from schemas import storage
from schemas.errors import TableError
from schemas.layout import phases
from schemas.manifest import Shard
from schemas.sizes import with_room
from schemas.storage import join
from search.index import SearchParams

_READERS = 16  # records at a time
_REMEDY = "It is made again."


class Record(NamedTuple):
    """Facts as JSON values, `entry` of a file among them, or None; and arrays."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class FinishedShard(NamedTuple):
    """One finished shard: its entry, counters, and its sampled rows: keys [S, columns], and as exact search has them.

    `overlaps` float64 [S'] with the table before. `params` by block.
    """

    entry: Shard
    counters: dict[str, int]
    sampled: np.ndarray
    audit: Audit
    overlaps: np.ndarray | None
    params: dict[int, SearchParams]
    profile: Profile


def write_record(url: str, facts: dict[str, Any], **arrays: np.ndarray) -> None:
    """Write a record. Raises RoomError, StorageError."""
    out = io.BytesIO()
    np.savez(out, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    with with_room(url, "records", out.tell(), REMEDY):
        storage.write_sealed(url, out.getvalue(), durable=True)


def read_record(url: str) -> Record:
    """Read a record. Raises FileNotFoundError; TableError: damaged; StorageError."""
    content = storage.read_sealed(url, _REMEDY)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return Record(json.loads(arrays.pop("facts").tobytes()), arrays)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TableError(f"{url}: no record of mining ({error}). {_REMEDY}") from None


def write_finished(plan: MinePlan, place: Place, made: FinishedShard) -> None:
    """Write the record of a finished shard. Raises RoomError, StorageError."""
    facts = {
        "entry": made.entry.model_dump(),
        "counters": made.counters,
        "params": {block: asdict(params) for block, params in made.params.items()},
        "profile": asdict(made.profile),
    }
    arrays = {"sampled": made.sampled, **made.audit._asdict()}
    if made.overlaps is not None:
        arrays["overlaps"] = made.overlaps
    write_record(join(plan.finished, plan.record(place)), facts, **arrays)


def read_finished(plan: MinePlan, place: Place) -> FinishedShard:
    """Read the record of a finished shard. Raises as `read_record`."""
    facts, arrays = read_record(join(plan.finished, plan.record(place)))
    return FinishedShard(
        Shard(**facts["entry"]),
        facts["counters"],
        arrays["sampled"],
        Audit(*(arrays[name] for name in Audit._fields)),
        arrays.get("overlaps"),
        {int(block): SearchParams(**params) for block, params in facts["params"].items()},
        Profile(**facts["profile"]),
    )


def list_finished(plan: MinePlan) -> tuple[set[Place], int]:
    """List the shards that attempts at the plan's work have finished, and count their kept indexes, unread."""
    root = phases(plan.inputs.root)
    folders = [join(root, name) for name in storage.list_names(root) if name.startswith(plan.work)]
    there = {
        join(kind, name) for kind in plan.kinds for each in folders for name in storage.list_names(join(each, kind))
    }
    indexes = sum(plan.index_record(block) in there for block in range(len(plan.bounds)))
    return {place for place in plan.places if plan.record(place) in there}, indexes


def take_over(plan: MinePlan) -> None:
    """Move what earlier attempts at the plan's work have finished to this one; remove what is damaged, or other work's.

    Raises StorageError.
    """
    root = phases(plan.inputs.root)
    for folder in (join(root, name) for name in storage.list_names(root)):
        if folder == plan.finished:
            continue
        if folder.startswith(join(root, plan.work)):
            for kind in plan.kinds:
                _move_whole(join(folder, kind), join(plan.finished, kind))
        storage.remove(folder, recursive=True)


def _move_whole(old: str, new: str) -> None:
    """Move the files that have a record and their size, then their records: each is whole at any moment."""
    sizes, files, records = storage.list_sizes(old), list[str](), list[str]()
    for name in sizes:
        if name.endswith(RECORD):
            try:
                entry = read_record(join(old, name)).facts["entry"]
            except (FileNotFoundError, TableError):
                continue
            if entry is None or sizes.get(entry["path"]) == entry["bytes"]:
                files += [entry["path"]] if entry else []
                records.append(name)
    for names in (files, records):
        storage.move_files(old, new, names)


def summarize(plan: MinePlan, number: int) -> dict[str, Any]:
    """Return shards in order, counters, quality and profile of the table of a source. Raises as `read_record`."""
    source = plan.sources[number]
    places = [(number, shard) for shard in range(len(source.queries.shards))]
    with ThreadPoolExecutor(_READERS) as readers:
        shards = list(readers.map(lambda place: read_finished(plan, place), places))
    audit = stack([shard.audit for shard in shards], plan.columns)
    quality = measure(np.concatenate([shard.sampled for shard in shards]), audit)
    tuned = {block: params for shard in shards for block, params in shard.params.items()}
    for name in ("nprobe", "ef_search", "refine"):
        values = [getattr(tuned[block], name) for block in sorted(tuned)]
        if any(value is not None for value in values):
            quality[name] = {"least": min(values), "most": max(values)}
    return {
        "shards": tuple(shard.entry for shard in shards),
        "counters": {name: sum(shard.counters[name] for shard in shards) for name in shards[0].counters},
        "quality": {**quality, **_overlap(plan, source, [shard.overlaps for shard in shards])},
        "profile": reduce(Profile.add, (shard.profile for shard in shards), Profile()).facts(),
    }


def _overlap(plan: MinePlan, source: Source, shares: list[np.ndarray | None]) -> dict[str, Any]:
    previous = plan.previous.get(source.name)
    whole = [share for share in shares if share is not None]
    if previous is None or len(whole) < len(shares):
        return {}
    values = np.concatenate(whole)
    return {
        "previous": previous.manifest.digest,
        "overlap_with_previous": float(values.mean()) if values.size else None,
    }
