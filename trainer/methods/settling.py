"""Settings from the data: what a recipe leaves to the data ("auto" or "prior") becomes numbers, with reasons.

The numbers worked well on the four data sets in docs/results.md. They use only counts, which do not describe the words
of a data set, so `extremis run auto` tries several values for the weight of n-grams and for dropout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.methods.keys import AUTO, classes_at, merge, methods_of

# Standard deviation of random initial vectors: small compared with the updates of a few steps.
_SMALL_INITIAL_SCALE = 0.005
_FEWEST_STEPS = 80  # steps per epoch: with larger batches, training on small data would have too few steps
_POINTS = 600_000  # training points of a run, over all epochs; small data has more epochs
_TUNED_DIMENSION = 512  # dimension at which rates were tuned
_TUNED_TOKENS = 25  # tokens per text up to which the full rate works; with 400 tokens and D = 512, renee diverges
_LOWEST_RATE = 1e-4  # validation refuses a rate of 0
_LEAST_DIMENSION = 64  # rates do not grow below this dimension: training would diverge
_MANY_LABELS = 5_000_000  # above this number of labels, label vectors dominate the cost (ASTRA's bottleneck)
_ADAM_POINTS = 80_000  # number of training points at which Adam's rates were tuned


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the part of DATA that a run uses.

    `queries`: N, the number of rows to train on. `labels`: L. `pairs`: number of (query, label) pairs. `label_texts`:
    number of labels whose texts are also training points. `ngrams`: number of distinct token bigrams that occur in at
    least two rows, 0 without tokens. `tokens`: mean number of tokens per query. `median_frequency`: median number of
    training points per label, over labels with training points.
    """

    queries: int
    labels: int
    pairs: int
    label_texts: int = 0
    ngrams: int = 0
    tokens: float = 0.0
    median_frequency: float = 0.0

    @property
    def points(self) -> int:
        """Number of training points: queries and label texts."""
        return self.queries + self.label_texts

    @property
    def described_points(self) -> str:
        """Number of queries and of label texts, in words."""
        texts = f" and {self.label_texts:,} label texts" if self.label_texts else ""
        return f"{self.queries:,} points{texts}"

    @property
    def prior(self) -> float:
        """Mean fraction of all labels that are positives of a training point."""
        return (self.pairs + self.label_texts) / max(1, self.points * self.labels)


# A recipe is checked with these before there is data.
NOMINAL = DataStatistics(queries=100_000, labels=10_000, pairs=500_000, ngrams=250_000, tokens=20, median_frequency=10)


def settle(body: Mapping[str, Any], statistics: DataStatistics) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a recipe's `body` with numbers for what it leaves to the data, and a reason for each, by dotted key.

    What its method does not settle stays as it is, so that validation refuses it.
    """
    draft = Draft(body, statistics)
    for method in methods_of(body):
        method.settle(draft)
    return draft.body, draft.reasons


class Draft:
    """A recipe's `body` before it is validated, the `statistics` of the data, and the reasons for what they settle."""

    def __init__(self, body: Mapping[str, Any], statistics: DataStatistics) -> None:
        self.body, self.statistics, self.reasons = dict(body), statistics, dict[str, str]()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a dotted key: stated, settled, or the default; None without such a key."""
        section, _, name = key.partition(".")
        values = self.body.get(section, {})
        if isinstance(values, Mapping) and name in values:
            return values[name]
        fields = [options.model_fields for options in classes_at(methods_of(self.body), section, values)]
        return next((each[name].default for each in fields if name in each), None)

    @property
    def width(self) -> int:
        """D; any number if it is not one, so that validation refuses it."""
        width = self["encoder.dimension"]
        return width if isinstance(width, int) else 1

    def fill(self, key: str, value: int | float | str, reason: str) -> None:
        """Set a dotted key that the recipe leaves to the data. Keys of other kinds fall away with the kind."""
        section, _, name = key.partition(".")
        if self[key] in AUTO:
            self.body = merge(self.body, {section: {name: value}})
            self.reasons[key] = reason


def batch(statistics: DataStatistics) -> int:
    """Return the largest power of two that gives an epoch enough steps."""
    most = 1 << max(0, (statistics.points // _FEWEST_STEPS).bit_length() - 1)
    return min(max(most, 32), 512)


def settle_length(draft: Draft) -> None:
    """Choose the batch, and the epochs, so that a run trains on about _POINTS points in total."""
    why = draft.statistics.described_points
    draft.fill("order.batch", batch(draft.statistics), why)
    draft.fill("train.epochs", min(max(round(_POINTS / draft.statistics.points), 6), 8), why)


def settle_encoder(draft: Draft) -> None:
    """Choose the dimension, the hidden units, one bucket for each pair of tokens in at least two texts, and the rates.

    D is smaller for many labels. On Tate, doubling D doubles the time and raises the fused P@1 by 0.1.
    """
    labels, ngrams, tokens = draft.statistics.labels, draft.statistics.ngrams, draft.statistics.tokens
    draft.fill("encoder.dimension", 64 if labels > _MANY_LABELS else 256, f"{labels:,} labels")
    buckets = 1 << max(0, ngrams - 1).bit_length()
    paired = f"{ngrams:,} pairs of tokens occur more than once"
    draft.fill("encoder.buckets", min(max(buckets, 1 << 10), 1 << 21), paired)
    width = draft.width
    why = f"encoder.dimension = {width}"
    draft.fill("encoder.hidden", 2 * width, why)
    if draft["encoder.optimizer"] in ("adam", None):  # a transformer always has Adam
        # Fewer training points need lower rates, because the model would overfit at the full rate.
        factor, points = min(1.0, (draft.statistics.points / _ADAM_POINTS) ** 0.5), draft.statistics.described_points
        for key, rate in (("encoder.lr", 0.005), ("encoder.dense_lr", 0.001)):
            draft.fill(key, round(max(rate * factor, _LOWEST_RATE), 5), points)
    else:
        # Steps of row-wise Adagrad grow with the square root of D, and the vector of a text with that of its tokens.
        # A wide residual layer would be unstable at the rate of a narrow layer.
        rate, long = _by_width(0.1, 0.5, width), tokens > _TUNED_TOKENS
        rate = round(rate * (_TUNED_TOKENS / tokens) ** 0.5, 4) if long else rate
        draft.fill("encoder.lr", rate, f"{why}, {tokens:.0f} tokens per text" if long else why)
        draft.fill("encoder.dense_lr", _by_width(0.0015, 1.0, width), why)


def settle_classifier(draft: Draft, searched: bool = False, why: str = "no search before the first table") -> None:
    """Choose the rate, which falls as D grows, the bias that a model without text would learn, and the initial scale.

    Vectors that are `searched` from the first step on start small, other vectors at zero; `why`: the reason.
    """
    statistics, width = draft.statistics, draft.width
    draft.fill("classifier.lr", _by_width(0.2, 0.5, width), f"encoder.dimension = {width}")
    each = f"{statistics.prior * statistics.labels:.2f} of {statistics.labels:,} labels are positive per point"
    margin = draft["negatives.pool_margin"]  # the bias takes away what it adds to the scores of negatives
    bias = log_odds(statistics.prior) - (margin if isinstance(margin, int | float) else 0)
    draft.fill("classifier.initial_bias", round(bias, 2), f"the prior: {each}")
    draft.fill("classifier.initial_scale", _SMALL_INITIAL_SCALE if searched else 0.0, why)


def log_odds(share: float) -> float:
    """Return ln(share / (1 - share)); shares of 0 and 1 also give finite values."""
    share = min(max(share, 1e-12), 1 - 1e-12)
    return math.log(share / (1 - share))


def _by_width(rate: float, power: float, width: int) -> float:
    return max(round(rate * (_TUNED_DIMENSION / max(width, _LEAST_DIMENSION)) ** power, 4), _LOWEST_RATE)
