"""Settings of a run on a version of data: its validation rows, and the settings for a refresh of an earlier run."""

import glob
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from trainer.methods.astra import Astra
from trainer.methods.recipe import Recipe
from trainer.model import find_earlier

Setting = tuple[Any, str]  # a value, and the reason for it
SPLIT = "val"  # the split that is scored
_MODEL = ("encoder", "head")  # sections that shape the model
RATES = ("encoder.lr", "encoder.dense_lr", "classifier.lr")
# Fraction of the time of a run from scratch: minimum, and per fraction of new rows.
MIN_TIME, TIME_PER_NEW_ROWS = 0.06, 1.0
NEW_ROW_PASSES = 0.5  # passes over new rows, as a fraction of the passes from scratch
RATE_FACTOR = 0.5  # fraction of the rates from scratch
FEW_PASSES = 2  # with fewer passes over old rows, label vectors do not recover from first steps without optimizer state


@dataclass(frozen=True)
class EarlierRun:
    """The earlier run RUN1 at `url`: its recipe's options by section, and the `parts` added to DATA since then.

    `holdout`: the fraction of rows that has not trained RUN1, nor the runs before RUN1.
    """

    url: str
    options: Mapping[str, Any]
    parts: list[str]
    holdout: float

    @classmethod
    def open(cls, data: str, url: str) -> "EarlierRun":
        """Open RUN1.

        Raises InputError if there is no run, or if its data is neither DATA nor an ancestor of DATA; TableError.
        """
        recipe, _, parts = find_earlier(DataLayout(data), RunLayout(url))
        return cls(url, recipe.model_dump(), parts, recipe.data.holdout)

    def settings_of_model(self, keys: Iterable[str]) -> dict[str, Setting]:
        """Return RUN1's values of those options in `keys` that define the model, by dotted key."""
        settings = {}
        for key in keys:
            section, _, option = key.partition(".")
            if section in _MODEL and key not in RATES:
                settings[key] = (self.options.get(section, {}).get(option), f"as in {self.url}")
        return settings

    def settings_of_holdout(self, body: Mapping[str, Any]) -> dict[str, Setting]:
        """Return RUN1's `data.holdout`, unless the `body` of a recipe sets this option or mixes splits."""
        stated = body.get("data", {})
        if not self.holdout or "holdout" in stated or stated.get("mix"):
            return {}
        return {"data.holdout": (self.holdout, f"as in {self.url}")}

    def require_unseen(self, recipe: Recipe) -> None:
        """Refuse a recipe that holds out rows that RUN1 was trained on. Raises InputError."""
        rows = recipe.data
        most = self.holdout if rows.split == self.options["data"]["split"] else 0.0
        if rows.holdout > most:
            raise InputError(
                f"data.holdout = {rows.holdout:g}: {self.url} was trained on rows that this would hold out, because it "
                f"held out {most:g} of the rows of {rows.split}. Set data.holdout to at most {most:g}, or leave out "
                "--from."
            )

    def share_of_new(self, data: str, split: str) -> float:
        """Return the fraction of a split's rows that are in parts that RUN1 did not have. Raises TableError."""
        table = Table.open(DataLayout(data).queries(split), "queries")
        new = sum(part.rows for part in table.parts if part.name in self.parts)
        return new / max(1, table.rows)


def settings_of_refresh(recipe: Recipe, data: str, earlier: EarlierRun, overrides: Iterable[str]) -> dict[str, Setting]:
    """Return the settings for new data, by dotted key, without options that `overrides` set."""
    stated = {override.partition("=")[0].strip() for override in overrides}
    share = earlier.share_of_new(data, recipe.data.split)
    settings = {**_negatives(recipe, stated), **_rates(recipe), **_epochs(recipe, earlier.url, share, stated)}
    return {key: setting for key, setting in settings.items() if key not in stated}


def _epochs(recipe: Recipe, run: str, share: float, stated: set[str]) -> dict[str, Setting]:
    """Train on new rows half as often as from scratch, and on old rows as often as the rest of the time allows.

    The total time is the time of a run from scratch multiplied by MIN_TIME + TIME_PER_NEW_ROWS * `share`. With
    few passes over old rows, optimizers keep their state: without state, a label vector's first step is large. Dual
    encoders, which have no such vectors, did worse with state.
    """
    whole, time = recipe.train.epochs, min(1.0, MIN_TIME + TIME_PER_NEW_ROWS * share)
    epochs, replay, settings = max(1, math.ceil(time * whole)), recipe.data.replay, dict[str, Setting]()
    times = (time / NEW_ROW_PASSES - share) / (1 - share) if share < 1 else 1.0
    rows = recipe.data
    is_bound = rows.by_parts or rows.mix or _needs_whole_epochs(recipe, stated)
    if times < 1 and not is_bound and not any(key in stated for key in ("train.epochs", "data.replay")):
        epochs, replay = math.ceil(NEW_ROW_PASSES * whole), round(times, 3)
        settings["data.replay"] = (replay, f"for {time:.0%} of the time of a run from scratch")
    if not recipe.encodes_labels:
        passes = replay * (whole if "train.epochs" in stated else epochs)
        settings["train.start_optimizer"] = (passes < FEW_PASSES, f"{passes:.1f} passes over old rows")
    reason = f"{share:.1%} of the rows were added since {run}; a run from scratch has {whole}"
    return {"train.epochs": (epochs, reason), **settings}


def _rates(recipe: Recipe) -> dict[str, Setting]:
    """Lower the rates: the rates of a run from scratch would undo earlier training, with or without optimizer state."""
    body: dict[str, Any] = recipe.model_dump()
    settings = {}
    for key in RATES:
        section, _, option = key.partition(".")
        rate = body.get(section, {}).get(option)
        if isinstance(rate, int | float) and rate:
            settings[key] = (
                round(rate * RATE_FACTOR, 6),
                f"{RATE_FACTOR:g} times the rate of a run from scratch, {rate:g}",
            )
    return settings


def _negatives(recipe: Recipe, stated: set[str]) -> dict[str, Setting]:
    """Use hard negatives from the first step on, from current vectors or from one table mined from RUN1's vectors."""
    reason = "the vectors are already trained: hard negatives from the first step on"
    begun = {"refresh.start": (0, reason)}
    if _can_search(recipe) and "refresh.source" not in stated:
        return {"refresh.source": ("in-trainer", reason), **begun}
    if recipe.tables is None or recipe.is_clustered or "refresh.start" in stated:
        return {}
    one = (recipe.train.epochs, "one table, of all rows, from the earlier run")
    return {**begun, "refresh.every": one, "refresh.stale": ("wait", "the table is mined before the first step")}


def _can_search(recipe: Recipe) -> bool:
    """Return whether hard negatives can come from an index of the label vectors inside the trainer."""
    return isinstance(recipe, Astra) and bool(recipe.negatives.hard) and _searched(recipe) == "classifier"


def _searched(recipe: Recipe) -> str:
    """Return the kind of vectors that the tables of a run are mined from."""
    return str(recipe.table_parameters.get("by", "classifier")) if recipe.tables else "classifier"


def _needs_whole_epochs(recipe: Recipe, stated: set[str]) -> bool:
    """Return whether an epoch must contain all rows, for tables or because the model forgets rows that it does not see.

    When old rows were dealt less often, a dual encoder lost 1.5 P@5 on EUR-Lex, because it has no label vectors to
    remember the old rows.
    """
    if recipe.encodes_labels:
        return True
    if recipe.tables is None or (_can_search(recipe) and "refresh.source" not in stated):
        return False
    return recipe.is_clustered or _searched(recipe) != "classifier" or bool(stated & {"refresh.start", "refresh.every"})


def settings_of_validation(recipe: Recipe, data: str, stated: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the split and part of a version to score, unless the body `stated` of a recipe names a split.

    The part is the newest part of `val` that is not empty. Raises TableError.
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
        "validation.split": (SPLIT, f"part {newest} is the newest part of this version"),
        "validation.parts": (glob.escape(newest), "the newest part with rows"),
    }
