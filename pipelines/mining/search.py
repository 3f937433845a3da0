"""Search a group of blocks, merge a shard, and record what is done.

`search_group` and `merge_shard` are the stages of the flow; if a margin needs it, `score_group` runs in a flow before.
Then follow their parts, and records of finished shards and stored indexes, from which a later attempt continues. A key,
uint64, is a score and a label; keys sort best first (`search/topk.py`). B is the rows of a batch, F the plan's `fetch`.
`weakest` float32 is the lowest score among each row's positives, or infinity. An audit is the exact search of a sample
of the rows, whose recall the table records.
"""

import contextlib
import io
import json
import threading
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.mining.audit import Audit, Profile, audit_block, measure, merge_audits, overlaps, release_memory, stack
from pipelines.mining.filters import (
    Chunks,
    has_margin,
    read_aliases,
    read_chunk,
    rows_of_table,
    select_negatives,
    weakest_positives,
    write_chunks,
)
from pipelines.mining.inputs import EmbeddedSource, QueryBatch, read_block
from pipelines.mining.plan import INDEXES, RECORD, MinePlan, SourceShard, Task, remedy
from schemas import storage
from schemas.errors import TableError
from schemas.layout import phases, shard_name
from schemas.manifest import Shard
from schemas.randomness import sample_rows
from schemas.shard_files.parquet import writing_shard
from schemas.storage import join, with_room
from schemas.table import rechunk
from search.exclusions import Exclusions, ScoreRule, Subbatches, merge_passed, positive_scores, start_search
from search.index import SearchParams, build, read_index, require_recall, set_params, tune, write_index
from search.topk import CPU, EMPTY, Block, configure_faiss, faiss_threads, find_device

_TUNING_QUERIES = 512
_SUBBATCH = 512  # queries that a thread searches at a time: enough queries that many use the same inverted lists
INDEX, POSITIVES, SEARCH, MERGE = "index vectors", "score positives", "search", "merge"  # steps
DROPS = (  # counters of candidates that are no negatives, in the order of the rules
    *("positives_dropped", "filtered_dropped", "same_text_dropped", "skipped_top", "beyond_window"),
    *("above_margin", "above_max_score", "below_min_score", "not_drawn"),
)
# Runners may give a worker process several threads; the planned memory suffices for one work item at a time.
_TASK_LOCK = threading.Lock()
T = TypeVar("T")
# Sampled rows of a batch: queries [S, D], the labels to drop, weakest [S].
Sample = tuple[np.ndarray, Exclusions, np.ndarray]
# Rows of a batch: query ids [B], keys [B, F] of each label range, weakest [B].
CandidateRows = tuple[pa.Array, list[np.ndarray], np.ndarray]


class LoadedBlock(NamedTuple):
    """A block that is ready for search."""

    number: int
    block: Block
    params: SearchParams
    subbatches: Subbatches = Subbatches()


class WrittenShard(NamedTuple):
    """A shard of a table: entry, number of rows with too few negatives, keys [S, columns] and ids [S] of the sample."""

    entry: Shard
    padded: int
    sampled: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class GroupCandidates:
    """Candidates of one group of blocks for one shard, with the shard's audits by label range.

    `content`: the chunks of the file of candidates, one for each batch, or, with only one group, the finished shard.
    `params`: search parameters by block.
    """

    group: int
    content: Chunks | WrittenShard
    counts: Counter[str]
    audits: dict[int, Audit]
    params: dict[int, SearchParams]
    profile: Profile = field(compare=False)


def score_group(task: Task, plan: MinePlan) -> None:
    """Write `weakest` of the positives in a group, for the search. Raises TableError, StorageError."""
    group, _, source_shards = task
    with _TASK_LOCK:
        how = plan.dimension, plan.inputs.drop_bias
        bounds = plan.bounds[slice(*plan.groups[group])]
        blocks = [Block(start, read_block(plan.inputs.vectors, start, stop, *how)) for start, stop in bounds]
        for source_shard in source_shards:
            weakest = np.full(plan.rows([source_shard]), np.inf, np.float32)
            for batch in _batches(plan, source_shard, weakest, blocks):
                plan.meter.count(POSITIVES, len(batch.queries))
            storage.write_sealed(f"{plan.candidates_url(source_shard, group)}.weakest", weakest.tobytes())
        del blocks
        release_memory()


def search_group(task: Task, plan: MinePlan) -> Iterator[tuple[SourceShard, GroupCandidates]]:
    """Build or read the indexes of a group, and search all shards of the task; yield ((source, shard), candidates).

    If there is only one group, this step finishes the shards and yields nothing. Raises TableError, InputError,
    StorageError.
    """
    group, keep, source_shards = task
    with _TASK_LOCK:
        profile = Profile()
        blocks = [load_block(plan, number, profile, keep) for number in range(*plan.groups[group])]
        for source_shard, candidates in search_shards(plan, group, blocks, source_shards, profile):
            if plan.has_one_group:
                _finish_shard(plan, source_shard, [candidates])
            else:
                yield source_shard, candidates
        del blocks
        release_memory()


def merge_shard(element: tuple[SourceShard, Iterable[GroupCandidates]], plan: MinePlan) -> None:
    """Write a shard of a table and its record from ((source, shard), candidates of each group)."""
    with _TASK_LOCK:
        _finish_shard(plan, *element)


def load_block(plan: MinePlan, number: int, profile: Profile, keep: bool = False) -> LoadedBlock:
    """Read, index and tune block `number`, or read its stored index; with `keep`, store a new index.

    Raises TableError, InputError, StorageError.
    """
    plan.meter.start(INDEX)
    configure_faiss(plan.options.threads)
    (start, stop), inputs, target = plan.bounds[number], plan.inputs, plan.options.target_recall
    indexes, record = join(plan.finished_root, INDEXES), join(plan.finished_root, plan.index_record_path(number))
    with profile.stage("read vectors"):
        vectors = read_block(inputs.vectors, start, stop, plan.dimension, inputs.drop_bias)
    block, tuned = Block(start, vectors, None, find_device(plan.options.device)), SearchParams()
    if not plan.factory.exact:
        with contextlib.suppress(FileNotFoundError, TableError), profile.stage("read index"):  # built again if damaged
            kept = read_record(record)
            index = None if kept.entry is None else read_index(indexes, kept.entry)
            stored = SearchParams(**kept.facts["params"])
            set_params(index, stored)
            plan.meter.count(INDEX, stop - start)
            return LoadedBlock(number, replace(block, index=index), stored)
    with profile.stage("build index"):
        block = replace(block, index=build(plan.factory, vectors, plan.options.seed))
    with profile.stage("tune"):
        if block.index is not None:
            queries = inputs.sources[0].sample_queries(_TUNING_QUERIES, plan.options.seed, plan.dimension)
            queries = queries[:_TUNING_QUERIES]
            tuned = tune(block, plan.params, plan.factory.lossy, queries, plan.fetch, target)
    saves_time = plan.factory.saves_time(len(vectors), plan.fetch, tuned.nprobe, plan.dimension)
    # If the cost chose the index, a block in which the index saves no time or misses the target is searched exactly.
    if plan.by_cost and (not saves_time or (tuned.recall or 0.0) < target):
        block, tuned = block.exact, SearchParams()
    require_recall(plan.factory, tuned, target, fixed=plan.params)
    set_params(block.index, tuned)
    plan.meter.count(INDEX, stop - start)
    if keep:
        with profile.stage("keep index"):
            entry = None
            if block.index is not None:
                name, size = shard_name(number, len(plan.bounds), "faiss"), plan.index_bytes() // len(plan.bounds)
                with with_room(indexes, "an index", size, remedy()):
                    entry = write_index(indexes, name, block)
            write_record(record, entry, {"params": asdict(tuned)})
    return LoadedBlock(number, block, tuned)


def search_shards(
    plan: MinePlan, group: int, blocks: Sequence[LoadedBlock], source_shards: Iterable[SourceShard], profile: Profile
) -> Iterator[tuple[SourceShard, GroupCandidates]]:
    """Search all rows of each (source, shard) in the blocks; write candidates, or the table if there is one group.

    Each thread searches its own sub-batch, so the work before and after Faiss also uses all processors, and no thread
    waits for another thread. The sub-batches in progress add up to at most one batch. A GPU searches a whole batch.
    Raises TableError, StorageError.
    """
    threads = faiss_threads()
    with ThreadPoolExecutor(threads, "extremis-search", configure_faiss, (1,)) as pool:
        subbatches = Subbatches(pool.map, max(1, min(_SUBBATCH, plan.batch // threads)))
        blocks = [
            each._replace(subbatches=subbatches) if each.block.index is not None or each.block.device == CPU else each
            for each in blocks
        ]
        searches = (  # the first shard's profile includes the time to load the blocks
            (source_shard, _search_shard(plan, group, blocks, source_shard, Profile() if number else profile))
            for number, source_shard in enumerate(source_shards)
        )
        # The audit of a shard runs during the search of the next shard.
        for source_shard, wait in _look_ahead(searches):
            yield source_shard, wait()


def _search_shard(
    plan: MinePlan, group: int, blocks: Sequence[LoadedBlock], source_shard: SourceShard, profile: Profile
) -> Callable[[], GroupCandidates]:
    """Search one shard and start its audit; the returned function waits for the audit and returns the candidates."""
    counts: Counter[str] = Counter()
    samples: list[Sample] = []
    batches = _search_batches(plan, blocks, source_shard, counts, samples)
    content: Chunks | WrittenShard
    with profile.stage("search"):
        if plan.has_one_group:
            content = _write_shard(plan, source_shard, batches, counts)
        else:
            url = plan.candidates_url(source_shard, group)
            size = int(plan.rows([source_shard]) * plan.candidate_bytes(group))
            packed = (np.stack(keys) for _, keys, _ in batches)
            with with_room(url, "candidates", size, remedy()):
                content = write_chunks(url, blocks[0].block.start, packed)
            plan.meter.count(SEARCH, 0, content.edges[-1])
    # Exact search costs as much for a few rows as for a hundred, so the sampled rows are searched together.
    queries = np.concatenate([np.empty((0, plan.dimension), np.float32), *(some for some, _, _ in samples)])
    exclusions = Exclusions.join(some for _, some, _ in samples)
    weakest = np.concatenate([np.empty(0, np.float32), *(some for _, _, some in samples)])
    parts = np.split(np.arange(len(queries)), range(plan.batch, len(queries), plan.batch))
    rule = plan.rule(weakest)

    def audit(each: LoadedBlock) -> Iterator[Audit]:
        return each.subbatches.run(
            lambda at: audit_block(each.block, queries[at], exclusions.take(at), plan.fetch, plan.rule(weakest[at])),
            parts,
        )

    audits = [audit(each) for each in blocks]

    def finish() -> GroupCandidates:
        by_range: dict[int, list[Audit]] = {}
        with profile.stage("audit"):
            for each, audited in zip(blocks, audits, strict=True):
                by_range.setdefault(plan.range_of[each.number], []).append(stack(list(audited), plan.fetch))
        merged = {number: merge_audits(some, plan.fetch, rule) for number, some in by_range.items()}
        tuned = {each.number: each.params for each in blocks}
        return GroupCandidates(group, content, counts, merged, tuned, profile)

    return finish


def _search_batches(
    plan: MinePlan,
    blocks: Sequence[LoadedBlock],
    source_shard: SourceShard,
    counts: Counter[str],
    samples: list[Sample],
) -> Iterator[CandidateRows]:
    """Search a shard, reading its batches once for all blocks; append the sampled rows of each batch to `samples`."""
    plan.meter.start(SEARCH)
    sampled, known = _sampled_rows(plan, source_shard), _read_weakest(plan, source_shard)
    scored = [each.block for each in blocks] if has_margin(plan.options) and plan.has_one_group else []

    def start() -> Iterator[tuple[QueryBatch, ScoreRule | None, LoadedBlock, Callable[[], np.ndarray]]]:
        for batch in _batches(plan, source_shard, known, scored):
            rule = plan.rule(batch.weakest)
            for each in blocks:
                how = plan.fetch, counts, each.params.factor, each.subbatches, rule
                yield batch, rule, each, start_search(each.block, batch.queries, batch.exclusions, *how)

    ranges: dict[int, np.ndarray] = {}
    for batch, rule, each, wait in _look_ahead(start()):
        if each is blocks[0]:
            ranges = {}
        _merge_range(ranges, plan.range_of[each.number], wait(), plan.fetch, rule)
        plan.meter.count(SEARCH, len(batch.queries))
        if each is blocks[-1]:
            yield batch.ids, list(ranges.values()), batch.weakest
            rows = _within(sampled, batch.first, len(batch.queries))
            samples.append((batch.queries[rows], batch.exclusions.take(rows), batch.weakest[rows]))


def _batches(
    plan: MinePlan, source_shard: SourceShard, weakest: np.ndarray, blocks: Sequence[Block]
) -> Iterator[QueryBatch]:
    """Read a shard in batches, with the labels to drop, which include labels with the same text as a positive.

    Positives in `blocks` lower `weakest` [rows] in place, before the batch is searched.
    """
    for batch in plan.sources[source_shard[0]].batches(source_shard[1], plan.batch, plan.dimension):
        lowest = weakest[batch.first :][: len(batch.queries)]
        for block in blocks:
            np.minimum.at(lowest, *positive_scores(block, batch.queries, batch.exclusions))
        exclusions = batch.exclusions
        if plan.aliases:
            exclusions = read_aliases(plan.alias_url).add_to(exclusions)
        yield batch._replace(exclusions=exclusions, weakest=lowest)


def _read_weakest(plan: MinePlan, source_shard: SourceShard) -> np.ndarray:
    """Return `weakest` [rows] of all groups, as `score_group` wrote it; infinity if there was no such flow."""
    weakest = np.full(plan.rows([source_shard]), np.inf, np.float32)
    if plan.scores_positives:
        for group in range(len(plan.groups)):
            content = storage.read_sealed(f"{plan.candidates_url(source_shard, group)}.weakest", "Mine again.")
            np.minimum(weakest, np.frombuffer(content, np.float32), out=weakest)
    return weakest


def _look_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items in order, each only after the next item is read, so that the next search is already running."""
    read: deque[T] = deque()
    for item in items:
        read.append(item)
        if len(read) > 1:
            yield read.popleft()
    yield from read


def _merge_range(ranges: dict[int, np.ndarray], at: int, keys: np.ndarray, fetch: int, rule: ScoreRule | None) -> None:
    ranges[at] = merge_passed([ranges[at], keys], fetch, rule) if at in ranges else keys


def _finish_shard(plan: MinePlan, source_shard: SourceShard, candidates: Iterable[GroupCandidates]) -> None:
    """Write a shard of the table, with the best candidates of all groups for every row, and the shard's record.

    The keys of the audit pass the same filters as the keys of the table, so that both can be compared.
    """
    source, shard = plan.sources[source_shard[0]], source_shard[1]
    groups = sorted(candidates, key=lambda each: each.group)
    profile = reduce(Profile.add, (each.profile for each in groups), Profile())
    counts = sum((each.counts for each in groups), Counter[str]())
    written = groups[0].content
    with profile.stage("merge"):
        if isinstance(written, Chunks):
            ids = rechunk(source.queries.batches_of(shard, [source.queries.id_column]), plan.batch)
            weakest = _read_weakest(plan, source_shard)
            chunks = (
                (some.column(0).combine_chunks(), *_merge_chunk(plan, source_shard, groups, number, weakest))
                for number, some in enumerate(ids)
            )
            written = _write_shard(plan, source_shard, chunks, counts)
    rows, previous = _sampled_rows(plan, source_shard), plan.previous.get(source.name)
    shares = None if previous is None else overlaps(previous, shard, rows, written.sampled)
    counters = {"rows": written.entry.rows, "padded_rows": written.padded, **funnel(counts)}
    tuned = {block: asdict(params) for each in groups for block, params in each.params.items()}
    whole = merge_audits([audit for each in groups for audit in each.audits.values()], plan.fetch, None)
    weakest = weakest_positives(len(rows), whole.positive_rows, whole.positive_scores)
    rule = plan.rule(weakest)
    exact = [
        merge_audits([each.audits[number] for each in groups if number in each.audits], plan.fetch, rule).exact
        for number in range(plan.options.ranges)
    ]
    audit = whole._replace(exact=select_negatives(written.ids, exact, weakest, plan.options, plan.width))
    facts = {"counters": counters, "params": tuned, "profile": asdict(profile)}
    arrays = {"sampled": written.sampled, **audit._asdict()} | ({} if shares is None else {"overlaps": shares})
    write_record(join(plan.finished_root, plan.record_path(source_shard)), written.entry, facts, **arrays)


def _merge_chunk(
    plan: MinePlan, source_shard: SourceShard, groups: list[GroupCandidates], number: int, weakest: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Merge chunk `number`, a batch of the search, of all groups: keys [B, F] of each label range, and weakest [B].

    The candidates of at most two groups are in memory at a time.
    """
    ranges: dict[int, np.ndarray] = {}
    weakest = weakest[number * plan.batch :][: plan.batch]
    rule = plan.rule(weakest)
    for each in groups:
        assert isinstance(each.content, Chunks)
        first, stop = plan.groups[each.group]
        start = plan.bounds[first][0]
        keys = read_chunk(plan.candidates_url(source_shard, each.group), each.content, number, start)
        for at, some in zip(dict.fromkeys(plan.range_of[first:stop]), keys, strict=True):
            _merge_range(ranges, at, some, plan.fetch, rule)
    return list(ranges.values()), weakest


def _write_shard(
    plan: MinePlan, source_shard: SourceShard, batches: Iterable[CandidateRows], counts: Counter[str]
) -> WrittenShard:
    plan.meter.start(MERGE)
    source, shard = plan.sources[source_shard[0]], source_shard[1]
    to_sample, padded, first = _sampled_rows(plan, source_shard), 0, 0
    sampled, sampled_ids = [np.empty((0, plan.columns), np.uint64)], [np.empty(0, np.int64)]
    url, cut = plan.staged_table_url(source), (shard, len(source.queries.shards))
    room = with_room(url, "tables", plan.table_bytes(source.queries.shards[shard].rows), remedy())
    with room, writing_shard(url, *cut, plan.schema, source.queries.manifest.group_rows(shard)) as out:
        for ids, ranges, weakest in batches:
            numbers = ids.to_numpy()
            keys = select_negatives(numbers, ranges, weakest, plan.options, plan.width, counts)
            padded += int((keys == EMPTY).any(axis=1).sum())
            out.write(rows_of_table(ids, keys, plan.schema))
            rows = _within(to_sample, first, len(keys))
            sampled.append(keys[rows])
            sampled_ids.append(numbers[rows])
            first += len(keys)
            plan.meter.count(MERGE, len(keys))
    plan.meter.count(MERGE, 0, out.entry.bytes)
    return WrittenShard(out.entry, padded, np.concatenate(sampled), np.concatenate(sampled_ids))


def funnel(counts: Counter[str]) -> dict[str, int]:
    """Return the candidate counters for the manifest; `kept` is `candidates` minus all other counters."""
    drops = {name: counts[name] for name in DROPS}
    outranked = counts["candidates"] - sum(drops.values()) - counts["kept"]
    return {"candidates": counts["candidates"], **drops, "outranked": outranked, "kept": counts["kept"]}


def _sampled_rows(plan: MinePlan, source_shard: SourceShard) -> np.ndarray:
    """Return the rows of a shard to audit, numbered from the shard's first row."""
    source, shard = plan.sources[source_shard[0]], source_shard[1]
    first = sum(entry.rows for entry in source.queries.shards[:shard])
    rows = sample_rows(source.queries.rows, plan.audit_size(source), plan.options.seed)
    return _within(rows, first, source.queries.shards[shard].rows)


def _within(rows: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return the rows of `rows` in [first, first + count), relative to `first`."""
    return rows[(rows >= first) & (rows < first + count)] - first


# Records of finished work.


class Record(NamedTuple):
    """Record of finished work: the manifest entry of its file (None: no file), facts as JSON values, and arrays."""

    entry: Shard | None
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_record(url: str, entry: Shard | None, facts: dict[str, Any], **arrays: np.ndarray) -> None:
    """Write a record. Raises RoomError, StorageError."""
    out, body = io.BytesIO(), json.dumps([entry and entry.model_dump(), facts]).encode()
    np.savez(out, facts=np.frombuffer(body, np.uint8), **arrays)  # type: ignore[arg-type]
    with with_room(url, "records", out.tell(), remedy()):
        storage.write_sealed(url, out.getvalue(), durable=True)


def read_record(url: str) -> Record:
    """Read a record. Raises FileNotFoundError, TableError (damaged), StorageError."""
    remedy = "The record will be written again."
    content = storage.read_sealed(url, remedy)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        entry, facts = json.loads(arrays.pop("facts").tobytes())
        return Record(entry and Shard(**entry), facts, arrays)
    except (ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise TableError(f"{url}: not a mining record ({error}). {remedy}") from None


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
    """Move finished work of earlier attempts to this attempt; remove all else. Raises StorageError."""
    root = phases(plan.inputs.root)
    for folder in (join(root, name) for name in storage.list_names(root)):
        if folder == plan.finished_root:
            continue
        for kind in plan.finished_folders if folder.startswith(join(root, plan.work_digest)) else ():
            old, files, records = join(folder, kind), list[str](), list[str]()
            sizes = storage.list_sizes(old)
            for name in (name for name in sizes if name.endswith(RECORD)):
                with contextlib.suppress(FileNotFoundError, TableError):
                    entry = read_record(join(old, name)).entry
                    if entry is None or sizes.get(entry.path) == entry.bytes:
                        files += [entry.path] if entry else []
                        records.append(name)
            for names in (files, records):  # in this order, so that no moved record lacks its file
                storage.move_files(old, join(plan.finished_root, kind), names)
        storage.remove(folder, recursive=True)


def summarize(plan: MinePlan, source: EmbeddedSource) -> dict[str, Any]:
    """Sum up the records of a source's table: shards in order, counters, quality, profile. Errors: `read_record`."""
    shards = [source_shard for source_shard in plan.source_shards if plan.sources[source_shard[0]] is source]
    urls = [join(plan.finished_root, plan.record_path(source_shard)) for source_shard in shards]
    with ThreadPoolExecutor(16) as readers:
        entries, facts, arrays = zip(*readers.map(read_record, urls), strict=True)
    audit = stack([Audit(*(each[name] for name in Audit._fields)) for each in arrays], plan.columns)
    quality = measure(np.concatenate([each["sampled"] for each in arrays]), audit)
    tuned = {block: params for each in facts for block, params in each["params"].items()}
    for name in ("nprobe", "ef_search", "refine", "recall"):
        if values := [params[name] for params in tuned.values() if params[name] is not None]:
            quality["index_recall" if name == "recall" else name] = {"least": min(values), "most": max(values)}
    if (previous := plan.previous.get(source.name)) is not None and all("overlaps" in each for each in arrays):
        shares = np.concatenate([each["overlaps"] for each in arrays])
        quality |= {"previous": previous.digest, "overlap_with_previous": float(shares.mean()) if shares.size else None}
    return {
        "shards": entries,
        "counters": Counter({name: sum(each["counters"][name] for each in facts) for name in facts[0]["counters"]}),
        "quality": quality,
        "profile": reduce(Profile.add, (Profile(**each["profile"]) for each in facts), Profile()).as_json(),
    }
