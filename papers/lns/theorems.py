"""LNS's theorems 1 and 2 on hash tables of a trained run: how often labels are drawn by cosine, and should be.

    python -m papers.lns.theorems DATA RUN [--queries 300]

RUN is of SimHash, whose collision probability is p = 1 - angle / pi: a label is drawn with 1 - (1 - p^K)^L.
*Live* tables are those of RUN's checkpoint: vectors that changed after they were last hashed lie under old codes.
*Fresh* ones hold the vectors as they are. Pairs of queries and labels are binned by their cosine.
"""

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.common.collisions import FIRST, Probe, ProbedVectors, load_probe
from benchmarks.common.report import report
from schemas.layout import RunLayout
from schemas.ragged import Ragged
from trainer.checkpoints import latest_checkpoint
from trainer.loop import NEGATIVES
from trainer.methods.lns import Lns
from trainer.negatives.base import NegativeSources
from trainer.negatives.lsh import HashedNegatives
from trainer.negatives.lsh_section import LshSection

FUNCTIONS = 24  # sets of hash functions over which probabilities are taken
WIDTH = 0.05  # width of a bin
MIN_PAIRS = 5_000  # minimum of pairs for a bin to count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("run")
    parser.add_argument("--queries", type=int, default=300)
    arguments = parser.parse_args()
    probe, recipe = load_probe(arguments.data, arguments.run, "test", arguments.queries)
    assert isinstance(recipe, Lns)
    checkpoint = latest_checkpoint(RunLayout(arguments.run))
    assert checkpoint is not None
    state = {name: value.numpy() for name, value in checkpoint.tensors(NEGATIVES).items()}
    options, seed = recipe.negatives.lsh, recipe.train.seed
    fresh, live = (HashedNegatives(options, ProbedVectors(probe), seed) for _ in range(2))
    fresh.start()
    NegativeSources([live]).load(state)
    figures, ratios = dict[str, object](), dict[str, float]()
    for query in ("embedding", "label"):
        of_query = options.model_copy(update={"query": query})
        samplers = itertools.chain([fresh], with_other_functions(probe, fresh))
        each = [by_cosine(probe, sampler, of_query) for sampler in samplers]
        own, bins, error = by_cosine(probe, live, of_query), np.mean(each, axis=0), np.std(each, axis=0, ddof=1)
        figures |= {f"fresh_{query}": bins.round(5).tolist(), f"live_{query}": own.round(5).tolist()}
        off = np.abs(bins[:, 1] - bins[:, 2])
        ratios[f"{query}_error"] = float(off.max())
        # A rare bin may have no draw in any set, hence no deviation; the minimum is that of as many independent draws.
        least = np.sqrt(bins[:, 2] * (1 - bins[:, 2]) / bins[:, 3])
        ratios[f"{query}_standard_errors_off"] = float((off / np.maximum(error[:, 1], least)).max() * FUNCTIONS**0.5)
        ratios[f"{query}_rising"] = rank_correlation(bins)
        # With the same functions, so that only vectors that changed since hashing make a difference.
        ratios[f"live_{query}_off"] = float(np.abs(own[:, 1] - each[0][:, 1]).max())
        ratios[f"live_{query}_rising"] = rank_correlation(own)
    ratios["trained_evenness"] = evenness(probe, fresh)
    ratios["trained_top_over_uniform"] = top_over_uniform(probe, fresh)
    draw = np.random.default_rng(seed)
    untrained = Probe(draw.standard_normal(probe.vectors.shape, np.float32), probe.x, probe.positives)
    untrained_sampler = HashedNegatives(options, ProbedVectors(untrained), seed)
    untrained_sampler.start()
    ratios["untrained_evenness"] = evenness(untrained, untrained_sampler)
    figures |= {"labels": len(probe.vectors), "queries": len(probe.x), "rows_with_old_codes": len(live.touched)}
    figures |= {"bins": "cosine, measured, predicted, pairs"}
    report("labels are drawn with the probability of theorems 1 and 2", figures, ratios, {})


def evenness(probe: Probe, sampler: HashedNegatives) -> float:
    """Return how even draws by embedding are over labels: 1 if all are equally likely, 1 / L if one is certain."""
    sampler.options = sampler.options.model_copy(update={"query": "embedding"})
    chances = draw_probabilities(cosines(probe, probe.x), sampler)
    return float((chances.mean(1) ** 2 / (chances**2).mean(1)).mean())


def cosines(probe: Probe, hashed: np.ndarray) -> np.ndarray:
    """Return the cosines [B, L] of the hashed vectors `hashed` [B, D] with all label vectors."""
    rows = (each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-30) for each in (hashed, probe.vectors))
    x, w = rows
    result: np.ndarray = x @ w.T
    return result


def draw_probabilities(cosine: np.ndarray, sampler: HashedNegatives) -> np.ndarray:
    """Return the probability of a draw according to theorems 1 and 2."""
    p = 1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi
    chances: np.ndarray = 1 - (1 - p**sampler.options.bits) ** sampler.options.tables
    return chances


def with_other_functions(probe: Probe, sampler: HashedNegatives) -> Iterator[HashedNegatives]:
    """Yield tables of the same vectors with other hash functions, one at a time."""
    for seed in range(1, FUNCTIONS):
        other = HashedNegatives(sampler.options, ProbedVectors(probe), sampler.seed + 1000 * seed)
        other.start()
        yield other


def rank_correlation(bins: np.ndarray) -> float:
    """Return the rank correlation of cosines and shares of drawn pairs."""
    a, b = (np.argsort(np.argsort(bins[:, column])) - (len(bins) - 1) / 2 for column in (0, 1))
    return float(a @ b / (a @ a))


def by_cosine(probe: Probe, sampler: HashedNegatives, options: LshSection) -> np.ndarray:
    """Return bins [n, 4]: mean cosine, share of drawn pairs, mean probability by theorem 1 or 2, number of pairs."""
    sampler.options = options
    drawn, hashed, own = draw_labels(probe, sampler)
    cosine = cosines(probe, hashed)
    chances = draw_probabilities(cosine, sampler)
    bins = np.floor(cosine / WIDTH).astype(np.int64)
    bins[own] = np.iinfo(np.int64).min
    rows = []
    for number in np.unique(bins[bins > np.iinfo(np.int64).min]):
        chosen = bins == number
        if chosen.sum() >= MIN_PAIRS:
            rows.append([cosine[chosen].mean(), drawn[chosen].mean(), chances[chosen].mean(), chosen.sum()])
    return np.array(rows, np.float64)


def draw_labels(probe: Probe, sampler: HashedNegatives) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the drawn labels of each query, [B, L] bool, the hashed vectors [B, D], and the positives.

    By label, each query keeps only its first positive, so that the vector of this positive is hashed.
    """
    positives, hashed = probe.positives, probe.x
    if sampler.options.query == "label":
        first = positives.values[positives.offsets[:-1]]
        positives, hashed = Ragged.from_matrix(first[:, None]), probe.vectors[first]
    sampled = sampler.sample(probe.x, positives, epoch=0, step=0)
    drawn, own = np.zeros((2, len(probe.x), len(probe.vectors)), bool)
    drawn[sampled.row_of(), sampled.values] = True
    own[positives.row_of(), positives.values] = True
    return drawn, hashed, own


def top_over_uniform(probe: Probe, sampler: HashedNegatives) -> float:
    """Return how many times more often than by chance draws by embedding find the FIRST labels by inner product."""
    sampler.options = sampler.options.model_copy(update={"query": "embedding"})
    drawn, _, own = draw_labels(probe, sampler)
    scores = torch.from_numpy(probe.x @ probe.vectors.T).masked_fill(torch.from_numpy(own), -torch.inf)
    best = scores.topk(FIRST, dim=1).indices.numpy()
    return float(np.take_along_axis(drawn, best, 1).mean() / drawn[~own].mean())


if __name__ == "__main__":
    main()
