"""Milliseconds per query on one core, exact and with an index; or start time, latency and memory of an export.

    python -m benchmarks.predict_latency [--quick] [--index FACTORY]
    python -m benchmarks.predict_latency --export EXPORT [EXPORT...] --texts FILE [--before CHECKOUT]
    python -m benchmarks.predict_latency --grow EXPORT --texts FILE [--rows N] [--for serving|batch] [--recall R]

A query is a text of 12 words: tokenized, encoded by a bag of token and bigram embeddings (D = 64), and searched for its
10 best labels of 1,048,576 by `Serving.top_k`, as `extremis predict` does it; alone, and 256 at a time. These texts
contain no information about labels, so the search uses queries from the same clusters as the vectors (as in
`benchmarks.mine`). Everything is pinned to one core after the index is built. The rounds alternate; figures are
medians.

For an export, `extremis.load(EXPORT).predict` is measured in fresh processes on one core, in turns with other exports
and with another checkout of the project. Figures are processor seconds of import, `load`, the first prediction and
`compile`; milliseconds for the lines of FILE one by one, and per text of 1,000 texts; and memory. For an ONNX graph,
the tokenizer and onnxruntime alone are also measured. The texts' median and p99 are wall time, so an idle machine is
needed; the minimum and processor milliseconds are less affected by other work. `apart` compares with the first line:
the largest difference of the scores of labels that are among the best 10 of both, and the share of texts with the same
best label.

With `--grow`, the labels and the memory's points of an export become N: copies, each plus noise as long as the distance
to the nearest neighbour, so that the clusters of a real run stay. Random vectors are the worst case. A line for each
way that was weighed, and for exact search with codes and the chosen way: processor milliseconds of one query (p50, p99)
and per query of 512, and recall, for texts that no index was tuned on.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import faiss
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

import extremis
from benchmarks.common.report import interleave, medians, report
from benchmarks.mine import DIMENSION, noisy, unit
from pipelines.sharding.tokenizer import encode_texts, train_wordpiece
from schemas.ragged import Ragged
from scoring.encoders import TorchInference
from scoring.exported import Serving
from scoring.memory import Memory, plan_index
from scoring.vectors import BATCHES as BY_PURPOSE
from scoring.vectors import Vectors, choose_index, open_indexes, search_indexes, write_indexes
from search.index import AUTO
from search.topk import configure_faiss
from trainer.inputs import Inputs
from trainer.model import Model
from trainer.recipe_files import load_recipe
from trainer.threads import set_threads

K = 10
WORDS = 12
TARGET = 0.98
LABELS = {False: 1 << 20, True: 1 << 18}
# All sizes of the encoder are given, because there is no data for "auto".
RECIPE = (f"encoder.dimension={DIMENSION}", "encoder.hidden=0", "encoder.buckets=262144", "classifier.bias=false")
BATCHES = (1, 256)
_TUNED, _SEARCHED = 512, 1024
_ROUNDS = 3
_SECONDS = 1.0  # minimum time of one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="262,144 labels")
    parser.add_argument("--index", default="auto", help="a Faiss factory string, such as HNSW32")
    parser.add_argument("--export", nargs="+", help="measure these exports")
    parser.add_argument("--texts", help="a text a line, for --export")
    parser.add_argument("--before", help="another checkout, for --export")
    parser.add_argument("--grow", help="search vectors grown from those of this export")
    parser.add_argument("--rows", type=int, default=1_000_000, help="with --grow")
    parser.add_argument("--for", dest="purpose", default="serving", help="serving or batch, with --grow")
    parser.add_argument("--recall", type=float, default=0.95, help="target, with --grow")
    arguments = parser.parse_args()
    if arguments.grow:
        of_grown(arguments.grow, arguments.texts, arguments.rows, BY_PURPOSE[arguments.purpose], arguments.recall)
        return
    if arguments.export:
        of_exports(arguments.export, arguments.texts, [arguments.before or "", os.getcwd()])
        return
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


_PROCESS = """
import json, os, sys, time
began = time.process_time()
import extremis
model = extremis.load(sys.argv[1], threads=1)
loaded = time.process_time()
texts = [line.rstrip() for line in open(sys.argv[2], encoding="utf-8")][:1000]
model.predict(texts[0], max_labels=10)
first = time.process_time()
if hasattr(model, "compile"):
    model.compile()
compiled = time.process_time()
for text in texts[:50]:
    model.predict(text, max_labels=10)
clock, processor = [], []
for text in texts:
    started = time.perf_counter(), time.thread_time()
    model.predict(text, max_labels=10)
    clock.append(1000 * (time.perf_counter() - started[0]))
    processor.append(1000 * (time.thread_time() - started[1]))
many = time.process_time()
predicted = model.predict(texts, max_labels=10)
many = 1000 * (time.process_time() - many) / len(texts)
memory = {line.split()[0][:-1]: int(line.split()[1]) >> 10 for line in open("/proc/self/smaps_rollup") if "kB" in line}
bare, graph = [], os.path.join(sys.argv[1], "encoder", "model.onnx")
if os.path.exists(graph):
    import onnxruntime
    from tokenizers import Tokenizer
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(os.path.join(sys.argv[1], "encoder", "tokenizer.json"))
    for text in texts:
        started = time.perf_counter()
        ids = tokenizer.encode(text).ids[:model._exported.table.parameters["max_tokens"]]
        session.run(None, {"input_ids": [ids], "attention_mask": [[1] * len(ids)]})
        bare.append(1000 * (time.perf_counter() - started))
clock.sort(), processor.sort(), bare.sort()
print(json.dumps({
    "load_processor_seconds": round(loaded - began, 3), "first_processor_seconds": round(first - loaded, 3),
    "compile_processor_seconds": round(compiled - first, 3),
    "least_ms": round(clock[0], 3), "p50_ms": round(clock[len(clock) // 2], 3),
    "p99_ms": round(clock[len(clock) * 99 // 100], 3),
    "p50_processor_ms": round(processor[len(processor) // 2], 3), "processor_ms_of_many": round(many, 3),
    "rss_mib": memory["Rss"], "of_files_mib": memory["Rss"] - memory["Anonymous"],
    **({"bare_p50_ms": round(bare[len(bare) // 2], 3), "bare_p99_ms": round(bare[len(bare) * 99 // 100], 3)}
       if bare else {}),
    "scores": [{label.key: label.score for label in each.labels} for each in predicted],
}))
"""


def of_exports(exports: list[str], texts: str, checkouts: list[str]) -> None:
    """Print a line per round, checkout and export."""
    core, first = {min(os.sched_getaffinity(0))}, None
    for _ in range(_ROUNDS):
        for checkout, export in itertools.product(filter(None, checkouts), exports):
            paths = os.pathsep.join([os.path.abspath(checkout), os.environ.get("PYTHONPATH", "")])
            variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", _PROCESS, os.path.abspath(export), os.path.abspath(texts)]
            done = subprocess.run(
                command,
                env={**variables, "OPENBLAS_NUM_THREADS": "1"},
                cwd=checkout,
                stdout=subprocess.PIPE,
                check=True,
                preexec_fn=lambda: os.sched_setaffinity(0, core),
            )
            figures = json.loads(done.stdout)
            found = figures.pop("scores")
            first = first or found
            figures["apart"] = apart(found, first)
            print(*(os.path.basename(os.path.abspath(place)) for place in (checkout, export)), json.dumps(figures))


def apart(found: list[dict[str, float]], first: list[dict[str, float]]) -> dict[str, float]:
    """Compare best labels of texts with `first`: largest difference of scores, and share of equal best labels."""
    pairs = [*zip(found, first, strict=True)]
    differences = [abs(ours[key] - theirs[key]) for ours, theirs in pairs for key in ours.keys() & theirs]
    same = [next(iter(ours)) == next(iter(theirs)) for ours, theirs in pairs]
    return {"largest_difference": max(differences), "same_best": round(sum(same) / len(same), 4)}


def of_grown(export: str, texts: str, rows: int, batch: int, target: float) -> None:
    """Print what was weighed and measured for `rows` labels, points and random vectors."""
    pin()
    model = extremis.load(export, threads=1)
    serving = model._exported.serving
    with open(texts, encoding="utf-8") as file:
        x = model.embed([line.rstrip() for line in itertools.islice(file, _TUNED + _SEARCHED)])
    draw = np.random.default_rng(3)
    say_labels("labels", grown(serving.vectors[:], rows), x, batch, target)
    made_up, queries = (draw.standard_normal((count, x.shape[1]), np.float32) for count in (rows, len(x)))
    say_labels("random vectors", made_up, queries, batch, target)
    if serving.fused is not None and (few := serving.fused.scorers.memory) is not None:
        points = unit(grown(few.vectors.astype(np.float32), rows)).astype(np.float16)
        factory = plan_index(rows, points.shape[1], 1.0).factory
        memory = Memory(points, Ragged(np.zeros(rows, np.int32), np.arange(rows + 1)), rows, factory, coded=True)
        chosen = memory.indexed(x[:_TUNED])
        say_plans("points", chosen.measured["plans"])
        exact = say_way("points, exact with codes", lambda queries: memory.nearest(queries)[1], x)
        say_way(f"points, {chosen.factory.spec}", lambda queries: chosen.nearest(queries)[1], x, exact)


def say_labels(name: str, rows: np.ndarray, x: np.ndarray, batch: int, target: float) -> None:
    vectors = Vectors([rows])
    spec, index, plans = choose_index(AUTO, vectors, x[:_TUNED], K, target, batch)
    say_plans(name, [plan._asdict() for plan in plans])
    exact = say_way(f"{name}, exact with codes", lambda queries: search_indexes(vectors.indexed, queries, K)[0], x)
    if spec is None:
        return
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as folder:
        shards, facts = write_indexes(spec, vectors, x[:_TUNED], K, target, folder, first=index)
        opened = open_indexes([os.path.join(folder, shard.path) for shard in shards], facts, vectors)
    say_way(f"{name}, {spec}", lambda queries: search_indexes(opened, queries, K)[0], x, exact)


def say_plans(name: str, plans: list[dict[str, object]]) -> None:
    for plan in plans:
        print(f"{name}, weighed", json.dumps(plan), flush=True)


def say_way(
    name: str, search: Callable[[np.ndarray], np.ndarray], x: np.ndarray, exact: np.ndarray | None = None
) -> np.ndarray:
    """Print the time and recall of a search for queries that no index was tuned on; return the ids [B, K]."""
    x, times = x[_TUNED:], []
    found = search(x)
    for row in range(-1, len(x)):  # the first search computes what is kept
        began = time.thread_time()
        search(x[max(row, 0)][None])
        times.append(1000 * (time.thread_time() - began))
    began = time.thread_time()
    search(x[:512])
    figures = {"p50_ms": float(np.median(times[1:])), "p99_ms": float(np.quantile(times[1:], 0.99))}
    figures["ms_of_512"] = 1000 * (time.thread_time() - began) / len(x[:512])
    if exact is not None:
        hits = sum(len({*ours} & {*best}) for ours, best in zip(found.tolist(), exact.tolist(), strict=True))
        figures["recall"] = hits / exact.size
    print(name, json.dumps({key: round(value, 4) for key, value in figures.items()}), flush=True)
    return found


def grown(rows: np.ndarray, count: int) -> np.ndarray:
    """Return `count` copies [count, D] of rows [n, D], with noise from the second copy of a row on."""
    distances = np.sqrt(np.maximum(faiss.knn(rows, rows, 2)[0][:, 1], 0)) / rows.shape[1] ** 0.5
    copies, draw = np.resize(rows, (count, rows.shape[1])), np.random.default_rng(0)
    for start in range(len(rows), count, len(rows)):
        some = copies[start : start + len(rows)]
        some += distances[: len(some), None] * draw.standard_normal(some.shape, np.float32)
    return copies


def clustered(labels: int) -> tuple[Vectors, np.ndarray]:
    """Make unit vectors [L, D] in clusters of 256, and queries [n, D] of the same clusters."""
    centres = unit(np.random.default_rng(0).standard_normal((labels // 256, DIMENSION), np.float32))
    draw = np.random.default_rng(1)
    rows = noisy(centres, draw.integers(0, len(centres), labels), draw)
    queries = noisy(centres, draw.integers(0, len(centres), _TUNED + _SEARCHED), draw)
    return Vectors([rows]), queries


def some_texts() -> tuple[Tokenizer, list[str]]:
    """Make texts of made-up words, and train a tokenizer on them."""
    draw = np.random.default_rng(2)
    syllables = ["".join(pair) for pair in zip("bdfgklmnprst" * 3, "aeiou" * 8, strict=False)]
    words = ["".join(draw.choice(syllables, 3)) for _ in range(5000)]
    texts = [" ".join(draw.choice(words, WORDS)) for _ in range(_SEARCHED)]
    return train_wordpiece(pa.chunked_array([texts]), 5000), texts


def indexed(spec: str, model: Model, vectors: Vectors, queries: np.ndarray) -> tuple[Serving, dict]:
    """Return vectors with an index that was written, read and tuned as in an export."""
    factory = spec if spec != AUTO else f"IVF{int(4 * len(vectors) ** 0.5)},Flat"
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as folder:
        shards, facts = write_indexes(factory, vectors, queries, K, TARGET, folder)
        opened = open_indexes([os.path.join(folder, shard.path) for shard in shards], facts, vectors)
    return Serving(TorchInference(model.encoder), model.inputs, vectors, index=opened), facts


def pin() -> None:
    """Pin this process to one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    set_threads(1)
    configure_faiss(1)


def timed(serving: Serving, queries: np.ndarray, batch: int, exact: bool) -> Callable[[], float]:
    """Return a function that measures milliseconds of search per query."""
    return per_query(lambda start: serving.top_k(queries[start : start + batch], K, exact=exact), batch)


def encoding(serving: Serving, tokenizer: Tokenizer, texts: list[str], batch: int) -> Callable[[], float]:
    """Return a function that measures milliseconds per query from text to x."""

    def work(start: int) -> None:
        values, offsets, *_ = encode_texts(tokenizer, texts[start : start + batch])
        serving.embed(Inputs(Ragged(values, offsets)))

    return per_query(work, batch)


def per_query(work: Callable[[int], object], batch: int) -> Callable[[], float]:
    """Return a function that calls `work(start)` on one batch after another; gives milliseconds per query."""

    def run() -> float:
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < _SECONDS:
            work(done % (_SEARCHED - batch + 1))
            done += batch
        return 1000 * elapsed / done

    work(0)  # the first call loads modules
    return run


def recall_of(serving: Serving, queries: np.ndarray) -> float:
    """Return the share of the exact best K that the index finds."""
    _, labels = serving.top_k(queries, K)
    _, exact = serving.top_k(queries, K, exact=True)
    hits = sum(len({*a} & {*b}) for a, b in zip(labels.tolist(), exact.tolist(), strict=True))
    return hits / exact.size


if __name__ == "__main__":
    main()
