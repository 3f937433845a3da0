"""Settings of a run on a version of data: the validation rows, and those of a refresh of an earlier run."""

import glob
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from trainer.methods.astra import Astra
from trainer.methods.recipe import Recipe
from trainer.methods.rules import Setting
from trainer.model import find_earlier

SPLIT = "val"  # that is scored
_MODEL = ("encoder", "head")  # sections that shape the model
RATES = ("encoder.lr", "encoder.dense_lr", "classifier.lr")
LEAST, SHARE = 0.06, 1.0  # of the time from nothing: at least, and per share of rows that are new
PASSES = 0.5  # over new rows, of those from nothing
RATE = 0.5  # of the rates from nothing


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
        """Return RUN1's values of the options `keys` that shape the model, by dotted key."""
        settings = {}
        for key in keys:
            section, _, option = key.partition(".")
            if section in _MODEL and key not in RATES:
                settings[key] = Setting(self.options.get(section, {}).get(option), f"that of {self.url}")
        return settings

    def share_of_new(self, data: str, split: str) -> float:
        """Return the share of a split's rows that are of parts which RUN1 had not. Raises TableError."""
        table = Table.open(DataLayout(data).queries(split), "queries")
        new = sum(part.rows for part in table.parts if part.name in self.parts)
        return new / max(1, table.rows)


def settings_of_refresh(recipe: Recipe, data: str, earlier: EarlierRun, overrides: Iterable[str]) -> dict[str, Setting]:
    """Return the settings for new data of the options that `overrides` do not state, by dotted key."""
    stated = {override.partition("=")[0].strip() for override in overrides}
    share = earlier.share_of_new(data, recipe.data.split)
    settings = {**_negatives(recipe, stated), **_rates(recipe), **_epochs(recipe, earlier.url, share, stated)}
    return {key: setting for key, setting in settings.items() if key not in stated}


def _epochs(recipe: Recipe, run: str, share: float, stated: set[str]) -> dict[str, Setting]:
    """Show new rows half as often as from nothing does, and old ones as often as the rest of the time allows.

    The time is that for LEAST + SHARE * `share` of the epochs.
    """
    epochs, time = recipe.train.epochs, min(1.0, LEAST + SHARE * share)
    reason = f"{share:.1%} of the rows are new since {run}"
    times = (time / PASSES - share) / (1 - share) if share < 1 else 1.0
    rows = recipe.data
    is_bound = rows.by_parts or rows.mix or rows.holdout or rows.share < 1 or _needs_whole_epochs(recipe, stated)
    if times < 1 and not is_bound and not any(key in stated for key in ("train.epochs", "data.replay")):
        return {
            "train.epochs": Setting(math.ceil(PASSES * epochs), f"{reason}; a run from scratch has {epochs}"),
            "data.replay": Setting(round(times, 3), f"so that it takes {time:.0%} of the time of a run from scratch"),
        }
    return {"train.epochs": Setting(max(1, math.ceil(time * epochs)), f"{reason}; a run from scratch has {epochs}")}


def _rates(recipe: Recipe) -> dict[str, Setting]:
    """Lower the rates: those of a run from scratch undo what was learned, with the optimizers' state or without."""
    body: dict[str, Any] = recipe.model_dump()
    settings = {}
    for key in RATES:
        section, _, option = key.partition(".")
        rate = body.get(section, {}).get(option)
        if isinstance(rate, int | float) and rate:
            settings[key] = Setting(round(rate * RATE, 6), f"{RATE:g} of the rate of a run from scratch, {rate:g}")
    return settings


def _negatives(recipe: Recipe, stated: set[str]) -> dict[str, Setting]:
    """Take hard negatives from the first step on: by present vectors, or by one table of RUN1's vectors."""
    reason = "the vectors are already trained: hard negatives from the first step on"
    begun = {"refresh.start": Setting(0, reason)}
    if _can_search(recipe) and "refresh.source" not in stated:
        return {"refresh.source": Setting("in-trainer", reason), **begun}
    if recipe.tables is None or recipe.clusters or "refresh.start" in stated:
        return {}
    one = Setting(recipe.train.epochs, "one table, of all rows, from the earlier run")
    return {**begun, "refresh.every": one, "refresh.stale": Setting("wait", "it is mined before the first step")}


def _can_search(recipe: Recipe) -> bool:
    """Tell whether hard negatives can come from an index of the vectors within the trainer."""
    return isinstance(recipe, Astra) and bool(recipe.negatives.hard) and _searched(recipe) == "classifier"


def _searched(recipe: Recipe) -> str:
    """Return which vectors the tables of a run are mined from."""
    return str(recipe.table_facts.get("by", "classifier")) if recipe.tables else "classifier"


def _needs_whole_epochs(recipe: Recipe, stated: set[str]) -> bool:
    """Return whether tables need whole epochs or sources; or whether unseen rows are forgotten.

    With old rows dealt less often a dual encoder lost 1.5 P@5 on EUR-Lex: it has no vector that keeps a label.
    """
    if recipe.encodes_labels:
        return True
    if recipe.tables is None or (_can_search(recipe) and "refresh.source" not in stated):
        return False
    return recipe.clusters or _searched(recipe) != "classifier" or bool(stated & {"refresh.start", "refresh.every"})


def settings_of_validation(recipe: Recipe, data: str, stated: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the split and the part to score of a version, if the body `stated` of a recipe names none.

    It is the newest part of `val` that has rows. Raises TableError.
    """
    if "split" in stated.get("validation", {}) or recipe.data.holdout:
        return {}
    layout = DataLayout(data)
    if f"queries/{SPLIT}" not in Table.open(data, "data").parents:
        return {}
    parts = [part for part in Table.open(layout.queries(SPLIT), "queries").parts if part.rows]
    if not parts:
        return {}
    newest = parts[-1].name
    return {
        "validation.split": Setting(SPLIT, f"part {newest} is the newest part of this version"),
        "validation.parts": Setting(glob.escape(newest), "the newest that has rows"),
    }
