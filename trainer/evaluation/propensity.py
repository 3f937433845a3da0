"""Propensities of labels: the probability that a relevant label was observed (Jain et al., 2016)."""

import math
from typing import NamedTuple

import numpy as np

from schemas.errors import InputError


class Constants(NamedTuple):
    """A and B of the propensity model."""

    a: float
    b: float


_WIKIPEDIA = Constants(0.5, 0.4)
_AMAZON = Constants(0.6, 2.6)
_OTHER = Constants(0.55, 1.5)

# By the exact name in the Extreme Classification Repository. A name that is not here is unknown, whatever it looks
# like: published code that guesses from parts of a name has scored one data set with three pairs of constants.
KNOWN: dict[str, Constants] = {
    "WikiLSHTC-325K": _WIKIPEDIA,
    "WikipediaLarge-500K": _WIKIPEDIA,
    "Wikipedia-500K": _WIKIPEDIA,
    "WikiTitles-500K": _WIKIPEDIA,
    "LF-Wikipedia-500K": _WIKIPEDIA,
    "LF-WikiTitles-500K": _WIKIPEDIA,
    "Amazon-670K": _AMAZON,
    "Amazon-3M": _AMAZON,
    "AmazonTitles-670K": _AMAZON,
    "AmazonTitles-3M": _AMAZON,
    "LF-Amazon-131K": _AMAZON,
    "LF-AmazonTitles-131K": _AMAZON,
    "LF-AmazonTitles-1.3M": _AMAZON,
    "EURLex-4K": _OTHER,
    "Wiki10-31K": _OTHER,
    "AmazonCat-13K": _OTHER,
    "WikiSeeAlso-350K": _OTHER,
    "WikiSeeAlsoTitles-350K": _OTHER,
    "LF-WikiSeeAlso-320K": _OTHER,
    "LF-WikiSeeAlsoTitles-320K": _OTHER,
}


def inverse_propensity(frequency: np.ndarray, points: int, a: float, b: float) -> np.ndarray:
    """Return inverse propensities q_l = 1 + C (N_l + B)^-A with C = (ln N - 1)(B + 1)^A; natural logarithm.

    `frequency` [L] int64: N_l, training points of each label; `points`: N, training points in all; -> float64 [L].
    Raises InputError where no N training points could have these frequencies. Jain et al. (2016), section 4.
    """
    if points < 1:
        raise InputError(f"propensities need training points; got N = {points}. Count the train split.")
    if frequency.size and not 0 <= frequency.min() <= frequency.max() <= points:
        raise InputError(
            f"training frequencies lie in [0, N]; got {frequency.min()} to {frequency.max()} with N = {points}. "
            "Take the frequencies and N from the same train split."
        )
    scale = (math.log(points) - 1) * (b + 1) ** a
    return 1 + scale * (frequency.astype(np.float64) + b) ** -a
