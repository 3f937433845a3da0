"""The first pipeline: every input file is read once; its rows are parsed, counted, and left in staging by block."""

from collections import Counter
from collections.abc import Iterable, Iterator

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.common.exchange import Exchange, Files, Packet, receive
from pipelines.formats import lines
from pipelines.formats.base import LABELS, PAIRS, Context, Format, Parsed, Part
from pipelines.formats.rejects import Rejects, to_batch
from pipelines.sharding.blocks import Block, split_mentions, split_sample, with_hashes
from pipelines.sharding.hashing import hash_strings
from pipelines.sharding.plan import ReadPlan
from pipelines.sharding.summary import INPUT, MergeSummaries, Summary, WriteSummary

BLOCK_ROWS = 1 << 14


def build(pipeline: beam.Pipeline, plan: ReadPlan, exchange: Exchange, summary_url: str) -> None:
    """Wire the reading of all parts of `plan`; the summary goes to `summary_url`."""
    staged = Files(plan.staging)
    parsed = (
        pipeline
        | "Parts" >> beam.Create(range(len(plan.parts)))
        | "Read" >> beam.ParDo(ReadPart(plan, exchange))
        # One file has but one reader: grouping by block spreads the parsing over the workers.
        | "Spread" >> beam.GroupByKey()
        | "Parse" >> beam.ParDo(ParseBlock(plan, staged))
    )
    hashed = pipeline | "Files" >> beam.Create(plan.files) | "Hash" >> beam.ParDo(HashFile())
    _ = (
        (parsed, hashed)
        | "Summaries" >> beam.Flatten()
        | "Merge" >> beam.CombineGlobally(MergeSummaries())
        | "Write summary" >> beam.ParDo(WriteSummary(summary_url))
    )


class ReadPart(beam.DoFn):
    """Number of a part to ((part, block), packet of raw rows)."""

    def __init__(self, plan: ReadPlan, exchange: Exchange) -> None:
        self._plan, self._exchange = plan, exchange

    def process(self, element: int) -> Iterator[tuple[tuple[int, int], Packet]]:
        blocks = self._plan.form.read(self._plan.parts[element], self._plan.block_rows)
        for number, raw in enumerate(blocks):
            yield from self._exchange.send([((element, number), raw)])


class ParseBlock(beam.DoFn):
    """((part, block), raw rows) to a Summary with one Block; a retried bundle leaves files that nobody knows of."""

    def __init__(self, plan: ReadPlan, staged: Files) -> None:
        self._plan, self._staged = plan, staged

    def process(self, element: tuple[tuple[int, int], Iterable[Packet]]) -> Iterator[Summary]:
        (number, block), packets = element
        (raw,) = receive(packets)
        plan, part = self._plan, self._plan.parts[number]
        parsed = _parse(plan.form, raw, block * plan.block_rows, part, plan.context)
        rows, mentions = split_mentions(_hashed(parsed.batch, part.table, plan.seed), plan.seed)
        parts = [*split_sample(rows), *([("mentions", mentions)] if mentions else [])]
        if parsed.rejects:
            parts.append(("rejects", to_batch(parsed.rejects)))
        sent = dict(self._staged.send(parts))
        yield Summary(
            counters={INPUT + part.table: _count(raw.num_rows, rows)},
            rejects=Rejects.of(part.table, parsed.rejects),
            blocks=(Block(part.table, number, block, sent["sampled"], sent["rest"], sent.get("mentions")),),
            rejected=((part.table, sent["rejects"]),) if "rejects" in sent else (),
            features=_features(rows),
        )


class HashFile(beam.DoFn):
    """URL of an input file to a Summary with its bytes and SHA-256."""

    def process(self, element: str) -> Iterator[Summary]:
        yield Summary(files={element: lines.identify(element)})


def _parse(form: Format, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
    if part.table == LABELS:
        return form.parse_labels(raw, first_row, part, context)
    if part.table.startswith(PAIRS):
        parsed = form.parse_pairs(raw, first_row, part, context)
        return Parsed(_as_points(parsed.batch), parsed.rejects)
    return form.parse_points(raw, first_row, part, context)


def _as_points(pairs: pa.RecordBatch) -> pa.RecordBatch:
    """A pair is a point that names one label."""
    offsets = pa.array(range(pairs.num_rows + 1), pa.int32())
    named = pa.ListArray.from_arrays(offsets, pairs["label_key"])
    return pa.record_batch({"row": pairs["row"], "key": pairs["query_key"], "label_keys": named})


def _hashed(batch: pa.RecordBatch, table: str, seed: int) -> pa.RecordBatch:
    if table.startswith(PAIRS):
        return batch.append_column("hash", pa.array(hash_strings(batch["key"], seed)))
    return with_hashes(batch, seed)


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
