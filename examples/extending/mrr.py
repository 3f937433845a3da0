"""MRR@k: mean of 1 / r over points, r the rank of the first positive; 0 for points without a positive in the top k."""

import numpy as np

from trainer.evaluation.metrics import Contributions, Rankings


def reciprocal_rank(rankings: Rankings) -> Contributions:
    """Return the contributions to MRR@k."""
    reciprocal = rankings.hits / np.arange(1, rankings.depth + 1)
    return Contributions(np.maximum.accumulate(reciprocal, axis=1)[:, rankings.ks - 1])
