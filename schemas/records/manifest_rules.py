"""Rules that a manifest has to follow besides its form: its author may have sealed anything."""

from collections.abc import Mapping
from typing import Any, NamedTuple

MOST = 1 << 48  # of any count: more rows than there are


class _Number(NamedTuple):
    """Bounds of a parameter, and whether it may be absent."""

    least: int
    most: int = MOST
    optional: bool = True


# Parameters by the kind of table that a reader takes for whole numbers.
_NUMBERS: Mapping[str, Mapping[str, _Number]] = {
    "tokenizer": {"vocabulary": _Number(1, 1 << 32, optional=False), "max_tokens": _Number(1, 1 << 31)},
    "labels": {"training_points": _Number(0)},
    "data": {"features": _Number(0, 1 << 31), "labels": _Number(0)},
    "export": {
        "vocabulary": _Number(0, 1 << 32, optional=False),
        "features": _Number(0, 1 << 31, optional=False),
        "max_tokens": _Number(1, 1 << 31, optional=False),
        "dimension": _Number(1, 1 << 31, optional=False),
        "shortlist": _Number(1, 1 << 31),
        "step": _Number(0),
    },
    "fusion": {"shortlist": _Number(1, 1 << 31, optional=False)},
}
# Parameters that are sections of their own.
_SECTIONS: Mapping[str, tuple[str, ...]] = {"export": ("recipe",)}
_OF_ROWS = ("queries", "labels", "embeddings", "vectors", "negatives")  # kinds whose shards hold all rows


def fault(kind: str, rows: int, shards: int, group: int | None, parameters: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a manifest of `rows` in all, and `shards` in its shards; None: nothing."""
    if not 0 <= rows <= MOST or not 0 <= shards <= MOST:
        return f"it counts {max(rows, shards, key=abs):,} rows"
    if kind in _OF_ROWS and rows != shards:
        return f"it counts {rows:,} rows, and its shards {shards:,}"
    if group is not None and not 0 < group <= MOST:
        return f"row groups of {group} rows"
    for name, number in _NUMBERS.get(kind, {}).items():
        value = parameters.get(name)
        if value is None and number.optional:
            continue
        if type(value) is not int or not number.least <= value <= number.most:
            return f"its parameter {name!r} is {_shown(value)}, not a whole number from {number.least:,} on"
    for name in _SECTIONS.get(kind, ()):
        if not isinstance(parameters.get(name), Mapping):
            return f"its parameter {name!r} is {_shown(parameters.get(name))}, not a section"
    return None


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"
