"""Numbers of hard and random negatives of a query by epoch (ASTRA, Table 5, "curriculum")."""

from typing import NamedTuple

from trainer.negatives.section import Negatives


class Mixture(NamedTuple):
    """k_h and k_r of an epoch that has hard negatives."""

    hard: int
    random: int


def mixtures(options: Negatives, epochs: int, start: int) -> tuple[Mixture, ...]:
    """Return the mixture of every epoch; without `negatives.curriculum` all have the same.

    With it, linear in the epochs from `start` on, from random negatives alone to `hard` and `random`: the first has a
    step of the way, the last all of it.
    """
    if not options.curriculum:
        return (Mixture(options.hard, options.random),) * epochs
    before = options.warmup or options.random + options.hard
    steps = max(1, epochs - start)
    course = []
    for epoch in range(epochs):
        share = min(1.0, max(0, epoch - start + 1) / steps)
        hard = max(1, round(share * options.hard)) if share else 0
        course.append(Mixture(hard, round(before + share * (options.random - before))))
    return tuple(course)
