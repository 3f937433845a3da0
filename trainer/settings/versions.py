"""Settings of a run on a version of data: its validation rows, and the settings for a refresh of an earlier run."""

import glob
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import InputError, option
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from trainer.methods.astra import Astra
from trainer.methods.keys import flatten
from trainer.methods.recipe import Recipe
from trainer.model import find_earlier

Setting = tuple[Any, str]  # a value, and the reason for it
SPLIT = "val"  # the split that is scored
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
        """Open RUN1. Raises InputError if there is no run, or its data is neither DATA nor an ancestor; TableError."""
        recipe, _, parts = find_earlier(DataLayout(data), RunLayout(url))
        return cls(url, recipe.model_dump(), parts, recipe.data.holdout)

    def settings_of_model(self, body: Mapping[str, Any], left: Iterable[str]) -> dict[str, Setting]:
        """Return RUN1's values of the options among `left` that define the model, and its `data.holdout`.

        The holdout counts unless the recipe's `body` sets it, or mixes splits.
        """
        keys = [key for key in left if key.partition(".")[0] in ("encoder", "head") and key not in RATES]
        stated = body.get("data", {})
        if self.holdout and "holdout" not in stated and not stated.get("mix"):
            keys.append("data.holdout")
        values = flatten(self.options)
        return {key: (values.get(key), f"as in {self.url}") for key in keys}

    def require_unseen(self, recipe: Recipe) -> None:
        """Refuse a recipe that holds out rows that RUN1 was trained on. Raises InputError."""
        rows = recipe.data
        most = self.holdout if rows.split == self.options["data"]["split"] else 0.0
        if rows.holdout > most:
            raise InputError(
                f"data.holdout = {rows.holdout:g}: {self.url} was trained on rows that this would hold out, because it "
                f"held out {most:g} of the rows of {rows.split}. Set data.holdout to at most {most:g}, or leave out "
                f"{option('from_run')}."
            )


def settings_of_refresh(recipe: Recipe, data: str, earlier: EarlierRun, overrides: Iterable[str]) -> dict[str, Setting]:
    """Return the settings for new data, by dotted key, without options that `overrides` set. Raises TableError."""
    stated = {override.partition("=")[0].strip() for override in overrides}
    settings: dict[str, Setting] = {}

    # Hard negatives from the first step on, from current vectors or from one table mined from RUN1's vectors.
    searched = recipe.table_parameters.get("by", "classifier") if recipe.tables else "classifier"
    searches = isinstance(recipe, Astra) and recipe.negatives.hard and searched == "classifier"
    in_trainer = searches and "refresh.source" not in stated
    begun = (0, "the vectors are already trained: hard negatives from the first step on")
    if in_trainer:
        settings |= {"refresh.source": ("in-trainer", begun[1]), "refresh.start": begun}
    elif recipe.tables and not recipe.is_clustered and "refresh.start" not in stated:
        one = (recipe.train.epochs, "one table, of all rows, from the earlier run")
        wait = ("wait", "the table is mined before the first step")
        settings |= {"refresh.start": begun, "refresh.every": one, "refresh.stale": wait}

    # Lower rates: those of a run from scratch would undo earlier training, with or without optimizer state.
    for key, rate in flatten(recipe.model_dump()).items():
        if key in RATES and rate:
            reason = f"{RATE_FACTOR:g} times the rate of a run from scratch, {rate:g}"
            settings[key] = (round(rate * RATE_FACTOR, 6), reason)

    # New rows are trained on half as often as from scratch, old rows as often as the rest of the time allows. The total
    # time is that of a run from scratch multiplied by MIN_TIME + TIME_PER_NEW_ROWS * share.
    queries = Table.open(DataLayout(data).queries(recipe.data.split), "queries")
    share = sum(part.rows for part in queries.parts if part.name in earlier.parts) / max(1, queries.rows)
    whole, time = recipe.train.epochs, min(1.0, MIN_TIME + TIME_PER_NEW_ROWS * share)
    times = (time / NEW_ROW_PASSES - share) / (1 - share) if share < 1 else 1.0
    # Tables of the rows need epochs with all rows, and so does a dual encoder, which has no label vectors to remember
    # old rows: when they were dealt less often, it lost 1.5 P@5 on EUR-Lex.
    of_rows = recipe.is_clustered or searched != "classifier" or stated & {"refresh.start", "refresh.every"}
    needs_all = recipe.encodes_labels or (recipe.tables and not in_trainer and of_rows)
    is_bound = needs_all or recipe.data.by_parts or recipe.data.mix or stated & {"train.epochs", "data.replay"}
    fewer = times < 1 and not is_bound
    epochs = math.ceil(NEW_ROW_PASSES * whole) if fewer else max(1, math.ceil(time * whole))
    reason = f"{share:.1%} of the rows were added since {earlier.url}; a run from scratch has {whole}"
    settings["train.epochs"] = (epochs, reason)
    if fewer:
        settings["data.replay"] = (round(times, 3), f"for {time:.0%} of the time of a run from scratch")
    if not recipe.encodes_labels:
        # With few passes over old rows, optimizers keep their state: without state, a label vector's first step is
        # large. Dual encoders, which have no such vectors, did worse with state.
        replay = round(times, 3) if fewer else recipe.data.replay
        passes = replay * (whole if "train.epochs" in stated else epochs)
        settings["train.start_optimizer"] = (passes < FEW_PASSES, f"{passes:.1f} passes over old rows")
    return {key: setting for key, setting in settings.items() if key not in stated}


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
