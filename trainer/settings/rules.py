"""Rules that derive an option from the data: each returns its value and the reason, for the terminal and config.toml.

They are shapes that held on the four data sets of docs/results.md. What a data set's words are like (the weight of
n-grams, dropout) no count tells: `extremis run auto` tries these.
"""

from collections.abc import Callable
from typing import NamedTuple

from trainer.settings.facts import Facts, log_odds


class Setting(NamedTuple):
    """Value of an option, and why."""

    value: int | float | str
    reason: str


Rule = Callable[[Facts], Setting]

_FEWEST_STEPS = 100  # of an epoch: fewer, larger batches leave small data untrained
_BATCHES = 32, 512
_POINTS = 600_000  # that a run passes over, with small data again and again
_EPOCHS = 6, 30
_FEW_POINTS = 100_000  # up to which a wide encoder costs little
_MANY_LABELS = 5_000_000  # from which rows of labels decide the cost (ASTRA's bottleneck)
_BUCKETS = 1 << 10, 1 << 21


def initial_bias(facts: Facts) -> Setting:
    """The log odds of a label: scores begin where one-vs-all would end without any text."""
    each = facts.prior * facts.labels
    return Setting(round(log_odds(facts.prior), 2), f"the prior: {each:.2f} of {facts.labels:,} labels a point")


def buckets(facts: Facts) -> Setting:
    """A bucket for each pair of tokens that comes in two texts: others teach nothing."""
    value = 1 << max(0, facts.ngrams - 1).bit_length()
    return Setting(min(max(value, _BUCKETS[0]), _BUCKETS[1]), f"{facts.ngrams:,} pairs of tokens come more than once")


def batch(facts: Facts) -> Setting:
    """The largest power of two that leaves an epoch enough steps."""
    value = 1 << max(0, (facts.points // _FEWEST_STEPS).bit_length() - 1)
    return Setting(min(max(value, _BATCHES[0]), _BATCHES[1]), f"{facts.points:,} training points")


def epochs(facts: Facts) -> Setting:
    """Passes that show about so many points in all."""
    value = min(max(round(_POINTS / facts.points), _EPOCHS[0]), _EPOCHS[1])
    return Setting(value, f"{facts.points:,} training points")


def dimension(facts: Facts) -> Setting:
    """D: narrow where there are many labels, wide where points are few."""
    if facts.labels > _MANY_LABELS:
        return Setting(64, f"{facts.labels:,} labels")
    return Setting(512 if facts.points <= _FEW_POINTS else 256, f"{facts.points:,} training points")


def hidden(facts: Facts) -> Setting:
    """Units of the residual layer, by the dimension."""
    value, reason = dimension(facts)
    return Setting(2 * int(value), reason)


RULES: dict[str, Rule] = {
    "classifier.initial_bias": initial_bias,
    "encoder.buckets": buckets,
    "encoder.dimension": dimension,
    "encoder.hidden": hidden,
    "order.batch": batch,
    "train.epochs": epochs,
}
