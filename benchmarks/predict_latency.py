"""Milliseconds per query on one core, exact and by an index.

    python -m benchmarks.predict_latency [--quick] [--index FACTORY]

A query is a text of 12 words: tokenized, encoded by a bag of token and bigram embeddings (D = 64), and searched for its
10 best labels of 1,048,576 by `Serving.top_k`, as `extremis predict` does it; alone, and 256 at a time. Texts say
nothing about labels here, so what is searched are queries of the same clusters as the vectors (those of
`benchmarks.mine`). Everything is pinned to one core once the index is built. Medians of rounds in turns.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer

from benchmarks.common.report import interleave, medians, report
from benchmarks.mine import DIMENSION, noisy, unit
from pipelines.sharding.tokenizer import encode_whole, train_wordpiece
from schemas.shard_files.parquet import list_array
from search.index import set_up
from trainer.config.load import load_recipe
from trainer.export.exported import Serving
from trainer.export.vectors import Vectors, choose_index, open_indexes, write_indexes
from trainer.model import Model

K = 10
WORDS = 12
TARGET = 0.98
LABELS = {False: 1 << 20, True: 1 << 18}
# All sizes of the encoder: there is no data that "auto" could take them from.
RECIPE = (f"encoder.dimension={DIMENSION}", "encoder.hidden=0", "encoder.buckets=262144", "classifier.bias=false")
BATCHES = (1, 256)
_TUNED, _SEARCHED = 512, 1024
_ROUNDS = 3
_SECONDS = 1.0  # of one measurement, at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="262,144 labels")
    parser.add_argument("--index", default="auto", help="a Faiss factory string, such as HNSW32")
    arguments = parser.parse_args()
    labels = LABELS[arguments.quick]
    vectors, queries = clustered(labels)
    tokenizer, texts = some_texts()
    recipe = load_recipe("astra", RECIPE)
    model = Model.build(recipe, tokenizer.get_vocab_size(), 0)
    began = time.perf_counter()
    serving, facts = indexed(arguments.index, model, vectors, queries[:_TUNED])
    built = time.perf_counter() - began
    pin()
    searched = queries[_TUNED:]
    sides: dict[str, Callable[[], float]] = {}
    for batch in BATCHES:
        sides[f"exact, {batch} at a time"] = timed(serving, searched, batch, exact=True)
        sides[f"index, {batch} at a time"] = timed(serving, searched, batch, exact=False)
        sides[f"text to x, {batch} at a time"] = encoding(serving, tokenizer, texts, batch)
    times = interleave(sides, _ROUNDS)
    middle = medians(times)
    recall = recall_of(serving, searched)
    report(
        "an export answers a query on one core in milliseconds",
        {
            "labels": labels,
            "dimension": DIMENSION,
            "k": K,
            "index": facts["factory"],
            "effort": facts["efforts"][0],
            "build_seconds": round(built, 1),
            "milliseconds_a_query": {name: round(value, 4) for name, value in middle.items()},
            "all": times,
            "recall_at_10": recall,
        },
        {
            "exact_over_index_alone": middle["exact, 1 at a time"] / middle["index, 1 at a time"],
            "exact_over_index_batched": middle["exact, 256 at a time"] / middle["index, 256 at a time"],
            "recall_at_10": recall,
        },
        {"exact_over_index_alone": 5, "recall_at_10": TARGET - 0.02},
    )


def clustered(labels: int) -> tuple[Vectors, torch.Tensor]:
    """Unit vectors [L, D] in clusters of 256, and queries [n, D] of the same clusters."""
    centres = unit(np.random.default_rng(0).standard_normal((labels // 256, DIMENSION), np.float32))
    draw = np.random.default_rng(1)
    rows = noisy(centres, draw.integers(0, len(centres), labels), draw)
    queries = noisy(centres, draw.integers(0, len(centres), _TUNED + _SEARCHED), draw)
    return Vectors([rows]), torch.from_numpy(queries)


def some_texts() -> tuple[Tokenizer, list[str]]:
    """Texts of made-up words, and a tokenizer learned from them."""
    draw = np.random.default_rng(2)
    syllables = ["".join(pair) for pair in zip("bdfgklmnprst" * 3, "aeiou" * 8, strict=False)]
    words = ["".join(draw.choice(syllables, 3)) for _ in range(5000)]
    texts = [" ".join(draw.choice(words, WORDS)) for _ in range(_SEARCHED)]
    return train_wordpiece(pa.chunked_array([texts]), 5000), texts


def indexed(spec: str, model: Model, vectors: Vectors, queries: torch.Tensor) -> tuple[Serving, dict]:
    """Vectors with their index, written, read and tuned as an export does it."""
    factory = choose_index(spec, len(vectors)) or f"IVF{int(4 * len(vectors) ** 0.5)},Flat"
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as folder:
        shards, facts = write_indexes(factory, vectors, queries, K, TARGET, folder)
        opened = open_indexes([os.path.join(folder, shard.path) for shard in shards], facts, vectors)
    return Serving(model, vectors, opened), facts


def pin() -> None:
    """This process to one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    set_up(1)


def timed(serving: Serving, queries: torch.Tensor, batch: int, exact: bool) -> Callable[[], float]:
    """Milliseconds a query of search."""
    return per_query(lambda start: serving.top_k(queries[start : start + batch], K, exact=exact), batch)


def encoding(serving: Serving, tokenizer: Tokenizer, texts: list[str], batch: int) -> Callable[[], float]:
    """Milliseconds a query from text to x."""

    def work(start: int) -> None:
        values, offsets, _ = encode_whole(tokenizer, texts[start : start + batch])
        serving.embed(pa.table({"input_ids": list_array(values, offsets, pa.uint32())}))

    return per_query(work, batch)


def per_query(work: Callable[[int], object], batch: int) -> Callable[[], float]:
    """`work(start)` on batch after batch for some time: milliseconds a query."""

    def run() -> float:
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < _SECONDS:
            work(done % (_SEARCHED - batch + 1))
            done += batch
        return 1000 * elapsed / done

    work(0)  # what is loaded at the first call
    return run


def recall_of(serving: Serving, queries: torch.Tensor) -> float:
    """Share of the exact best K that the index finds."""
    _, labels = serving.top_k(queries, K)
    _, exact = serving.top_k(queries, K, exact=True)
    hits = sum(len({*a} & {*b}) for a, b in zip(labels.tolist(), exact.tolist(), strict=True))
    return hits / exact.size


if __name__ == "__main__":
    main()
