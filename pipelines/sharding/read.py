"""Input files are read and parsed into blocks of rows, with hashes of keys, in staging.

The first flow comes first; then a sample of the texts and a description of the first row, for the launching process;
then what the stages of all flows share.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.flow import (
    Collection,
    FileExchange,
    Flow,
    Packet,
    pack_locations,
    read_locations,
    receive,
    send_together,
    split_by,
)
from pipelines.formats import base
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Inputs, Reject, printable, rejects_batch
from pipelines.job import INPUT, REJECTED, SHOWN, StagedBlock, Summary
from pipelines.sharding import tokenizer
from pipelines.sharding.plans import ReadPlan, TablePlan
from pipelines.sharding.publish import files_of
from pipelines.sharding.tokenizer import ColumnTokenizer, Encoded
from schemas import storage
from schemas.arrow import TITLES
from schemas.hashing import combine, hash_strings, hash_texts
from schemas.ragged import offsets_of
from schemas.shard_files import parquet

ROWS, SIZES = "rows", "sizes"  # tags of collections
BLOCK_ROWS = 1 << 14
READ, PARSE = "read", "parse"  # steps
# The rows of a block are in two packets, so that a sample of large data reads only the first packet.
SAMPLED_SHARE = 1 / 16
_FEATURES = ("feature_ids", "feature_values")
CONTENT = ("text", *_FEATURES, "dense")  # columns that must be equal in rows with the same key
_LISTED = 5  # how many labels or features of a row are shown
_THREADS = 8  # readers mostly wait for storage


def read(flow: Flow, plan: ReadPlan) -> Collection:
    """Read all parts of `plan`. Returns Summary."""
    raw = flow.create("Parts", range(len(plan.inputs.parts))).flat_map("Read", read_part, plan)
    # A file has only one reader: grouping by block distributes the parsing over the workers.
    parsed = raw.group("Spread").map("Parse", parse_block, plan)
    return parsed + flow.create("Files", files_of(plan.inputs)).map("Hash", hash_file)


def read_part(number: int, plan: ReadPlan) -> Iterator[tuple[tuple[int, int], Packet]]:
    """Send the raw rows of part `number`: ((part, block), packet)."""
    plan.meter.start(READ)
    for block, raw in enumerate(plan.form.read(plan.inputs.parts[number], plan.block_rows)):
        yield from plan.meter.count_bytes(READ, plan.exchange.send([((number, block), raw)]))
        plan.meter.count(READ, raw.num_rows)


def parse_block(element: tuple[tuple[int, int], Iterable[Packet]], plan: ReadPlan) -> Summary:
    """Parse ((part, block), raw rows) into a Block in staging. Files that a failed attempt has written are not read."""
    (number, block), packets = element
    plan.meter.start(PARSE)
    (raw,) = receive(packets)
    part = plan.inputs.parts[number]
    parsed = plan.form.parse(raw, block * plan.block_rows, part, plan.text)
    if part.table.startswith(PAIRS):  # a pair is a point with one label
        pairs = parsed.batch
        offsets = pa.array(range(pairs.num_rows + 1), pa.int32())
        named = pa.ListArray.from_arrays(offsets, pairs["label_key"])
        hashed = pa.record_batch({"row": pairs["row"], "key": pairs["query_key"], "label_keys": named})
        hashed = hashed.append_column("hash", pa.array(hash_strings(pairs["query_key"], plan.seed)))
    else:
        hashed = with_hashes(parsed.batch, plan.seed)
    rows, mentions = split_mentions(hashed, plan.same_key and part.table in SPLITS)
    batches = [*split_sample(rows), *([("mentions", mentions)] if mentions else [])]
    sent = dict(plan.meter.count_bytes(PARSE, plan.blocks.send(batches)))
    plan.meter.count(PARSE, raw.num_rows)
    counters = {INPUT + part.table: _count(len(parsed.rejects) + parsed.left_out, rows)}
    blocks = (StagedBlock(part.table, number, block, sent["sampled"], sent["rest"], sent.get("mentions")),)
    largest = pc.max(rows["feature_ids"].flatten()).as_py() if "feature_ids" in rows.schema.names else None
    facts = {"counters": counters, "blocks": blocks, "features": 0 if largest is None else largest + 1}
    return report_rejects(part.table, parsed.rejects, plan.rejects, **facts)


def describe_first(raw: Summary, inputs: Inputs, table: str) -> str | None:
    """Describe the first row of an input table as it was parsed.

    Returns None if the table has no rows, if the labels have no texts, or if labels occur only in points.
    """
    if table == LABELS and not (
        raw.count_input(LABELS, "text_bytes") and not inputs.parts_of(LABELS)[0].contents.derived
    ):
        return None
    block, batch = next(((b, rows) for b in raw.blocks_of(table) if (rows := b.read()).num_rows), (None, None))
    if block is None or batch is None:
        return None
    (row,) = batch.slice(int(np.argmin(batch["row"])), 1).to_pylist()
    labels = row.get("label_ids") or ()
    if block.mentions is not None and "label_index" in row:
        labels = next(receive([block.mentions]))["key"].take(pa.array(row["label_index"], pa.int32())).to_pylist()
    features = [f"{n}:{value:.4g}" for n, value in zip(*(row.get(name) or () for name in _FEATURES), strict=True)]
    text = f', text "{_short(row["text"], 120)}"' if "text" in row and (row["text"] or not features) else ""
    lists = ("features", features), ("labels", [_quoted(n) if isinstance(n, str) else str(n) for n in labels])
    shown = "".join(f", {name} {_first(values)}" for name, values in lists if values)
    return f"first row of {table}: key {_quoted(row['key'])}{text}{shown}"


def _first(values: Sequence[str]) -> str:
    more = f" … ({len(values):,})" if len(values) > _LISTED else ""
    return ", ".join(values[:_LISTED]) + more


def _quoted(key: str) -> str:  # quotes show a comma within the key
    return '"' + _short(key).replace('"', '\\"') + '"'


def _short(text: str, longest: int = 40) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= longest else f"{text[:longest]}…"


def hash_file(url: str) -> Summary:
    return Summary(files={url: base.identify(url)})


def _count(others: int, rows: pa.RecordBatch) -> Counter[str]:
    counts = Counter(rows_in=rows.num_rows + others, rows=rows.num_rows)
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


def with_hashes(batch: pa.RecordBatch, seed: int) -> pa.RecordBatch:
    """Add `hash` (of the key, to choose the shard) and `content` (hash of text, features and vector), both uint64."""
    content = hash_strings(batch["text"], seed)
    for name in CONTENT[1:]:
        if name in batch.schema.names:
            content = combine(content, hash_strings(batch[name], seed))
    batch = batch.append_column("hash", pa.array(hash_strings(batch["key"], seed)))
    return batch.append_column("content", pa.array(content))


def places_of(batch: pa.RecordBatch, group: str, seed: int) -> np.ndarray:
    """Return the hashes by which rows are held out: of the keys, or of what groups share (`ShardOptions.group`)."""
    if group == "off":
        return batch["hash"].to_numpy()  # type: ignore[no-any-return]
    texts = batch["text"]
    return np.where(pc.equal(texts, "").to_numpy(False), batch["content"], hash_texts(texts, group, seed))


def split_mentions(batch: pa.RecordBatch, own: bool = False) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Replace the points' `label_keys` with `label_index`: positions in a second batch, which contains distinct keys.

    With `own`, the column `own_index` contains the position of each point's own key. If points have no `label_keys`,
    returns the unchanged points and None.
    """
    column = batch["label_keys"] if "label_keys" in batch.schema.names else None
    if column is None and not own:
        return batch, None
    labels = pa.array([], pa.string()) if column is None else column.flatten()
    named = pa.concat_arrays([labels, batch["key"]] if own else [labels]).dictionary_encode()
    positions = named.indices.to_numpy(zero_copy_only=False)
    if column is not None:
        offsets = column.offsets.to_numpy().astype(np.int64)
        index = parquet.list_array(positions[: len(labels)], offsets - offsets[0], pa.int32())
        batch = batch.set_column(batch.schema.get_field_index("label_keys"), "label_index", index)
    if own:
        batch = batch.append_column("own_index", pa.array(positions[len(labels) :], pa.int32()))
    return batch, pa.record_batch({"key": named.dictionary})


def sample_position(hashes: np.ndarray) -> np.ndarray:
    """Map each hash to [0, 1) for sampling: float64 [B], independent of the row's shard and of a validation split."""
    return (combine(hashes, hashes) >> np.uint64(11)).astype(np.float64) / 2**53


def split_sample(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split points or labels into a sample and the other rows: yield ("sampled", rows) and ("rest", rows)."""
    sampled = pa.array(sample_position(batch["hash"].to_numpy()) < SAMPLED_SHARE)
    yield "sampled", batch.filter(sampled)
    yield "rest", batch.filter(pc.invert(sampled))


def sample_texts(blocks: Sequence[StagedBlock], rows: int, size: int) -> pa.ChunkedArray:
    """Draw about `size` of the `rows` texts in `blocks`, using the hashes of the keys; all texts if there are fewer.

    Raises StorageError.
    """
    share = size / rows if rows > size else 1.0

    def texts_of(block: StagedBlock) -> list[pa.Array]:
        batches = receive([block.sampled] if share <= SAMPLED_SHARE else [block.sampled, block.rest])
        return [batch["text"].filter(pa.array(sample_position(np.asarray(batch["hash"])) < share)) for batch in batches]

    with ThreadPoolExecutor(_THREADS) as pool:
        return pa.chunked_array(itertools.chain.from_iterable(pool.map(texts_of, blocks)), pa.string())


# What the stages of all flows share: tokens, packets that a later flow reads, ids, and rejects.


@functools.lru_cache(maxsize=1)
def _open_tokenizer(url: str, name: str) -> ColumnTokenizer:
    return ColumnTokenizer(tokenizer.open_tokenizer(storage.read_sealed(url), url), name)


def encode(batch: pa.RecordBatch, plan: TablePlan) -> pa.RecordBatch:
    """Add `truncated` to parsed rows, `input_ids` and TITLES if rows have texts, and `dense` if a model computes it.

    The tokenizer is opened once per process. Raises StorageError.
    """
    none = np.zeros(batch.num_rows, np.int32)
    tokens = Encoded(np.zeros(0, np.uint32), np.zeros(len(none) + 1, np.int64), none.astype(bool), none)
    if plan.vocabulary is not None:
        tokens = _open_tokenizer(plan.tokenizer, plan.tokenizer_name).encode(batch["text"])
    batch = batch.append_column("truncated", pa.array(tokens.truncated))
    if plan.tokens is not None:
        batch = batch.append_column("input_ids", parquet.list_array(tokens.values, tokens.offsets, plan.tokens))
        batch = batch.append_column(TITLES, pa.array(tokens.titles))
    if plan.embedder is not None:
        from pipelines.models import dense_column  # needs the trainer's packages, which may be missing

        vectors = dense_column(plan.embedder, batch["text"], plan.dense, plan.threads)
        batch = batch.append_column("dense", vectors)
    return batch


def by_shard(batch: pa.RecordBatch, shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split rows by the column `hash`: yield (shard, rows of the shard)."""
    yield from split_by(batch, (batch["hash"].to_numpy() % np.uint64(shards)).astype(np.int64))


def store_packets(packets: Collection, name: str, files: FileExchange) -> Collection:
    """Store (key, packet in files) as the collection `name` for a later flow; return a Summary of the locations."""
    return packets.group(f"{name} by key").map_partitions(f"Keep {name}", _store_locations, name, files)


def _store_locations(
    groups: Iterable[tuple[int, Iterable[Packet]]], name: str, files: FileExchange
) -> Iterator[Summary]:
    places = ((key, pack_locations(packets)) for key, packets in groups)
    yield from (Summary(kept={name: dict([sent])}) for sent in send_together(files, places))


def load_packets(flow: Flow, kept: Summary, name: str) -> Collection:
    """Return the collection of (key, packet) that `store_packets` stored as `name`."""
    return flow.create(f"Kept {name}", kept.kept.get(name, {}).items()).flat_map(f"Reopen {name}", _packets_of)


def _packets_of(element: tuple[int, Packet]) -> Iterator[tuple[int, Packet]]:
    yield from ((element[0], packet) for packet in read_locations(element[1]))


def first_ids(sizes: Mapping[int, int]) -> np.ndarray:
    """Compute first int64 [shards + 1] from the shards' sizes: shard s contains ids [first[s], first[s + 1])."""
    return offsets_of(np.array([sizes[shard] for shard in range(len(sizes))], np.int64))


def report_rejects(table: str, rejects: list[Reject], exchange: FileExchange, **fields: Any) -> Summary:
    """Write the `rejects` of an input table to staging through `exchange`, and return a Summary of the rejects."""
    packets = exchange.send([(table, rejects_batch(rejects))]) if rejects else ()
    counts = {**fields.pop("counters", {}), REJECTED + table: Counter(reject.reason.value for reject in rejects)}
    return Summary(counters=counts, rejects=tuple(sorted(rejects)[:SHOWN]), rejected=tuple(packets), **fields)
