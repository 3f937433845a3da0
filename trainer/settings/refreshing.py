"""Settings of a run that goes on from one on an earlier version: its model's, and fewer epochs at lower rates."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class EarlierRun:
    """RUN1 at `url`: its recipe's options by section, and the `parts` that DATA has had since."""

    url: str
    options: Mapping[str, Any]
    parts: list[str]

    @classmethod
    def open(cls, data: str, url: str) -> "EarlierRun":
        """Open it. Raises InputError: no run, or on other data than DATA or a version before; TableError."""
        recipe, _, parts = find_earlier(DataLayout(data), RunLayout(url))
        return cls(url, recipe.model_dump(), parts)

    def settings_of_model(self, keys: Iterable[str]) -> dict[str, Setting]:
        """Return what those of the options `keys` that shape the model are in RUN1, by dotted key."""
        settings = {}
        for key in keys:
            section, _, option = key.partition(".")
            if section in _MODEL and key not in _RATES:
                settings[key] = Setting(self.options[section].get(option), f"that of {self.url}")
        return settings

    def share_of_new(self, data: str, split: str) -> float:
        """Return the share of a split's rows that are of parts which RUN1 had not. Raises TableError."""
        table = open_manifest(DataLayout(data).queries(split), "queries")
        new = sum(part.rows for part in parts_of(table) if part.name in self.parts)
        return new / max(1, table.rows)


def settings_of_refresh(recipe: Recipe, data: str, earlier: EarlierRun, overrides: Iterable[str]) -> dict[str, Setting]:
    """Return epochs and rates for what is new, of those options that `overrides` do not state, by dotted key."""
    run = earlier.url
    stated = {override.partition("=")[0].strip() for override in overrides}
    share = earlier.share_of_new(data, recipe.data.split)
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
