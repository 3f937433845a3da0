"""Steps of a worker: load a block, search a shard against it, merge a shard, sum up a table.

Candidates between search and merge lie in storage, one file a block and shard, and not in the runner's memory: what a
worker holds is one block and one batch of queries, however many queries and labels there are.
"""

import contextlib
import itertools
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import faiss
import numpy as np
import pyarrow as pa

from pipelines.common.vectors import Source, read_block
from pipelines.mining.audit import (
    Audit,
    Profile,
    audit_block,
    measure,
    merge_audits,
    overlaps,
    release,
    stack,
    weakest_positives,
)
from pipelines.mining.candidates import Chunks, has_margin, read_chunk, select, write_chunks
from pipelines.mining.plan import MinePlan, Task
from schemas import PAD, storage
from schemas.layout import shard_name
from schemas.manifest import Shard
from schemas.randomness import sample_rows
from schemas.shard_files.parquet import matrix_array, writing_shard
from search.block import Block
from search.candidates import EMPTY, merge, unpack
from search.exclusions import Exclusions, Parts, positive_scores, start_search
from search.index import SearchParams, apply, build, set_up, tune, write_index
from search.nearest import CPU, find_device

_LARGEST_SCORE = float(np.finfo(np.float16).max)
_TUNING_QUERIES = 512
_PART = 512  # queries that a thread searches at a time: large enough to share the lists that they read
INDEX, SEARCH, MERGE = "index vectors", "search", "merge"  # steps
DROPS = ("positives_dropped", "filtered_dropped", "skipped_top", "beyond_window", "above_margin")
# Runners may give a worker process several threads; the memory that was planned is that of one work item at a time.
_ONE_ITEM = threading.Lock()
T = TypeVar("T")
Rows = tuple[pa.Array, list[np.ndarray], np.ndarray]  # query ids [B], keys [B, F] by label range, weakest positive [B]


class LoadedBlock(NamedTuple):
    """A block ready to be searched."""

    number: int
    block: Block
    params: SearchParams
    parts: Parts = Parts()


class WrittenShard(NamedTuple):
    """One shard of a table: its entry, its rows and those that are padded, and the sampled ones: keys [S, columns]."""

    entry: Shard
    rows: int
    padded: int
    sampled: np.ndarray


@dataclass(frozen=True)
class BlockCandidates:
    """Candidates of one block for one shard, and the audit of the shard's sampled rows.

    `content` is their file; of a sole block, whose candidates need no merge, the finished shard.
    """

    block: int
    content: Chunks | WrittenShard
    counts: Counter[str]
    audit: Audit
    params: SearchParams
    profile: Profile = field(compare=False)


class MergedShard(NamedTuple):
    """One finished shard: as written, counters, and its sampled rows as exact search fills them."""

    shard: int
    written: WrittenShard
    counters: dict[str, int]
    audit: Audit
    overlaps: np.ndarray | None
    params: dict[int, SearchParams]
    profile: Profile


def search_block(
    task: Task, plan: MinePlan, index_url: str | None
) -> Iterator[tuple[tuple[int, int], BlockCandidates]]:
    """Yield ((source, shard), candidates): an index is built, searched for all shards of the task, and discarded."""
    number, keep, shards = task
    with _ONE_ITEM:
        profile = Profile()
        block = load_block(plan, number, profile)
        if keep and index_url is not None:
            with profile.stage("keep index"):
                keep_block(plan, index_url, block)
        yield from search_shards(plan, block, shards, profile)
        del block
        release()


def merge_shard(element: tuple[tuple[int, int], Iterable[BlockCandidates]], plan: MinePlan) -> tuple[int, MergedShard]:
    """Write a shard of a table from ((source, shard), candidates of each block): (source, merged shard)."""
    (source, shard), candidates = element
    with _ONE_ITEM:
        return source, _merge(plan, plan.sources[source], shard, candidates)


def write_summary(element: tuple[int, Iterable[MergedShard]], plan: MinePlan) -> None:
    """Leave the summary of a table, from (source, its shards), for the launching process."""
    source = plan.sources[element[0]]
    storage.write_sealed(plan.summary(source), json.dumps(_summarize(plan, source, element[1])).encode())


def load_block(plan: MinePlan, number: int, profile: Profile) -> LoadedBlock:
    """Read, index and tune block `number`. Raises TableError, InputError."""
    plan.meter.start(INDEX)
    set_up(plan.options.threads)
    start, stop = plan.bounds[number]
    inputs = plan.inputs
    with profile.stage("read vectors"):
        vectors = read_block(inputs.vectors, start, stop, plan.dimension, inputs.drop_bias)
    with profile.stage("build index"):
        index = build(plan.factory, vectors, plan.options.seed)
        block = Block(start, vectors, index, find_device(plan.options.device))
    with profile.stage("tune"):
        tuned = _tune(plan, block)
    if plan.by_cost and not plan.factory.pays(len(vectors), plan.fetch, tuned.nprobe, plan.dimension):
        block, tuned = block.exact, SearchParams()
    apply(block.index, tuned)
    plan.meter.count(INDEX, stop - start)
    return LoadedBlock(number, block, tuned)


def keep_block(plan: MinePlan, url: str, loaded: LoadedBlock) -> None:
    """Write the block's index for good, and a note about it for the launching process. Raises StorageError."""
    entry = write_index(url, shard_name(loaded.number, len(plan.bounds), "faiss"), loaded.block)
    note = {"entry": entry.model_dump(), "params": asdict(loaded.params)}
    storage.write_sealed(plan.kept(loaded.number), json.dumps(note).encode())


def search_shards(
    plan: MinePlan, loaded: LoadedBlock, shards: Iterable[tuple[int, int]], profile: Profile
) -> Iterator[tuple[tuple[int, int], BlockCandidates]]:
    """Search every row of each (source, shard) against the block; write candidates, or a sole block's table.

    Threads search each a part of a batch alone: what comes before and after Faiss leaves no processor idle, none of
    them waits for another, as beside a training they would, and the parts at work are one batch at most. A GPU takes a
    batch whole. Raises TableError, StorageError.
    """
    with contextlib.ExitStack() as held:
        if loaded.block.index is not None or loaded.block.device == CPU:
            threads = faiss.omp_get_max_threads()
            pool = held.enter_context(ThreadPoolExecutor(threads, "extremis-search", set_up, (1,)))
            loaded = loaded._replace(parts=Parts(pool.map, max(1, min(_PART, plan.batch // threads))))
        profiles = itertools.chain([profile], iter(Profile, None))
        searches = (
            (shard, _search_shard(plan, loaded, shard, spent)) for shard, spent in zip(shards, profiles, strict=False)
        )
        # The rows that are audited are searched while the next shard is.
        for shard, wait in _one_ahead(searches):
            yield shard, wait()


def _merge(plan: MinePlan, source: Source, shard: int, candidates: Iterable[BlockCandidates]) -> MergedShard:
    """Write the best of all blocks for every row of the shard, aligned with its queries."""
    blocks = sorted(candidates, key=lambda offer: offer.block)
    profile = reduce(Profile.add, (offer.profile for offer in blocks), Profile())
    counts: Counter[str] = Counter()
    for offer in blocks:
        counts.update(offer.counts)
    written = blocks[0].content
    with profile.stage("merge"):
        if isinstance(written, Chunks):
            ids = enumerate(source.id_batches(shard, plan.batch))
            chunks = ((some, *_merge_chunk(plan, source, shard, blocks, number)) for number, some in ids)
            written = _write_shard(plan, source, shard, chunks, counts)
    rows, previous = _sampled_rows(plan, source, shard), plan.previous.get(source.name)
    shares = None if previous is None else overlaps(previous, shard, rows, written.sampled)
    counters = {"rows": written.rows, "padded_rows": written.padded, **funnel(counts)}
    tuned = {offer.block: offer.params for offer in blocks}
    return MergedShard(shard, written, counters, _exact_rows(plan, blocks, len(rows)), shares, tuned, profile)


def _summarize(plan: MinePlan, source: Source, merged: Iterable[MergedShard]) -> dict[str, Any]:
    """Return shards in order, counters, quality and profile of a table, as JSON values for the launching process."""
    shards = sorted(merged, key=lambda shard: shard.shard)
    audit = stack([shard.audit for shard in shards], plan.columns)
    quality = measure(np.concatenate([shard.written.sampled for shard in shards]), audit)
    tuned = {block: params for shard in shards for block, params in shard.params.items()}
    for name in ("nprobe", "ef_search", "refine"):
        values = [getattr(tuned[block], name) for block in sorted(tuned)]
        if any(value is not None for value in values):
            quality[name] = {"least": min(values), "most": max(values)}
    return {
        "shards": [shard.written.entry.model_dump() for shard in shards],
        "counters": {name: sum(shard.counters[name] for shard in shards) for name in shards[0].counters},
        "quality": {**quality, **_overlap(plan, source, [shard.overlaps for shard in shards])},
        "profile": reduce(Profile.add, (shard.profile for shard in shards), Profile()).facts(),
    }


def funnel(counts: Counter[str]) -> dict[str, int]:
    """Return the manifest's counters of candidates: their number less all that are dropped, by rule, is `kept`."""
    drops = {name: counts[name] for name in DROPS}
    outranked = counts["candidates"] - sum(drops.values()) - counts["kept"]
    return {"candidates": counts["candidates"], **drops, "outranked": outranked, "kept": counts["kept"]}


def _tune(plan: MinePlan, block: Block) -> SearchParams:
    if block.index is None:
        return SearchParams()
    lossy, fixed = plan.factory.lossy, plan.params
    level = fixed.nprobe if plan.factory.lists else fixed.ef_search
    if level is not None and (fixed.refine or not lossy):
        return fixed
    queries = plan.inputs.sources[0].some_queries(_TUNING_QUERIES, plan.options.seed, plan.dimension)[:_TUNING_QUERIES]
    return tune(block, fixed, lossy, queries, plan.fetch, plan.options.target_recall)


def _search_shard(
    plan: MinePlan, loaded: LoadedBlock, place: tuple[int, int], profile: Profile
) -> Callable[[], BlockCandidates]:
    """Search the shard of (source, shard); what is returned waits for its audit."""
    source, shard = plan.sources[place[0]], place[1]
    counts: Counter[str] = Counter()
    held: list[tuple[np.ndarray, Exclusions]] = []
    rows = _search_batches(plan, loaded, source, shard, counts, held)
    content: Chunks | WrittenShard
    with profile.stage("search"):
        if plan.sole:
            content = _write_shard(plan, source, shard, rows, counts)
        else:
            url = plan.candidates(source, shard, loaded.number)
            content = write_chunks(url, ((keys, weakest) for _, (keys,), weakest in rows))
    # Exact search of a handful of rows costs as much as of a hundred.
    queries = np.concatenate([np.empty((0, plan.dimension), np.float32), *(some for some, _ in held)])
    exclusions = reduce(Exclusions.concat, (some for _, some in held), Exclusions.empty())
    audits = loaded.parts.run(
        lambda some: audit_block(loaded.block, queries[some], exclusions.take(some), plan.fetch),
        np.split(np.arange(len(queries)), range(plan.batch, len(queries), plan.batch)),
    )

    def finish() -> BlockCandidates:
        with profile.stage("audit"):
            audit = stack(list(audits), plan.fetch)
        return BlockCandidates(loaded.number, content, counts, audit, loaded.params, profile)

    return finish


def _search_batches(
    plan: MinePlan,
    loaded: LoadedBlock,
    source: Source,
    shard: int,
    counts: Counter[str],
    held: list[tuple[np.ndarray, Exclusions]],
) -> Iterator[Rows]:
    """Search a shard; `held` gets the queries of audited rows."""
    plan.meter.start(SEARCH)
    block, audited = loaded.block, _sampled_rows(plan, source, shard)
    searches = (
        (batch, start_search(block, *batch[2:], plan.fetch, counts, loaded.params.factor, loaded.parts))
        for batch in source.batches(shard, plan.batch, plan.dimension)
    )
    for batch, wait in _one_ahead(searches):
        keys, weakest = wait(), np.full(len(batch.queries), np.inf, np.float32)
        if has_margin(plan.options):
            np.minimum.at(weakest, *positive_scores(block, batch.queries, batch.exclusions))
        yield batch.ids, [keys], weakest
        plan.meter.count(SEARCH, len(keys), 0 if plan.sole else keys.nbytes + weakest.nbytes)
        rows = _within(audited, batch.first, len(keys))
        held.append((batch.queries[rows], batch.exclusions.take(rows)))


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items, each when the next is there: of searches the next is at work while one is waited for."""
    held: deque[T] = deque()
    for item in items:
        held.append(item)
        if len(held) > 1:
            yield held.popleft()
    yield from held


def _write_shard(
    plan: MinePlan, source: Source, shard: int, batches: Iterable[Rows], counts: Counter[str]
) -> WrittenShard:
    """Write a shard of the table."""
    plan.meter.start(MERGE)
    audited, sampled = _sampled_rows(plan, source, shard), [np.empty((0, plan.columns), np.uint64)]
    padded = first = 0
    shards, group = len(source.queries.shards), source.queries.manifest.group_rows(shard)
    with writing_shard(plan.inputs.written(source), shard, shards, plan.schema, group) as out:
        for ids, ranges, weakest in batches:
            keys = select(ranges, weakest, plan.options, plan.width, counts)
            padded += int((keys == EMPTY).any(axis=1).sum())
            out.write(_table(ids, keys, plan.schema))
            sampled.append(keys[_within(audited, first, len(keys))])
            first += len(keys)
            plan.meter.count(MERGE, len(keys))
    plan.meter.count(MERGE, 0, out.entry.bytes)
    return WrittenShard(out.entry, first, padded, np.concatenate(sampled))


def _merge_chunk(
    plan: MinePlan, source: Source, shard: int, blocks: list[BlockCandidates], number: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return keys [B, F] of each label range and weakest positives [B] of one chunk.

    Two blocks' candidates are held at a time, however many there are.
    """
    ranges: dict[int, np.ndarray] = {}
    weakest: np.ndarray | None = None
    for offer in blocks:
        url = plan.candidates(source, shard, offer.block)
        assert isinstance(offer.content, Chunks)
        keys, lowest = read_chunk(url, offer.content, number, plan.batch, plan.fetch)
        of = plan.range_of[offer.block]
        ranges[of] = merge([ranges[of], keys], plan.fetch) if of in ranges else keys
        weakest = lowest if weakest is None else np.minimum(weakest, lowest)
    assert weakest is not None
    return [ranges[of] for of in sorted(ranges)], weakest


def _exact_rows(plan: MinePlan, blocks: list[BlockCandidates], rows: int) -> Audit:
    """Return the table's sampled rows as exact search would fill them: `exact` is keys [S, columns]."""
    by_range = [
        merge_audits([offer.audit for offer in blocks if plan.range_of[offer.block] == of], plan.fetch)
        for of in range(plan.options.ranges)
    ]
    whole = merge_audits([offer.audit for offer in blocks], plan.fetch)
    weakest = weakest_positives(rows, whole)
    return whole._replace(exact=select([audit.exact for audit in by_range], weakest, plan.options, plan.width))


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


def _table(query_ids: pa.Array, keys: np.ndarray, schema: pa.Schema) -> pa.Table:
    label_ids, scores = unpack(keys)
    clipped = np.where(label_ids == PAD, -np.inf, np.clip(scores, -_LARGEST_SCORE, _LARGEST_SCORE))
    columns = [
        query_ids,
        matrix_array(label_ids, schema.field("label_ids").type.value_type),
        matrix_array(clipped.astype(np.float16), pa.float16()),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _sampled_rows(plan: MinePlan, source: Source, shard: int) -> np.ndarray:
    """Return the audited rows of a shard, counted from its first row."""
    first = sum(entry.rows for entry in source.queries.shards[:shard])
    rows = sample_rows(source.queries.rows, plan.audited(source), plan.options.seed)
    return _within(rows, first, source.queries.shards[shard].rows)


def _within(rows: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return those of `rows` in [first, first + count), counted from `first`."""
    return rows[(rows >= first) & (rows < first + count)] - first
