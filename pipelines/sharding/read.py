"""First pipeline: every input file is read once; its rows are parsed, counted, and left in staging by block."""

from collections import Counter
from collections.abc import Iterable, Iterator

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.common.exchange import Exchange, Files, Packet, receive
from pipelines.common.summary import INPUT, Block, Summary, merge_and_write
from pipelines.formats import lines
from pipelines.formats.base import PAIRS
from pipelines.formats.rejects import Rejects, to_batch
from pipelines.sharding.blocks import split_mentions, split_sample, with_hashes
from pipelines.sharding.hashing import hash_strings
from pipelines.sharding.identity import files_of
from pipelines.sharding.plan import ReadPlan

BLOCK_ROWS = 1 << 14
READ, PARSE = "read", "parse"  # steps


def wire(pipeline: beam.Pipeline, plan: ReadPlan, exchange: Exchange, summary_url: str) -> None:
    """Wire the reading of all parts of `plan`; the summary goes to `summary_url`."""
    parsed = (
        pipeline
        | "Parts" >> beam.Create(range(len(plan.inputs.parts)))
        | "Read" >> beam.FlatMap(read_part, plan, exchange)
        # One file has but one reader: grouping by block spreads the parsing over the workers.
        | "Spread" >> beam.GroupByKey()
        | "Parse" >> beam.Map(parse_block, plan)
    )
    hashed = pipeline | "Files" >> beam.Create(files_of(plan.inputs)) | "Hash" >> beam.Map(hash_file)
    merge_and_write((parsed, hashed) | "Summaries" >> beam.Flatten(), summary_url)


def read_part(number: int, plan: ReadPlan, exchange: Exchange) -> Iterator[tuple[tuple[int, int], Packet]]:
    """Send the raw rows of part `number`: ((part, block), packet)."""
    plan.meter.start(READ)
    for block, raw in enumerate(plan.form.read(plan.inputs.parts[number], plan.block_rows)):
        yield from plan.meter.count_bytes(READ, exchange.send([((number, block), raw)]))
        plan.meter.count(READ, raw.num_rows)


def parse_block(element: tuple[tuple[int, int], Iterable[Packet]], plan: ReadPlan) -> Summary:
    """Parse ((part, block), raw rows) to a Block in staging; a retried bundle leaves files that nobody reads."""
    (number, block), packets = element
    plan.meter.start(PARSE)
    (raw,) = receive(packets)
    part = plan.inputs.parts[number]
    parsed = plan.form.parse(raw, block * plan.block_rows, part, plan.text)
    hashed = _hashed_pairs if part.table.startswith(PAIRS) else with_hashes
    rows, mentions = split_mentions(hashed(parsed.batch, plan.seed))
    parts = [*split_sample(rows), *([("mentions", mentions)] if mentions else [])]
    sent = dict(plan.meter.count_bytes(PARSE, Files(plan.staging).send(parts)))
    rejected = Files(plan.rejects).send([(part.table, to_batch(parsed.rejects))] if parsed.rejects else [])
    plan.meter.count(PARSE, raw.num_rows)
    return Summary(
        counters={INPUT + part.table: _count(raw.num_rows, rows)},
        rejects=Rejects.of(part.table, parsed.rejects),
        blocks=(Block(part.table, number, block, sent["sampled"], sent["rest"], sent.get("mentions")),),
        rejected=tuple(rejected),
        features=_features(rows),
    )


def hash_file(url: str) -> Summary:
    """Return bytes and SHA-256 of an input file. Raises InputError, StorageError."""
    return Summary(files={url: lines.identify(url)})


def _hashed_pairs(pairs: pa.RecordBatch, seed: int) -> pa.RecordBatch:
    """Return pairs as points that name one label each, with the hash of their keys."""
    keys, offsets = pairs["query_key"], pa.array(range(pairs.num_rows + 1), pa.int32())
    named = pa.ListArray.from_arrays(offsets, pairs["label_key"])
    hashes = pa.array(hash_strings(keys, seed))
    return pa.record_batch({"row": pairs["row"], "key": keys, "label_keys": named, "hash": hashes})


def _features(rows: pa.RecordBatch) -> int:
    if "feature_ids" not in rows.schema.names:
        return 0
    largest = pc.max(rows["feature_ids"].flatten()).as_py()
    return 0 if largest is None else int(largest) + 1


def _count(rows_in: int, rows: pa.RecordBatch) -> Counter[str]:
    counts = Counter(rows_in=rows_in, rows=rows.num_rows)
    for name in ("key", "text"):
        if name in rows.schema.names:
            counts[f"{name}_bytes"] = pc.sum(pc.binary_length(rows[name])).as_py() or 0
    for name in ("label_ids", "label_index"):
        if name in rows.schema.names:
            counts["mentions"] = len(rows[name].flatten())
    if "feature_ids" in rows.schema.names:
        counts["with_features"] = rows.num_rows
        counts["features"] = len(rows["feature_ids"].flatten())
    return counts
