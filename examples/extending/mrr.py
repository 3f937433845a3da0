"""MRR@k: the mean over points of 1 / r, where r is the rank of the first positive; 0 if r is above k."""

import numpy as np

from trainer.evaluation.metrics import Contributions, Rankings


def reciprocal_rank(rankings: Rankings) -> Contributions:
    """Return the contributions to MRR@k."""
    reciprocal = rankings.hits / np.arange(1, rankings.depth + 1)
    return Contributions(np.maximum.accumulate(reciprocal, axis=1)[:, rankings.ks - 1])
