"""Records of finished work (a table shard or a block's index); a table is summarised from its shards' records.

A worker writes a record when its work is finished. The launching process builds the manifest from the records. A
resumed attempt reuses the records of the same work, and the files that the records describe.
"""

import contextlib
import io
import json
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from pipelines.common.vectors import EmbeddedSource
from pipelines.mining.audit import Audit, Profile, measure, stack
from pipelines.mining.plan import RECORD, REMEDY, MinePlan, SourceShard
from schemas import storage
from schemas.errors import TableError
from schemas.layout import phases
from schemas.manifest import Shard
from schemas.sizes import with_room
from schemas.storage import join

_READERS = 16  # records read at a time
_REMEDY = "The record will be written again."


class Record(NamedTuple):
    """Record of finished work: the manifest entry of its file (None: no file), facts as JSON values, and arrays."""

    entry: Shard | None
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_record(url: str, entry: Shard | None, facts: dict[str, Any], **arrays: np.ndarray) -> None:
    """Write a record. Raises RoomError, StorageError."""
    out, body = io.BytesIO(), json.dumps([entry and entry.model_dump(), facts]).encode()
    np.savez(out, facts=np.frombuffer(body, np.uint8), **arrays)  # type: ignore[arg-type]
    with with_room(url, "records", out.tell(), REMEDY):
        storage.write_sealed(url, out.getvalue(), durable=True)


def read_record(url: str) -> Record:
    """Read a record. Raises FileNotFoundError, TableError (damaged), StorageError."""
    content = storage.read_sealed(url, _REMEDY)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        entry, facts = json.loads(arrays.pop("facts").tobytes())
        return Record(entry and Shard(**entry), facts, arrays)
    except (ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise TableError(f"{url}: not a mining record ({error}). {_REMEDY}") from None


def find_unfinished(plan: MinePlan) -> tuple[list[SourceShard], int]:
    """List the shards that no attempt has finished, and count the stored indexes. Lists folders but reads no files."""
    root = phases(plan.inputs.root)
    folders = [join(root, name) for name in storage.list_names(root) if name.startswith(plan.work_digest)]
    there = {
        join(kind, name)
        for at in folders
        for kind in plan.finished_folders
        for name in storage.list_names(join(at, kind))
    }
    indexes = sum(plan.index_record_path(block) in there for block in range(len(plan.bounds)))
    return [source_shard for source_shard in plan.source_shards if plan.record_path(source_shard) not in there], indexes


def take_over(plan: MinePlan) -> None:
    """Move the finished work of earlier attempts into this attempt; remove damaged files and the files of other plans.

    Raises StorageError.
    """
    root = phases(plan.inputs.root)
    for folder in (join(root, name) for name in storage.list_names(root)):
        if folder == plan.finished_root:
            continue
        for kind in plan.finished_folders if folder.startswith(join(root, plan.work_digest)) else ():
            _move_finished(join(folder, kind), join(plan.finished_root, kind))
        storage.remove(folder, recursive=True)


def _move_finished(old: str, new: str) -> None:
    """Move the files whose size matches their record, then the records, so that no moved record lacks its file."""
    sizes, files, records = storage.list_sizes(old), list[str](), list[str]()
    for name in (name for name in sizes if name.endswith(RECORD)):
        with contextlib.suppress(FileNotFoundError, TableError):
            entry = read_record(join(old, name)).entry
            if entry is None or sizes.get(entry.path) == entry.bytes:
                files += [entry.path] if entry else []
                records.append(name)
    for names in (files, records):
        storage.move_files(old, new, names)


def summarize(plan: MinePlan, source: EmbeddedSource) -> dict[str, Any]:
    """Return the ordered shards, the counters, the quality and the profile of a source's table.

    Raises the errors of `read_record`.
    """
    urls = [
        join(plan.finished_root, plan.record_path(source_shard))
        for source_shard in plan.source_shards
        if plan.sources[source_shard[0]] is source
    ]
    with ThreadPoolExecutor(_READERS) as readers:
        entries, facts, arrays = zip(*readers.map(read_record, urls), strict=True)
    audit = stack([Audit(*(each[name] for name in Audit._fields)) for each in arrays], plan.columns)
    quality = measure(np.concatenate([each["sampled"] for each in arrays]), audit)
    tuned = {block: params for each in facts for block, params in each["params"].items()}
    for name in ("nprobe", "ef_search", "refine", "recall"):
        if values := [params[name] for params in tuned.values() if params[name] is not None]:
            quality["index_recall" if name == "recall" else name] = {"least": min(values), "most": max(values)}
    return {
        "shards": entries,
        "counters": Counter({name: sum(each["counters"][name] for each in facts) for name in facts[0]["counters"]}),
        "quality": {**quality, **_overlap(plan, source, [each.get("overlaps") for each in arrays])},
        "profile": reduce(Profile.add, (Profile(**each["profile"]) for each in facts), Profile()).as_json(),
    }


def _overlap(plan: MinePlan, source: EmbeddedSource, shares: list[np.ndarray | None]) -> dict[str, Any]:
    previous = plan.previous.get(source.name)
    whole = [share for share in shares if share is not None]
    if previous is None or len(whole) < len(shares):
        return {}
    values = np.concatenate(whole)
    return {
        "previous": previous.manifest.digest,
        "overlap_with_previous": float(values.mean()) if values.size else None,
    }
