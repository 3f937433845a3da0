import random

import numpy as np
import pyarrow as pa

from pipelines.flow import FileExchange
from pipelines.job import StagedBlock
from pipelines.sharding.read import SAMPLED_SHARE, sample_position, sample_texts, split_sample, with_hashes

ROWS = 4000


def blocks_of(order: list[int], size: int) -> list[StagedBlock]:
    staged = FileExchange("memory://sampling")
    made = []
    for number, start in enumerate(range(0, len(order), size)):
        some = order[start : start + size]
        columns = {"row": some, "key": [f"k{i}" for i in some], "text": [f"text {i}" for i in some]}
        sent = dict(staged.send(split_sample(with_hashes(pa.record_batch(columns), 0))))
        made.append(StagedBlock("train", 0, number, sent["sampled"], sent["rest"]))
    return made


def test_the_sample_is_the_same_whatever_the_order_and_the_blocks() -> None:
    order = list(range(ROWS))
    texts_alone, other = blocks_of(order, 300), blocks_of(random.Random(0).sample(order, ROWS), 700)
    for size in (100, 200, 1000):  # below and above what the sampled messages hold
        texts = sorted(sample_texts(texts_alone, ROWS, size).to_pylist())
        assert texts == sorted(sample_texts(other, ROWS, size).to_pylist())
        assert 0.6 * size < len(texts) < 1.4 * size
    assert sorted(sample_texts(texts_alone, ROWS, ROWS).to_pylist()) == sorted(f"text {i}" for i in order)


def test_positions_are_uniform_and_independent_of_shards_and_splits() -> None:
    hashes = with_hashes(pa.record_batch({"key": [str(i) for i in range(20_000)], "text": ["x"] * 20_000}), 0)["hash"]
    position = sample_position(np.asarray(hashes))
    assert np.abs(np.bincount((position * 10).astype(int)) / 20_000 - 0.1).max() < 0.01
    sampled = position < SAMPLED_SHARE
    for part in (np.asarray(hashes) % np.uint64(4), np.asarray(hashes) >> np.uint64(62)):
        counts = np.bincount(part[sampled].astype(int), minlength=4)
        assert counts.min() > 0.8 * sampled.sum() / 4
