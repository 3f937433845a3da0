"""Settings of the validation of a run on a version: by default the newest part is scored."""

import glob
from collections.abc import Mapping
from typing import Any

from schemas.layout import DataLayout
from schemas.table import Table
from trainer.config import Recipe
from trainer.methods.rules import Setting

SPLIT = "val"


def settings_of_validation(recipe: Recipe, data: str, stated: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the split and the part to score of a version, where the body `stated` of a recipe names none.

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
        "validation.split": Setting(SPLIT, f"its part {newest} is the newest of this version"),
        "validation.parts": Setting(glob.escape(newest), "the newest that has rows"),
    }
