"""Batches of queries with 10 positives, 100 hard and 400 random negatives per query, all drawn uniformly."""

import numpy as np
import torch

from schemas.ragged import Ragged
from trainer.device import CPU
from trainer.inputs import Inputs
from trainer.negatives.draws import RandomPool
from trainer.negatives.planner import own_pool, shared_pool, unmerged_candidates
from trainer.stream import Batch
from trainer.stream.batch import Candidates

POSITIVES, HARD, RANDOM = 10, 100, 400


def random_batch(size: int, labels: int, step: int, tokens: int = 0, vocabulary: int = 0) -> Batch:
    """Return `size` queries with `tokens` tokens; a query's positives and hard negatives are all distinct."""
    draw = np.random.default_rng((labels, step))
    # Each label of a query lies in a separate range, so that no label comes twice.
    count = POSITIVES + HARD
    width = max(1, labels // count)
    ids = np.arange(count) * width + draw.integers(0, width, (size, count))
    ids = draw.permuted(ids, axis=1)
    text = Ragged(draw.integers(0, max(1, vocabulary), size * tokens), np.arange(size + 1) * tokens)
    offsets = np.arange(size + 1) * POSITIVES
    positives = np.sort(ids[:, :POSITIVES], axis=1).ravel()
    return Batch(0, step, np.arange(size), Inputs(text if tokens else None), positives, offsets, ids[:, POSITIVES:])


def plan(batch: Batch, labels: int, pool: str, device: torch.device, merges: bool = True) -> Candidates:
    """Return candidates with own pools per query or a shared pool; with `merges`, a GPU merges own pools."""
    weight = labels / RANDOM
    draws, at = RandomPool(labels), {"seed": 0, "epoch": 0, "step": batch.step}
    if pool == "own":
        build = unmerged_candidates if merges and device != CPU else own_pool
        return build(batch, batch.hard, draws.draw_own(RANDOM, batch.rows, **at), weight)
    return shared_pool(batch, batch.hard, draws.draw(RANDOM, **at), weight)
