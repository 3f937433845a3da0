"""The type of options that may be "auto" in a recipe, and shared rules that choose these options from the data.

The rules worked well on the four data sets in docs/results.md. They use only counts, which do not describe the words of
a data set, so `extremis run auto` tries several values for the weight of n-grams and for dropout.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.options import Options
from trainer.negatives.base import MOST_FRESH

AUTO = ("auto", "prior")  # values in a recipe that mean a setting from the data
POOL, SOURCE = "negatives.pool", "refresh.source"
_LEAST_SHARE = 1e-12
_SMALL_INITIAL_SCALE = (
    0.005  # standard deviation of random initial vectors: small compared with the updates of a few steps
)
_FEWEST_STEPS = 80  # steps per epoch: with larger batches, training on small data would have too few steps
_BATCHES = 32, 512
_POINTS = 600_000  # training points of a run, over all epochs; small data has more epochs
_EPOCHS = 6, 8
_TUNED_DIMENSION = 512  # dimension at which rates were tuned
_TUNED_TOKENS = 25  # tokens per text up to which the full rate works; with 400 tokens and D = 512, renee diverges
_LOWEST_RATE = 1e-4  # validation refuses a rate of 0
_LEAST_DIMENSION = 64  # rates do not grow below this dimension: training would diverge
_MANY_LABELS = 5_000_000  # above this number of labels, label vectors dominate the cost (ASTRA's bottleneck)
_BUCKETS = 1 << 10, 1 << 21
_ADAM_RATES = 0.005, 0.001  # Adam's rates for tokens and for layers
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


class Setting(NamedTuple):
    """Value of an option, and the reason for the value."""

    value: int | float | str
    reason: str


# A function of the data's statistics and of the recipe's other options by dotted key, which may also come from rules.
Rule = Callable[[DataStatistics, Mapping[str, Any]], Setting]


class FromData(NamedTuple):
    """Type of an option that may be "auto": `Annotated[int, FromData(rule)]`.

    `placeholder`: the value used when a recipe is checked without data; None: the option's default.
    """

    rule: Rule
    placeholder: int | None = None


def options_from_data(section: type[Options]) -> Iterator[tuple[str, FromData]]:
    """Yield the options of `section` that may be "auto"."""
    for name, field in section.model_fields.items():
        yield from ((name, mark) for mark in field.metadata if isinstance(mark, FromData))


def batch(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Choose the largest power of two that gives an epoch enough steps."""
    value = 1 << max(0, (statistics.points // _FEWEST_STEPS).bit_length() - 1)
    return Setting(min(max(value, _BATCHES[0]), _BATCHES[1]), statistics.described_points)


def epochs(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Choose the number of epochs so that a run trains on about _POINTS points in total."""
    value = min(max(round(_POINTS / statistics.points), _EPOCHS[0]), _EPOCHS[1])
    return Setting(value, statistics.described_points)


def dimension(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Choose D, smaller for many labels. On Tate, doubling D doubles the time and raises the fused P@1 by 0.1."""
    return Setting(64 if statistics.labels > _MANY_LABELS else 256, f"{statistics.labels:,} labels")


def hidden(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Choose the number of units in the residual layer from the dimension."""
    width = int(options["encoder.dimension"])
    return Setting(2 * width, f"encoder.dimension = {width}")


def buckets(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Choose one bucket for each pair of tokens that occurs in at least two texts; other pairs do not help."""
    value = 1 << max(0, statistics.ngrams - 1).bit_length()
    return Setting(
        min(max(value, _BUCKETS[0]), _BUCKETS[1]), f"{statistics.ngrams:,} pairs of tokens occur more than once"
    )


def encoder_rate(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Lower the rate as D grows, because the steps of row-wise Adagrad grow with the square root of D.

    Lower the rate for long texts too, because the vector of a text grows with the square root of its number of tokens.
    """
    if options.get("encoder.optimizer", "adam") == "adam":
        return _by_points(_ADAM_RATES[0], statistics)
    by_width = _by_width(0.1, 0.5, options)
    if statistics.tokens <= _TUNED_TOKENS:
        return by_width
    rate = round(float(by_width.value) * (_TUNED_TOKENS / statistics.tokens) ** 0.5, 4)
    return Setting(rate, f"{by_width.reason}, {statistics.tokens:.0f} tokens per text")


def dense_rate(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Lower the rate for a wide residual layer, which would be unstable at the rate of a narrow layer."""
    if options.get("encoder.optimizer", "adam") == "adam":
        return _by_points(_ADAM_RATES[1], statistics)
    return _by_width(0.0015, 1.0, options)


def classifier_rate(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Lower the rate as D grows, because the steps of row-wise Adagrad grow with the square root of D."""
    return _by_width(0.2, 0.5, options)


def initial_bias(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Return the log odds that a label is positive: the bias that a one-vs-all model would learn without text."""
    each = statistics.prior * statistics.labels
    return Setting(
        round(log_odds(statistics.prior), 2),
        f"the prior: {each:.2f} of {statistics.labels:,} labels are positive per point",
    )


def refresh_source(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Search in the trainer if the loss comes mostly from hard negatives and there are few labels; else use tables."""
    pool = options.get(POOL, "all")
    source = "in-trainer" if pool == "own" and statistics.labels <= MOST_FRESH else "table"
    return Setting(source, f"{POOL} = {pool}, {statistics.labels:,} labels")


def initial_scale(statistics: DataStatistics, options: Mapping[str, Any]) -> Setting:
    """Choose a small initial scale for vectors that are searched before training; other vectors start at zero."""
    source = options.get(SOURCE) or refresh_source(statistics, options).value
    return Setting(_SMALL_INITIAL_SCALE if source == "in-trainer" else 0.0, f"{SOURCE} = {source}")


def log_odds(share: float) -> float:
    """Return ln(share / (1 - share)); shares of 0 and 1 also give finite values."""
    share = min(max(share, _LEAST_SHARE), 1 - _LEAST_SHARE)
    return math.log(share / (1 - share))


def _by_points(rate: float, statistics: DataStatistics) -> Setting:
    """Return Adam's rate, which is lower for few training points, because the model would overfit at the full rate."""
    value = max(rate * min(1.0, (statistics.points / _ADAM_POINTS) ** 0.5), _LOWEST_RATE)
    return Setting(round(value, 5), statistics.described_points)


def _by_width(rate: float, power: float, options: Mapping[str, Any]) -> Setting:
    width = int(options["encoder.dimension"])
    value = max(round(rate * (_TUNED_DIMENSION / max(width, _LEAST_DIMENSION)) ** power, 4), _LOWEST_RATE)
    return Setting(value, f"encoder.dimension = {width}")
