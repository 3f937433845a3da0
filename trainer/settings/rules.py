"""Rules that derive an option from the data: each returns its value and the reason, for the terminal.

They are shapes that held on the four data sets of docs/results.md. What a data set's words are like (the weight of
n-grams, dropout) no count tells: `extremis run auto` tries these.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.negatives.index_kinds import MOST_FRESH
from trainer.settings.facts import Facts, log_odds

POOL = "negatives.pool"
SOURCE = "refresh.source"
SHARED_DRAWS, OWN_DRAWS = 3200, 400
# A draw of a shared pool stands for L / k_r labels at once. Above this, what a label learns from the few steps that
# meet it is mostly noise (WordNet: 31, and P@1 falls by 9), and pools of each query's own are the better buy.
MOST_WEIGHT = 8

_TOLD_APART = 0.005  # standard deviation of vectors that are random at first: nothing beside what a few steps teach

_FEWEST_STEPS = 80  # of an epoch: fewer, larger batches leave small data untrained
_BATCHES = 32, 512
_POINTS = 600_000  # that a run passes over, with small data again and again
_EPOCHS = 6, 30
_WIDE = 512  # the dimension that rates were tuned at
_SHORT = 25  # tokens of a text up to which rates need not fall; of 400, renee at D = 512 diverges at the full rate
_LOWEST_RATE = 1e-4  # a rate of 0 would be refused
_NARROW = 64  # below it rates grow no more: training would diverge
_FEW_POINTS = 100_000  # up to which a wide encoder costs little
_MANY_LABELS = 5_000_000  # from which rows of labels decide the cost (ASTRA's bottleneck)
_BUCKETS = 1 << 10, 1 << 21


class Setting(NamedTuple):
    """Value of an option, and why."""

    value: int | float | str
    reason: str


Rule = Callable[[Facts, Mapping[str, Any]], Setting]  # of the data, and of the options settled so far by dotted key


def pool(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """One pool for a batch while its draws weigh little, then one for each query (variance against cost)."""
    weight = facts.labels / SHARED_DRAWS
    if weight <= MOST_WEIGHT:
        return Setting("shared", f"a draw of {SHARED_DRAWS:,} stands for {weight:.1f} labels")
    return Setting("own", f"a draw of {SHARED_DRAWS:,} shared ones would stand for {weight:.1f} labels")


def random(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """k_r, of the batch or of each query."""
    own = settled[POOL] == "own"
    return Setting(OWN_DRAWS if own else SHARED_DRAWS, f"negatives.pool = {settled[POOL]}")


def hard(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """k_h: the fewer random ones a query has, the more."""
    value = {"own": 100, "all": 0}.get(settled[POOL], 40)
    return Setting(value, f"negatives.pool = {settled[POOL]}")


def warmup(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """As many random ones before the first table as there are of both kinds after it."""
    value = int(random(facts, settled).value) + int(hard(facts, settled).value)
    return Setting(value, f"negatives.pool = {settled[POOL]}")


def refresh_source(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Fresh ones from the first step where hard negatives carry the loss, and the trainer can search all labels."""
    if settled[POOL] == "own" and facts.labels <= MOST_FRESH:
        return Setting("in-trainer", f"negatives.pool = own, {facts.labels:,} labels")
    return Setting("table", f"negatives.pool = {settled[POOL]}, {facts.labels:,} labels")


def refresh_start(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """tau_s: as early as there can be a table where hard negatives carry the loss."""
    if settled[SOURCE] == "in-trainer":
        return Setting(0, f"{SOURCE} = in-trainer")
    return Setting(2 if settled[POOL] == "own" else 3, f"negatives.pool = {settled[POOL]}")


def refresh_every(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """tau_r: fresh in each epoch where hard negatives carry the loss."""
    return Setting(1 if settled[POOL] == "own" else 3, f"negatives.pool = {settled[POOL]}")


def initial_scale(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Length that tells vectors apart where they are searched before they have learned; else they begin at zero."""
    return Setting(_TOLD_APART if settled[SOURCE] == "in-trainer" else 0.0, f"{SOURCE} = {settled[SOURCE]}")


def initial_bias(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """The log odds of a label: scores begin where one-vs-all would end without any text."""
    each = facts.prior * facts.labels
    return Setting(round(log_odds(facts.prior), 2), f"the prior: {each:.2f} of {facts.labels:,} labels a point")


def buckets(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """A bucket for each pair of tokens that comes in two texts: others teach nothing."""
    value = 1 << max(0, facts.ngrams - 1).bit_length()
    return Setting(min(max(value, _BUCKETS[0]), _BUCKETS[1]), f"{facts.ngrams:,} pairs of tokens come more than once")


def batch(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """The largest power of two that leaves an epoch enough steps."""
    value = 1 << max(0, (facts.points // _FEWEST_STEPS).bit_length() - 1)
    return Setting(min(max(value, _BATCHES[0]), _BATCHES[1]), f"{facts.points:,} training points")


def epochs(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Passes that show about so many points in all."""
    value = min(max(round(_POINTS / facts.points), _EPOCHS[0]), _EPOCHS[1])
    return Setting(value, f"{facts.points:,} training points")


def dimension(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """D: narrow where there are many labels, wide where points are few."""
    if facts.labels > _MANY_LABELS:
        return Setting(64, f"{facts.labels:,} labels")
    return Setting(_WIDE if facts.points <= _FEW_POINTS else 256, f"{facts.points:,} training points")


def hidden(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Units of the residual layer, by the dimension."""
    width = int(settled["encoder.dimension"])
    return Setting(2 * width, f"encoder.dimension = {width}")


def encoder_rate(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Row-wise Adagrad's step grows with the root of D, and that of a text's vector with the root of its tokens."""
    by_width = _by_width(0.1, 0.5, settled)
    if facts.tokens <= _SHORT:
        return by_width
    rate = round(float(by_width.value) * (_SHORT / facts.tokens) ** 0.5, 4)
    return Setting(rate, f"{by_width.reason}, {facts.tokens:.0f} tokens a text")


def classifier_rate(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """Row-wise Adagrad's step grows with the root of D."""
    return _by_width(0.2, 0.5, settled)


def dense_rate(facts: Facts, settled: Mapping[str, Any]) -> Setting:
    """A wide residual layer is unstable at the rate of a narrow one."""
    return _by_width(0.0015, 1.0, settled)


def _by_width(rate: float, power: float, settled: Mapping[str, Any]) -> Setting:
    width = int(settled["encoder.dimension"])
    value = max(round(rate * (_WIDE / max(width, _NARROW)) ** power, 4), _LOWEST_RATE)
    return Setting(value, f"encoder.dimension = {width}")


# In the order of derivation: a rule knows what comes before it.
RULES: dict[str, Rule] = {
    "order.batch": batch,
    "train.epochs": epochs,
    "encoder.dimension": dimension,
    "encoder.hidden": hidden,
    "encoder.lr": encoder_rate,
    "encoder.dense_lr": dense_rate,
    "classifier.lr": classifier_rate,
    "encoder.buckets": buckets,
    "classifier.initial_bias": initial_bias,
    POOL: pool,
    "negatives.random": random,
    "negatives.hard": hard,
    "negatives.warmup": warmup,
    SOURCE: refresh_source,
    "refresh.start": refresh_start,
    "refresh.every": refresh_every,
    "classifier.initial_scale": initial_scale,
}
