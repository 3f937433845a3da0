"""The three steps that workers carry out: search a shard against a block, merge a shard, sum up a table.

Candidates between the first two lie in storage, one file a block and shard, and not in the runner's memory: what a
worker holds is one block, one batch of queries, and one shard's result, however many queries and labels there are.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.mining.audit import Audit, audit_block, measure, merge_audits, sample_rows, stack
from pipelines.mining.blocks import read_block
from pipelines.mining.candidates import EMPTY, merge, unpack
from pipelines.mining.dump import Source
from pipelines.mining.exclusions import Dropped, search_negatives
from pipelines.mining.index import build
from pipelines.mining.plan import Plan
from pipelines.mining.search import Block
from schemas import tables
from schemas.manifest import Shard
from schemas.parquet import matrix_array, matrix_column, write_shard
from schemas.shards import iterate_shard

_LARGEST_SCORE = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Found:
    """What one block offers one shard: its file of candidates, and the audit of the shard's sampled rows."""

    block: int
    candidates: Shard
    dropped: Dropped
    audit: Audit


class Merged(NamedTuple):
    """One finished shard: its entry, counters, and the sampled rows (keys [S, K]) beside their audit."""

    shard: int
    entry: Shard
    counters: dict[str, int]
    sampled: np.ndarray
    audit: Audit


def load_block(plan: Plan, number: int) -> Block:
    """Block `number` read and indexed. Raises TableError, InputError."""
    start, stop = plan.bounds[number]
    vectors = read_block(plan.dump.vectors_url, plan.dump.vectors, start, stop)
    return Block(start, vectors, build(plan.index, vectors, plan.nprobe, plan.options.seed))


def search_shard(plan: Plan, number: int, block: Block, source: Source, shard: int) -> Found:
    """Search every row of the shard against the block and write the candidates. Raises TableError, StorageError."""
    sampled = _sampled_rows(plan, source, shard)
    dropped = Dropped()
    found: list[np.ndarray] = []
    audits: list[Audit] = []
    for batch in source.batches(shard, plan.options.query_batch):
        found.append(search_negatives(block, batch.queries, batch.exclusions, plan.width, dropped))
        here = sampled[(sampled >= batch.first) & (sampled < batch.first + len(batch.queries))] - batch.first
        audits.append(audit_block(block, batch.queries[here], batch.exclusions.take(here), plan.width))
    keys = np.concatenate([np.empty((0, plan.width), np.uint64), *found])
    table = pa.table({"keys": matrix_array(keys, pa.uint64())})
    count = len(source.queries.shards)
    entry = write_shard(plan.candidates(source, number), shard, count, table, source.queries.row_group_rows or 1)
    return Found(number, entry, dropped, stack(audits, plan.width))


def merge_shard(plan: Plan, source: Source, shard: int, found: Iterable[Found]) -> Merged:
    """The best of all blocks for every row of the shard, written aligned with its queries."""
    blocks = sorted(found, key=lambda one: one.block)
    groups = (iterate_shard(plan.candidates(source, one.block), one.candidates) for one in blocks)
    merged = [merge([matrix_column(part, "keys") for part in parts], plan.width) for parts in zip(*groups, strict=True)]
    keys = np.concatenate([np.empty((0, plan.width), np.uint64), *merged])
    table = _rows(source.ids(shard), keys, plan)
    count = len(source.queries.shards)
    entry = write_shard(plan.table(source), shard, count, table, source.queries.row_group_rows or 1)
    counters = {
        "rows": len(keys),
        "padded_rows": int((keys == EMPTY).any(axis=1).sum()),
        "candidates": sum(one.dropped.candidates for one in blocks),
        "positives_dropped": sum(one.dropped.positives for one in blocks),
        "filtered_dropped": sum(one.dropped.filtered for one in blocks),
    }
    audit = merge_audits([one.audit for one in blocks], plan.width)
    return Merged(shard, entry, counters, keys[_sampled_rows(plan, source, shard)], audit)


def summarize(merged: Iterable[Merged], width: int) -> bytes:
    """Shards in order, counters and quality of a table as JSON: what the launching process publishes."""
    shards = sorted(merged, key=lambda one: one.shard)
    body: dict[str, Any] = {
        "shards": [one.entry.model_dump() for one in shards],
        "counters": {name: sum(one.counters[name] for one in shards) for name in shards[0].counters},
        "quality": measure(
            np.concatenate([one.sampled for one in shards]), stack([one.audit for one in shards], width)
        ),
    }
    return json.dumps(body, sort_keys=True).encode()


def negatives_schema(plan: Plan) -> pa.Schema:
    """The Arrow schema of the tables of this run."""
    return tables.negatives(plan.width, tables.label_type(plan.dump.labels))


def _rows(query_ids: pa.Array, keys: np.ndarray, plan: Plan) -> pa.Table:
    schema = negatives_schema(plan)
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
    rows = sample_rows(source.queries.rows, plan.options.audit_queries, plan.options.seed)
    return rows[(rows >= first) & (rows < first + source.queries.shards[shard].rows)] - first
