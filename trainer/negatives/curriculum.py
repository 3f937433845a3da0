"""How many hard and random negatives a query gets in which epoch."""

from typing import NamedTuple

from trainer.config import Recipe


class Mixture(NamedTuple):
    """k_h and k_r of an epoch that has hard negatives."""

    hard: int
    random: int


def mixtures(recipe: Recipe) -> tuple[Mixture, ...]:
    """Of every epoch of the run: with `negatives.curriculum` from random ones alone to `hard` and `random`.

    Linear in the epochs from `refresh.start` on (ASTRA, Table 5, "curriculum"): the first has a step of the way, the
    last all of it. Without it every epoch has the same.
    """
    options, epochs = recipe.negatives, recipe.train.epochs
    whole = Mixture(options.hard, options.random)
    if not options.curriculum:
        return (whole,) * epochs
    before = options.warmup or options.random + options.hard
    steps = max(1, epochs - recipe.refresh.start)
    found = []
    for epoch in range(epochs):
        share = min(1.0, max(0, epoch - recipe.refresh.start + 1) / steps)
        hard = max(1, round(share * options.hard)) if share else 0
        found.append(Mixture(hard, round(before + share * (options.random - before))))
    return tuple(found)
