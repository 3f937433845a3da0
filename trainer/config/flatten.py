"""Nested options as one level of dotted keys."""

from collections.abc import Mapping
from typing import Any


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of `options` by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
