"""What workers carry out: load a block, search a shard against it, merge a shard, sum up a table.

Candidates between search and merge lie in storage, one file a block and shard, and not in the runner's memory: what a
worker holds is one block and one batch of queries, however many queries and labels there are.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.common.aligned import Source
from pipelines.common.vector_blocks import read_block
from pipelines.mining import kept_index as kept
from pipelines.mining import overlap
from pipelines.mining.audit import Audit, audit_block, measure, merge_audits, stack, weakest_positives
from pipelines.mining.candidate_files import Chunks, ChunkWriter, read_chunk
from pipelines.mining.filters import Funnel, select
from pipelines.mining.plan import Plan
from pipelines.mining.profile import Spent
from schemas import storage, tables
from schemas.manifest import Shard
from schemas.shard_files.parquet import ShardFile, matrix_array
from search import effort
from search.block import Block
from search.candidates import EMPTY, merge, unpack
from search.effort import Effort
from search.exclusions import Dropped, Exclusions, positive_scores, search_negatives
from search.index import build, set_up
from search.sample import sample_rows

_LARGEST_SCORE = float(np.finfo(np.float16).max)
_TUNING_QUERIES = 512


class Loaded(NamedTuple):
    """A block ready to be searched."""

    number: int
    block: Block
    effort: Effort


@dataclass(frozen=True)
class Found:
    """What one block offers one shard: its file of candidates, and the audit of the shard's sampled rows."""

    block: int
    chunks: Chunks
    dropped: Dropped
    audit: Audit
    effort: Effort
    spent: Spent = field(compare=False)


class Merged(NamedTuple):
    """One finished shard: its entry, counters, and its sampled rows (keys [S, columns]) beside exact search's."""

    shard: int
    entry: Shard
    counters: dict[str, int]
    sampled: np.ndarray
    audit: Audit
    overlaps: np.ndarray | None
    efforts: dict[int, Effort]
    spent: Spent


def load_block(plan: Plan, number: int, spent: Spent) -> Loaded:
    """Block `number` read, indexed and tuned. Raises TableError, InputError."""
    set_up(plan.options.threads)
    start, stop = plan.bounds[number]
    inputs = plan.inputs
    with spent.stage("read vectors"):
        vectors = read_block(inputs.vectors_url, inputs.vectors, start, stop, plan.dimension, inputs.drop_bias)
    with spent.stage("build index"):
        block = Block(start, vectors, build(plan.factory, vectors, plan.options.seed))
    with spent.stage("tune"):
        chosen = _tuned(plan, block)
    effort.apply(block.index, chosen)
    return Loaded(number, block, chosen)


def keep_block(plan: Plan, url: str, loaded: Loaded) -> None:
    """Write the block's index for good, and a note about it for the launching process. Raises StorageError."""
    entry = kept.keep(url, loaded.number, len(plan.bounds), loaded.block)
    note = {"entry": entry.model_dump(), "effort": asdict(loaded.effort)}
    storage.write_bytes(plan.kept(loaded.number), json.dumps(note).encode(), durable=False)


def search_shard(plan: Plan, loaded: Loaded, source: Source, shard: int, spent: Spent) -> Found:
    """Search every row of the shard against the block and write the candidates. Raises TableError, StorageError."""
    number, block, chosen = loaded
    sampled = _sampled_rows(plan, source, shard)
    dropped = Dropped()
    held: list[tuple[np.ndarray, Exclusions]] = []
    with spent.stage("search"), ChunkWriter(plan.candidates(source, shard, number)) as out:
        for batch in source.batches(shard, plan.batch, plan.dimension):
            keys = search_negatives(block, batch.queries, batch.exclusions, plan.fetch, dropped, chosen.factor)
            out.write(keys, _weakest(plan, block, batch.queries, batch.exclusions))
            here = sampled[(sampled >= batch.first) & (sampled < batch.first + len(batch.queries))] - batch.first
            if here.size:
                held.append((batch.queries[here], batch.exclusions.take(here)))
    with spent.stage("audit"):
        audits = [audit_block(block, *rows, plan.fetch) for rows in _gathered(held, plan.batch)]
    return Found(number, out.chunks, dropped, stack(audits, plan.fetch), chosen, spent)


def merge_shard(plan: Plan, source: Source, shard: int, found: Iterable[Found]) -> Merged:
    """The best of all blocks for every row of the shard, written aligned with its queries."""
    blocks = sorted(found, key=lambda one: one.block)
    spent, funnel = Spent(), Funnel()
    for one in blocks:
        spent.add(one.spent)
    rows = _sampled_rows(plan, source, shard)
    sampled = [np.empty((0, plan.columns), np.uint64)]
    padded = at = 0
    shards, group = len(source.queries.shards), source.queries.row_group_rows or 1
    with spent.stage("merge"), ShardFile(plan.inputs.table(source), shard, shards, plan.schema, group) as out:
        for number, ids in enumerate(source.id_batches(shard, plan.batch)):
            keys, of_chunk = _merged_chunk(plan, source, shard, blocks, number)
            funnel.add(of_chunk)
            padded += int((keys == EMPTY).any(axis=1).sum())
            out.write(_table(ids, keys, plan.schema))
            sampled.append(keys[rows[(rows >= at) & (rows < at + len(keys))] - at])
            at += len(keys)
    keys = np.concatenate(sampled)
    previous = plan.previous.get(source.name)
    shares = None if previous is None else overlap.overlaps(previous, shard, rows, keys)
    dropped = Dropped()
    for one in blocks:
        dropped.add(one.dropped)
    efforts = {one.block: one.effort for one in blocks}
    audit = _exact(plan, blocks, len(rows))
    counters = {"rows": at, "padded_rows": padded, **_counters(dropped, funnel)}
    return Merged(shard, out.entry, counters, keys, audit, shares, efforts, spent)


def summarize(plan: Plan, source: Source, merged: Iterable[Merged]) -> bytes:
    """Shards in order, counters and quality of a table, and what it took, as JSON for the launching process."""
    shards = sorted(merged, key=lambda one: one.shard)
    spent = Spent()
    for one in shards:
        spent.add(one.spent)
    audit = stack([one.audit for one in shards], plan.columns)
    quality = measure(np.concatenate([one.sampled for one in shards]), audit)
    efforts = {block: effort for one in shards for block, effort in one.efforts.items()}
    for name in ("nprobe", "ef_search", "refine"):
        chosen = [getattr(efforts[block], name) for block in sorted(efforts)]
        if any(value is not None for value in chosen):
            quality[name] = {"least": min(chosen), "most": max(chosen)}
    body: dict[str, Any] = {
        "shards": [one.entry.model_dump() for one in shards],
        "counters": {name: sum(one.counters[name] for one in shards) for name in shards[0].counters},
        "quality": {**quality, **_overlap(plan, source, [one.overlaps for one in shards])},
        "spent": spent.facts(),
    }
    return json.dumps(body, sort_keys=True).encode()


def _tuned(plan: Plan, block: Block) -> Effort:
    if block.index is None:
        return Effort()
    lossy, wanted = plan.factory.lossy, plan.effort
    given = wanted.nprobe if plan.factory.lists else wanted.ef_search
    if given is not None and (wanted.refine or not lossy):
        return wanted
    queries = plan.inputs.sources[0].some_queries(_TUNING_QUERIES, plan.options.seed, plan.dimension)[:_TUNING_QUERIES]
    return effort.tune(block, wanted, lossy, queries, plan.fetch, plan.options.target_recall)


def _weakest(plan: Plan, block: Block, queries: np.ndarray, exclusions: Exclusions) -> np.ndarray:
    weakest = np.full(len(queries), np.inf, np.float32)
    if plan.filters.has_margin:
        np.minimum.at(weakest, *positive_scores(block, queries, exclusions))
    return weakest


def _gathered(held: list[tuple[np.ndarray, Exclusions]], most: int) -> list[tuple[np.ndarray, Exclusions]]:
    """Sampled rows of many batches in few: exact search of a handful of rows costs as much as of a hundred."""
    gathered: list[tuple[np.ndarray, Exclusions]] = []
    for queries, exclusions in held:
        if gathered and len(gathered[-1][0]) + len(queries) <= most:
            before, theirs = gathered[-1]
            gathered[-1] = (np.concatenate([before, queries]), theirs.concat(exclusions))
        else:
            gathered.append((queries, exclusions))
    return gathered


def _merged_chunk(
    plan: Plan, source: Source, shard: int, blocks: list[Found], number: int
) -> tuple[np.ndarray, Funnel]:
    """Rows of one chunk: keys [B, columns]. Two blocks' candidates are held at a time, however many there are."""
    ranges: dict[int, np.ndarray] = {}
    weakest: np.ndarray | None = None
    for one in blocks:
        url = plan.candidates(source, shard, one.block)
        keys, lowest = read_chunk(url, one.chunks, number, plan.batch, plan.fetch)
        of = plan.range_of[one.block]
        ranges[of] = merge([ranges[of], keys], plan.fetch) if of in ranges else keys
        weakest = lowest if weakest is None else np.minimum(weakest, lowest)
    assert weakest is not None
    return select([ranges[of] for of in sorted(ranges)], weakest, plan.filters, plan.width)


def _exact(plan: Plan, blocks: list[Found], rows: int) -> Audit:
    """What the table's sampled rows would be with exact search: `exact` is keys [S, columns]."""
    by_range = [
        merge_audits([one.audit for one in blocks if plan.range_of[one.block] == of], plan.fetch)
        for of in range(plan.options.ranges)
    ]
    whole = merge_audits([one.audit for one in blocks], plan.fetch)
    keys, _ = select([audit.exact for audit in by_range], weakest_positives(rows, whole), plan.filters, plan.width)
    return whole._replace(exact=keys)


def _counters(dropped: Dropped, funnel: Funnel) -> dict[str, int]:
    """The funnel: `candidates` less everything that is dropped, by rule, is `kept`."""
    lost = {
        "positives_dropped": dropped.positives,
        "filtered_dropped": dropped.filtered,
        "skipped_top": funnel.skipped_top,
        "beyond_window": funnel.beyond_window,
        "above_margin": funnel.above_margin,
    }
    outranked = dropped.candidates - sum(lost.values()) - funnel.kept
    return {"candidates": dropped.candidates, **lost, "outranked": outranked, "kept": funnel.kept}


def _overlap(plan: Plan, source: Source, shares: list[np.ndarray | None]) -> dict[str, Any]:
    previous = plan.previous.get(source.name)
    known = [one for one in shares if one is not None]
    if previous is None or len(known) < len(shares):
        return {}
    whole = np.concatenate(known)
    return {
        "previous": previous.manifest.digest,
        "overlap_with_previous": float(whole.mean()) if whole.size else None,
    }


def _table(query_ids: pa.Array, keys: np.ndarray, schema: pa.Schema) -> pa.Table:
    label_ids, scores = unpack(keys)
    clipped = np.where(label_ids == tables.PAD, -np.inf, np.clip(scores, -_LARGEST_SCORE, _LARGEST_SCORE))
    columns = [
        query_ids,
        matrix_array(label_ids, schema.field("label_ids").type.value_type),
        matrix_array(clipped.astype(np.float16), pa.float16()),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _sampled_rows(plan: Plan, source: Source, shard: int) -> np.ndarray:
    """The audited rows of a shard, counted from its first row."""
    first = sum(entry.rows for entry in source.queries.shards[:shard])
    rows = sample_rows(source.queries.rows, plan.audited(source), plan.options.seed)
    return rows[(rows >= first) & (rows < first + source.queries.shards[shard].rows)] - first
