"""Options that a recipe leaves to the data, as "auto": the type of such an option, and rules that methods share.

Rules are shapes that held on the four data sets of docs/results.md. No count describes the words of a data set (weight
of n-grams, dropout): `extremis run auto` tries these.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.options import Options
from trainer.negatives.base import MOST_FRESH

AUTO = ("auto", "prior")  # how a recipe says that the data decide
POOL, SOURCE = "negatives.pool", "refresh.source"
_RAREST = 1e-12
_TOLD_APART = 0.005  # standard deviation of vectors that are random at first: nothing beside what a few steps teach
_FEWEST_STEPS = 80  # of an epoch: fewer, larger batches leave small data untrained
_BATCHES = 32, 512
_POINTS = 600_000  # that a run passes over, with small data again and again
_EPOCHS = 6, 8
_WIDE = 512  # the dimension that rates were tuned at
_SHORT = 25  # tokens of a text up to which rates need not fall; of 400, renee at D = 512 diverges at the full rate
_LOWEST_RATE = 1e-4  # a rate of 0 would be refused
_NARROW = 64  # below it rates grow no more: training would diverge
_MANY_LABELS = 5_000_000  # from which rows of labels decide the cost (ASTRA's bottleneck)
_BUCKETS = 1 << 10, 1 << 21
_DUAL_RATES = 0.005, 0.001  # Adam's, of tokens and of layers
_DUAL_POINTS = 80_000  # that they were tuned on


@dataclass(frozen=True)
class Facts:
    """Figures of DATA as a run sees it.

    `queries`: N, rows to train on. `labels`: L. `pairs`: number of (query, label) pairs. `label_texts`: number of
    labels whose texts are also training points. `ngrams`: distinct n-grams of two tokens that come in two or more rows,
    0 without tokens. `tokens`: mean tokens of a query. `median_frequency`: training points of the median label that has
    any.
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
        """Training points: queries, and texts of labels."""
        return self.queries + self.label_texts

    @property
    def prior(self) -> float:
        """Mean share of the labels that are right for a training point."""
        return (self.pairs + self.label_texts) / max(1, self.points * self.labels)


class Setting(NamedTuple):
    """Value of an option, and why."""

    value: int | float | str
    reason: str


# Of the data, and of the recipe's other options by dotted key, derived in their turn.
Rule = Callable[[Facts, Mapping[str, Any]], Setting]


class FromData(NamedTuple):
    """Type of an option that may be "auto": `Annotated[int, FromData(rule)]`.

    `meanwhile` replaces it while a recipe is checked without data; None: its default.
    """

    rule: Rule
    meanwhile: int | None = None


def options_from_data(section: type[Options]) -> Iterator[tuple[str, FromData]]:
    """Yield the options of `section` that may be "auto"."""
    for name, field in section.model_fields.items():
        yield from ((name, mark) for mark in field.metadata if isinstance(mark, FromData))


def batch(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """The largest power of two that leaves an epoch enough steps."""
    value = 1 << max(0, (facts.points // _FEWEST_STEPS).bit_length() - 1)
    return Setting(min(max(value, _BATCHES[0]), _BATCHES[1]), f"{facts.points:,} training points")


def epochs(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Number of epochs for about so many points in all."""
    value = min(max(round(_POINTS / facts.points), _EPOCHS[0]), _EPOCHS[1])
    return Setting(value, f"{facts.points:,} training points")


def dimension(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """D: narrow if there are many labels. Twice as wide takes twice as long, for 0.1 P@1 of Tate's fused scores."""
    return Setting(64 if facts.labels > _MANY_LABELS else 256, f"{facts.labels:,} labels")


def hidden(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Units of the residual layer, by the dimension."""
    width = int(settled["encoder.dimension"])
    return Setting(2 * width, f"encoder.dimension = {width}")


def buckets(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """A bucket for each pair of tokens that comes in two texts: others teach nothing."""
    value = 1 << max(0, facts.ngrams - 1).bit_length()
    return Setting(min(max(value, _BUCKETS[0]), _BUCKETS[1]), f"{facts.ngrams:,} pairs of tokens come more than once")


def encoder_rate(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Row-wise Adagrad's step grows with the root of D, and a text's vector with the root of its tokens."""
    if settled.get("encoder.optimizer", "adam") == "adam":
        return _by_points(_DUAL_RATES[0], facts)
    by_width = _by_width(0.1, 0.5, settled)
    if facts.tokens <= _SHORT:
        return by_width
    rate = round(float(by_width.value) * (_SHORT / facts.tokens) ** 0.5, 4)
    return Setting(rate, f"{by_width.reason}, {facts.tokens:.0f} tokens per text")


def dense_rate(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """A wide residual layer is unstable at the rate of a narrow one."""
    if settled.get("encoder.optimizer", "adam") == "adam":
        return _by_points(_DUAL_RATES[1], facts)
    return _by_width(0.0015, 1.0, settled)


def classifier_rate(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Row-wise Adagrad's step grows with the root of D."""
    return _by_width(0.2, 0.5, settled)


def initial_bias(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """The log odds of a label: initial scores equal those of one-vs-all without any text."""
    each = facts.prior * facts.labels
    return Setting(round(log_odds(facts.prior), 2), f"the prior: {each:.2f} of {facts.labels:,} labels per point")


def refresh_source(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Fresh negatives from the first step if hard negatives carry the loss and the trainer can search all labels."""
    pool = settled.get(POOL, "all")
    source = "in-trainer" if pool == "own" and facts.labels <= MOST_FRESH else "table"
    return Setting(source, f"{POOL} = {pool}, {facts.labels:,} labels")


def initial_scale(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Initial length for vectors that are searched before they have learned; else they begin at zero."""
    source = settled.get(SOURCE) or refresh_source(facts, settled).value
    return Setting(_TOLD_APART if source == "in-trainer" else 0.0, f"{SOURCE} = {source}")


def log_odds(share: float) -> float:
    """Return ln(share / (1 - share)), finite for shares of 0 and 1 too."""
    share = min(max(share, _RAREST), 1 - _RAREST)
    return math.log(share / (1 - share))


def _by_points(rate: float, facts: Facts) -> Setting:
    """Return Adam's rate, which is as far from zero after few steps as after many: few points are learned by heart."""
    value = max(rate * min(1.0, (facts.points / _DUAL_POINTS) ** 0.5), _LOWEST_RATE)
    return Setting(round(value, 5), f"{facts.points:,} training points")


def _by_width(rate: float, power: float, settled: Mapping[str, Any]) -> Setting:
    width = int(settled["encoder.dimension"])
    value = max(round(rate * (_WIDE / max(width, _NARROW)) ** power, 4), _LOWEST_RATE)
    return Setting(value, f"encoder.dimension = {width}")
