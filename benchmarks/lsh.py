"""Claim: negatives from hash tables and updates of touched rows cost the same for 10K labels as for 10M (LNS).

    python -m benchmarks.lsh [--quick]
    python -m benchmarks.lsh --probe [--run RUN --data DATA [--split test] [--queries 1000]]

Hash tables over D = 64 vectors are built for 10K, 100K, 1M and 10M labels. Then, in turns: a batch's negatives by
embedding and by label, and touched rows hashed again. One thread does all the work, and its processor time is counted,
so that other work on the machine does not count. A ratio is the cost of the most expensive of the four sizes over the
cost of the cheapest. `--quick` has fewer tables and rounds, but the same sizes.

`--probe` measures recall instead of costs: the share of a query's true top 200 labels, by inner product, that is among
its hashed negatives, or among equally many uniform draws. Labels and queries come from RUN, a classifier trained on
DATA; the default is 100,000 vectors in clusters of 200 (`--quick`: 20,000).
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.common.collisions import FIRST, clustered_probe, load_probe, measure
from benchmarks.common.report import Bar, interleave, medians, report
from schemas.ragged import Ragged
from trainer.methods.lns import Lns
from trainer.negatives.lsh import HashedNegatives
from trainer.negatives.lsh_section import LshSection

SIZES = {"10K": 10_000, "100K": 100_000, "1M": 1_000_000, "10M": 10_000_000}
DIMENSION = 64
QUERIES = 256
TOUCHED = 2_000
_PERIOD = 1 << 16
BAR = "<1.5"
BARS: dict[str, Bar] = {"embedding_over_uniform": 1.0, "label_over_uniform": 1.0}
_BINS = {"family": "dwta", "width": 8, "bits": 5}
PROBED = {
    "bins of 2, K = 6, L = 50, at most 200": LshSection(hard=200),
    "bins of 2, K = 6, L = 50, all": LshSection(hard="all"),
    "bins of 8, K = 5, L = 50, all": LshSection(hard="all", capacity=128, **_BINS),
    "bins of 8, K = 5, L = 350, all": LshSection(hard="all", tables=350, capacity=32, **_BINS),
    "SimHash, K = 9, L = 50, all": LshSection(hard="all", family="simhash", bits=9),
}


def vectors(seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from row ids to rows of a virtual matrix [2**32, D]: sums of two of 2**16 vectors."""
    draw = np.random.default_rng([seed, 1])
    low, high = draw.standard_normal((2, _PERIOD, DIMENSION), np.float32)
    return lambda ids: low[ids % _PERIOD] + high[(7 * ids + ids // _PERIOD) % _PERIOD]


class Vectors:
    """Virtual vectors of `labels` labels, which are computed, not stored."""

    def __init__(self, labels: int) -> None:
        self.start, self.stop = 0, labels
        self.vectors = torch.empty(labels, DIMENSION, device="meta")
        self.read = vectors(0)


def build_sampler(options: LshSection, labels: int) -> tuple[HashedNegatives, float]:
    """Return a sampler over `labels` vectors, and the microseconds per row."""
    sampler = HashedNegatives(options, Vectors(labels))
    start = time.thread_time()
    sampler.start()
    return sampler, 1e6 * (time.thread_time() - start) / labels


def memory_of(sampler: HashedNegatives) -> int:
    """Return the bytes of the tables; only the bytes of codes grow with the number of rows."""
    return sum(array.nbytes for array in sampler.tables.arrays)


def sample(by: str, sampler: HashedNegatives, steps: dict[str, int]) -> float:
    """Return the microseconds per query for the negatives of a batch."""
    steps[by] = step = steps.get(by, 0) + 1
    draw = np.random.default_rng([2, step])
    x = draw.standard_normal((QUERIES, DIMENSION), np.float32)
    positives = Ragged.from_matrix(draw.integers(0, sampler.labels, 3 * QUERIES).reshape(-1, 3))
    sampler.options = sampler.options.model_copy(update={"query": by})
    start = time.thread_time()
    sampler.sample(x, positives, epoch=0, step=step)
    return 1e6 * (time.thread_time() - start) / QUERIES


def update(sampler: HashedNegatives, steps: dict[str, int]) -> float:
    """Return the microseconds for hashing a touched row again; every vector has changed."""
    steps["update"] = step = steps.get("update", 0) + 1
    ids = np.sort(np.random.default_rng([3, step]).choice(sampler.labels, TOUCHED, replace=False))
    rows = vectors(step)(ids)
    sampler.touch(ids)
    sampler._vectors.read = lambda _: rows  # type: ignore[method-assign, assignment]
    start = time.thread_time()
    sampler.rehash(epoch=0, step=step)
    return 1e6 * (time.thread_time() - start) / TOUCHED


def report_found(arguments: argparse.Namespace) -> None:
    """Report the collision probe for several kinds of tables, and for the run's own tables."""
    kinds = dict(PROBED)
    if arguments.run:
        vectors, recipe = load_probe(arguments.data, arguments.run, arguments.split, arguments.queries)
        assert isinstance(recipe, Lns)
        own = recipe.negatives.lsh.model_copy(update={"query": "embedding"})  # both kinds are measured
        kinds |= {"of the run": own} if own.hard and own not in PROBED.values() else {}
    else:
        vectors = clustered_probe(20_000 if arguments.quick else 100_000, arguments.queries)
    figures: dict[str, object] = {"labels": len(vectors.vectors), "queries": len(vectors.x)}
    for name, options in kinds.items():
        figures[name] = measure(vectors, options)
        sys.stderr.write(f"{name}: {figures[name]}\n")
    best = figures["bins of 8, K = 5, L = 350, all"]
    assert isinstance(best, dict)
    ratios = {f"{by}_over_uniform": each["found"] / each["uniform"] for by, each in best.items()}
    report(f"hash tables find more of the true top {FIRST} labels than uniform draws do", figures, ratios, BARS)


def report_costs(quick: bool) -> None:
    """Report the costs of negatives and of touched rows."""
    options = LshSection(family="dwta", bits=6, tables=10 if quick else 50, capacity=128)
    warm, _ = build_sampler(options, TOUCHED)
    for by in ("embedding", "label"):
        sample(by, warm, {})
    update(warm, {})

    samplers, build = {}, {}
    for name, labels in SIZES.items():
        samplers[name], build[name] = build_sampler(options, labels)
        sys.stderr.write(f"built {name}: {build[name]:.1f} us a row\n")
    gc.disable()
    work: dict[str, Callable[..., float]] = {
        "embedding": partial(sample, "embedding"),
        "label": partial(sample, "label"),
        "update": update,
    }
    costs = {}
    for kind, action in work.items():
        sides = {name: partial(action, sampler, {}) for name, sampler in samplers.items()}
        costs[kind] = medians(interleave(sides, 7 if quick else 21))
    figures = {
        **{f"{kind}_us": {name: round(value, 2) for name, value in by.items()} for kind, by in costs.items()},
        "build_us_a_row": {name: round(value, 2) for name, value in build.items()},
        "memory_mib": {name: round(memory_of(sampler) / 2**20, 1) for name, sampler in samplers.items()},
        "bytes_a_label": samplers["10M"].tables.codes[0].nbytes,
        "vectors_mib_float32": {name: round(4 * DIMENSION * n / 2**20, 1) for name, n in SIZES.items()},
        "tables": options.tables,
        "bits": options.bits,
        "capacity": options.capacity,
    }
    ratios = {f"{kind}_flat": max(by.values()) / min(by.values()) for kind, by in costs.items()}
    report(
        "negatives from hash tables and their updates cost the same for 10K labels as for 10M",
        figures,
        ratios,
        dict.fromkeys(ratios, BAR),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tables and rounds, or fewer labels")
    parser.add_argument("--probe", action="store_true", help="what is found, in place of what it costs")
    parser.add_argument("--run", help="probe the classifier of this run; with --data")
    parser.add_argument("--data", help="the data that it was trained on")
    parser.add_argument("--split", default="test", help="whose first queries are asked")
    parser.add_argument("--queries", type=int, default=1000)
    arguments = parser.parse_args()
    if bool(arguments.run) != bool(arguments.data):
        parser.error("--run and --data go together")
    if arguments.probe or arguments.run:
        report_found(arguments)
    else:
        report_costs(arguments.quick)


if __name__ == "__main__":
    main()
