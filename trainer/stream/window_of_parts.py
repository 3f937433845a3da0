"""Windows of a version: the parts to train on, each a source dealt by its age."""

from collections.abc import Sequence
from typing import NamedTuple

from schemas.layout import source_of_part
from schemas.table import PartTable
from trainer.stream.source import Source

_LEAST = 1e-12  # weight: no row of any part that there is


class Replay(NamedTuple):
    """Parts that an earlier run was trained on, and how often an epoch deals their rows; others once."""

    trained: frozenset[str]
    times: float


def in_window(
    sources: list[Source], window: str | Sequence[str], half_life: float, replay: Replay | None = None
) -> list[Source]:
    """Return `sources` with the parts of the window in place of the queries, oldest first, each with its weight.

    A part of age a, counted in parts of the window from the newest on, is dealt 2 ** (-a / half_life) times an epoch,
    where there is a half-life; and `replay.times` as often where an earlier run had it, label texts too.
    Raises InputError where there is no such part.
    """
    if not window and not half_life and replay is None:
        return sources
    queries, *others = sources
    parts = queries.table.choose_parts(window)
    ages = range(len(parts) - 1, -1, -1)
    weights = [max(_LEAST, 0.5 ** (age / half_life)) if half_life else 1.0 for age in ages]
    dealt = [_source_of(queries, part, weight, replay) for part, weight in zip(parts, weights, strict=True)]
    for source in others:
        parts = list(source.table.parts) if replay else []
        dealt += [_source_of(source, part, source.weight, replay) for part in parts] or [source]
    return [source for source in dealt if source.rows] or dealt[:1]


def _source_of(source: Source, part: PartTable, weight: float, replay: Replay | None) -> Source:
    """Return the rows of one part as a source."""
    times = replay.times if replay and part.name in replay.trained else 1.0
    return Source(source_of_part(source.name, part.name), source.table.of_parts([part]), weight=weight * times)
