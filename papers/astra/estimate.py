"""ASTRA's lemma 4.1 and section 3.1 on a trained run: its estimate, the error, and what stale negatives miss.

    python -m papers.astra.estimate DATA RUN [--queries 128] [--draws 1000] [--age 5]

RUN keeps the checkpoints of its epochs; *stale* hard negatives are of so many epochs before the newest.
Means over draws of the trainer's own generator are compared with the full sum. Errors of the gradient on x are
exact: k_r draws with replacement of weight L / k_r have, with g_l what label l sends to x and sums over labels outside
P and H, the covariance trace (L sum |g_l|^2 - |sum g_l|^2) / k_r.
"""

import argparse
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.common.collisions import Probe, load_probe
from benchmarks.common.report import report
from schemas.layout import RunLayout, list_numbers
from schemas.ragged import Ragged
from trainer.inputs import Inputs
from trainer.negatives.draws import RandomPool
from trainer.negatives.planner import own_pool
from trainer.stream.batch import Batch

HARD, RANDOM = 100, 400  # k_h and k_r per query
SPLIT = "train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("run")
    parser.add_argument("--queries", type=int, default=128)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--age", type=int, default=5, help="epochs of stale negatives; default: %(default)s")
    arguments = parser.parse_args()
    steps = list_numbers(RunLayout(arguments.run).checkpoints)
    now, before = (
        load_probe(arguments.data, arguments.run, SPLIT, arguments.queries, step)[0]
        for step in (steps[-1], steps[-1 - arguments.age])
    )
    fresh, stale = hardest(now), hardest(before)
    none = np.empty((len(now.x), 0), np.int64)
    total = HARD + RANDOM
    errors = {
        "random": gradient_error(now, none, total),
        "stale_mixture": gradient_error(now, stale, RANDOM),
        "fresh_mixture": gradient_error(now, fresh, RANDOM),
    }
    alone = {name: missed_share(now, table) for name, table in (("stale", stale), ("fresh", fresh))}
    few, many = (measure_draws(now, stale, count, arguments.draws) for count in (RANDOM, 4 * RANDOM))
    report(
        "the estimate is unbiased, and its error falls with the root of k_r",
        {"errors": errors, "alone": alone, "queries": len(now.x), "draws": arguments.draws, "labels": len(now.vectors)},
        {
            "standard_errors_off": max(few.off, many.off),
            "standard_errors_off_of_a_query": max(few.off_of_a_query, many.off_of_a_query),
            "error_measured_over_exact": few.error / errors["stale_mixture"],
            "error_at_four_times_as_many": many.error / few.error,
            "stale_mixture_over_random": errors["stale_mixture"] / errors["random"],
            "fresh_mixture_over_random": errors["fresh_mixture"] / errors["random"],
            "fresh_over_stale_mixture": errors["fresh_mixture"] / errors["stale_mixture"],
            "stale_alone_missed": alone["stale"],
            "fresh_alone_missed": alone["fresh"],
            "stale_still_among_hardest": float(Ragged.from_matrix(np.sort(fresh, 1)).contains(stale).mean()),
        },
        {},
    )


def scores_of(probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [B, L] float64, and a mask of positives [B, L] bool; a constant 1 in x multiplies the bias."""
    x, w = inputs_of(probe)
    positive = torch.zeros(len(x), len(w), dtype=torch.bool)
    positive[probe.positives.row_of(), probe.positives.values.astype(np.int64)] = True
    return x @ w.T, positive


def inputs_of(probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and w, float64; x has a constant 1 if w has a bias."""
    x, w = torch.from_numpy(probe.x).double(), torch.from_numpy(probe.vectors).double()
    return torch.nn.functional.pad(x, (0, w.shape[1] - x.shape[1]), value=1.0), w


def hardest(probe: Probe) -> np.ndarray:
    """Return the HARD labels with the highest scores, without positives, [B, HARD]."""
    scores, positive = scores_of(probe)
    return scores.masked_fill(positive, -torch.inf).topk(HARD, dim=1).indices.numpy()


def loss_derivatives(probe: Probe) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (derivative of the full loss by each score [B, L], mask of positives, gradient of the full loss on x)."""
    scores, positive = scores_of(probe)
    slopes = torch.sigmoid(scores) - positive.double()
    return slopes, positive, slopes @ inputs_of(probe)[1]


def gradient_error(probe: Probe, hard: np.ndarray, random: int) -> float:
    """Return the root mean square error of the gradient on x over the norm of the full one, averaged over queries."""
    slopes, positive, full = loss_derivatives(probe)
    outside = ~positive
    outside.scatter_(1, torch.from_numpy(hard), False)
    w, rest = inputs_of(probe)[1], slopes * outside
    trace = (len(w) * (rest.square() @ w.square().sum(1)) - (rest @ w).square().sum(1)) / random
    return float((trace.clamp_min(0).sqrt() / full.norm(dim=1)).mean())


def missed_share(probe: Probe, hard: np.ndarray) -> float:
    """Return the norm of the part of the gradient on x that hard negatives miss, over the norm of the full gradient."""
    slopes, positive, full = loss_derivatives(probe)
    kept = positive.clone()
    kept.scatter_(1, torch.from_numpy(hard), True)
    left = (slopes * ~kept) @ inputs_of(probe)[1]
    return float((left.norm(dim=1) / full.norm(dim=1)).mean())


class DrawErrors(NamedTuple):
    """Distance of means over draws from full sums, in standard errors: for all queries together, and maximum per query.

    `error`: error of the gradient on x, as computed by the function `error`.
    """

    off: float
    off_of_a_query: float
    error: float


def measure_draws(probe: Probe, hard: np.ndarray, random: int, draws: int) -> DrawErrors:
    """Draw negatives as the trainer does, `draws` times."""
    x, w = inputs_of(probe)
    scores, positive = scores_of(probe)
    full = torch.nn.functional.softplus(torch.where(positive, -scores, scores)).sum(1).numpy()
    gradient = loss_derivatives(probe)[2]
    rows, labels = np.arange(len(x)), len(w)
    inputs = Inputs(Ragged.empty(len(x)))  # the encoder has done its part
    losses, off = np.zeros((draws, len(x))), torch.zeros(len(x), dtype=torch.float64)
    for step in range(draws):
        batch = Batch(0, step, rows, inputs, probe.positives.values.astype(np.int64), probe.positives.offsets)
        pool = RandomPool(labels).draw_own(random, rows, seed=0, epoch=0, step=step)
        pairs = own_pool(batch, hard, pool, labels / random)
        query, label = torch.from_numpy(pairs.pair_query), torch.from_numpy(pairs.ids[pairs.pair_label])
        own, weight = torch.from_numpy(pairs.pair_positive), torch.from_numpy(pairs.pair_weight).double()
        s = scores[query, label]
        losses[step] = np.bincount(
            query.numpy(), (torch.nn.functional.softplus(torch.where(own, -s, s)) * weight).numpy(), len(x)
        )
        slopes = torch.zeros_like(scores)
        slopes[query, label] = (torch.sigmoid(s) - own.double()) * weight
        off += (slopes @ w - gradient).square().sum(1)
    errors = np.abs(losses.mean(0) - full) / (losses.std(0, ddof=1) / np.sqrt(draws))
    together = losses.sum(1)
    total = abs(together.mean() - full.sum()) / (together.std(ddof=1) / np.sqrt(draws))
    error = ((off / draws).sqrt() / gradient.norm(dim=1)).mean()
    return DrawErrors(float(total), float(errors.max()), float(error))


if __name__ == "__main__":
    main()
