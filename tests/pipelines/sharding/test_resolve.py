import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.flow import FileExchange, receive
from pipelines.sharding.read import first_ids, split_mentions
from pipelines.sharding.rows import known_ids, look_up
from schemas.hashing import hash_strings

KEYS = st.text("abé", max_size=3)
BLOCK = st.lists(st.lists(KEYS, max_size=4, unique=True).map(sorted), max_size=6)


@settings(deadline=None)
@given(st.lists(KEYS, max_size=12, unique=True), st.lists(BLOCK, max_size=4), st.integers(1, 4))
def test_the_join_equals_a_dictionary(labels: list[str], blocks: list[list[list[str]]], shards: int) -> None:
    hashes = dict(zip(labels, hash_strings(pa.array(labels, pa.string()), 3).tolist(), strict=True))
    by_shard = [sorted((hashes[key], key) for key in labels if hashes[key] % shards == s) for s in range(shards)]
    first = first_ids({s: len(some) for s, some in enumerate(by_shard)})
    ids = {key: i for i, key in enumerate(key for some in by_shard for _, key in some)}
    named = []
    for rows in blocks:
        batch = pa.record_batch({"label_keys": pa.array(rows, pa.list_(pa.string()))})
        with_index, mentions = split_mentions(batch)
        assert mentions is not None
        named.append((with_index["label_index"].to_pylist(), mentions))
    batches: dict[int, list[pa.RecordBatch]] = {number: [] for number in range(len(blocks))}
    for s, some in enumerate(by_shard):
        sent = []
        for number, (_, mentions) in enumerate(named):
            here = hash_strings(mentions["key"], 3) % np.uint64(shards) == s
            index = pa.array(np.flatnonzero(here).astype(np.int32))
            sent.append((number, pa.record_batch({"index": index, "key": mentions["key"].filter(pa.array(here))})))
        if sent:
            keys = pa.array([key for _, key in some], pa.string())
            for number, batch in look_up(keys, pa.array(np.arange(first[s], first[s] + len(keys))), sent):
                batches[number].append(batch)
    for number, (rows, (index, mentions)) in enumerate(zip(blocks, named, strict=True)):
        resolved = known_ids(mentions.num_rows, batches[number])
        assert [[int(resolved[i]) for i in row] for row in index] == [[ids.get(key, -1) for key in row] for row in rows]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=4)), max_size=5))
def test_what_is_sent_is_received(parts: list[tuple[int, list[int]]]) -> None:
    batches = [(to, pa.record_batch({"i": pa.array(rows, pa.int64())})) for to, rows in parts]
    sent = list(FileExchange("memory://exchange").send(batches))
    assert [to for to, _ in sent] == [to for to, _ in parts]
    assert [batch["i"].to_pylist() for batch in receive(packet for _, packet in sent)] == [r for _, r in parts]


def test_a_slice_is_sent_without_its_neighbours() -> None:
    whole = pa.record_batch({"text": pa.array(["x" * 1000] * 1000), "ids": pa.array([[1, 2]] * 1000)})
    ((_, packet),) = FileExchange("memory://exchange").send([(0, whole.slice(500, 2))])
    assert packet[2] < 4000
    assert next(receive([packet])) == whole.slice(500, 2)
