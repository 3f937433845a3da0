"""Settings of a run that goes on from one on an earlier version: its model's, and fewer epochs at lower rates."""

import math
from collections.abc import Iterable
from typing import Any

from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from schemas.versions.version import parts_of
from trainer.config import Recipe
from trainer.model import find_earlier
from trainer.settings.rules import Setting

_MODEL = ("encoder", "head")  # sections that shape the model
_RATES = ("encoder.lr", "encoder.dense_lr", "classifier.lr")
LEAST, SHARE, RATE = 0.1, 1.0, 0.5  # of the epochs: at least, and per share of rows that are new; of the rates


def inherited(data: str, run: str, key: str) -> Setting | None:
    """Return what an option left open is in RUN1 where it shapes the model; None: it is not such a one."""
    section, _, option = key.partition(".")
    if section not in _MODEL or key in _RATES:
        return None
    recipe, _, _ = find_earlier(DataLayout(data), RunLayout(run))
    return Setting(recipe.model_dump()[section].get(option), f"that of {run}")


def share_of_new(data: str, run: str, split: str) -> float:
    """Return the share of a split's rows that are of parts which RUN1 had not. Raises InputError, TableError."""
    _, _, parts = find_earlier(DataLayout(data), RunLayout(run))
    table = open_manifest(DataLayout(data).queries(split), "queries")
    new = sum(part.rows for part in parts_of(table) if part.name in parts)
    return new / max(1, table.rows)


def settings_of_refresh(recipe: Recipe, data: str, overrides: Iterable[str]) -> dict[str, Setting]:
    """Return epochs and rates for what is new, of those options that `overrides` do not state, by dotted key."""
    run = recipe.train.start_from
    stated = {override.partition("=")[0].strip() for override in overrides}
    share = share_of_new(data, run, recipe.data.split)
    body: dict[str, Any] = recipe.model_dump()
    settings: dict[str, Setting] = {}
    epochs = max(1, math.ceil(recipe.train.epochs * min(1.0, LEAST + SHARE * share)))
    reason = f"{share:.1%} of the rows are new since {run}"
    settings["train.epochs"] = Setting(epochs, f"{reason}; from nothing {recipe.train.epochs}")
    for key in _RATES:
        section, _, option = key.partition(".")
        rate = body[section].get(option)
        if isinstance(rate, int | float) and rate:
            settings[key] = Setting(round(rate * RATE, 6), f"{RATE:g} of the rate from nothing, {rate:g}")
    return {key: setting for key, setting in settings.items() if key not in stated}
