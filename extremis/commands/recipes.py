"""`extremis recipes`."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, changes, command
from extremis.commands.shared import Place, Recipe, Settings
from extremis.console import results, say, table
from schemas.errors import InputError


@command()
def recipes(
    action: Literal["list", "show", "copy", "validate"] = "list",
    recipe: Recipe | None = None,
    out: Place | None = None,
    *,
    set: Settings = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """List the recipes that come with Extremis, or show, copy or validate a recipe.

    `auto` is not a recipe: `extremis run auto` tries a few recipes on the data, and trains the best. show prints the
    keys of RECIPE, including keys of the recipe that it extends. copy writes these keys to a TOML file OUT for you to
    edit. validate checks a recipe (a name or a file), with the changes of --set, in the same way as a run.

    Examples:
      extremis recipes
      extremis recipes show astra
      extremis recipes copy astra mine.toml
      extremis recipes validate mine.toml --set train.epochs=5
    """
    places = {"list": (), "show": (recipe,), "copy": (recipe, out), "validate": (recipe,)}[action]
    if None in places or (recipe, out)[len(places) :] != (None,) * (2 - len(places)):
        expected = {0: "nothing", 1: "RECIPE", 2: "RECIPE and OUT"}[len(places)]
        raise InputError(f"recipes {action}: expected {expected} after {action}.")
    if action == "list":
        return _list()
    if action == "validate":
        from trainer.config.load import load_recipe

        body = load_recipe(str(recipe), changes(set)).model_dump(mode="json")
        say(f"{recipe}: valid")
        return {"recipe": str(recipe), "valid": True, "options": body}
    return _show(str(recipe), changes(set), None if out is None else fspath(out))


def _show(recipe: str, overrides: tuple[str, ...], out: str | None) -> dict[str, Any]:
    """Print the keys of `recipe` as TOML, or write the keys to `out`. Raises InputError if the file exists."""
    import tomli_w

    from schemas import storage
    from schemas.owners import require_output_file
    from trainer.config.load import read_recipe

    keys = read_recipe(recipe, overrides)
    text = tomli_w.dumps(keys)
    if out is None:
        results.print(text, end="")
        return keys
    require_output_file(out, (), "Choose another name.")
    storage.write_bytes(out, text.encode())
    say(f"{out}: a copy of {recipe} to edit; next: extremis recipes validate {out}")
    return {"out": out, "recipe": keys}


def _list() -> dict[str, Any]:
    from trainer.config.load import AUTO_RECIPE, load_recipe, read_recipe, recipe_names
    from trainer.methods.keys import flatten

    by_name = {name: read_recipe(name) for name in recipe_names()}
    rows = [[AUTO_RECIPE, *["by trials"] * 2, *[""] * 3]]
    for name, body in by_name.items():
        recipe = load_recipe(name)
        values = {**flatten(recipe.model_dump()), **flatten(body)}  # "auto" where the data decide
        random = f"{values.get('negatives.random', '')} {values.get('negatives.pool', '')}".removesuffix(" auto")
        random = "all labels" if recipe.negatives.all_labels else random
        hard, epochs = str(values.get("negatives.hard", "")), str(values["train.epochs"])
        rows.append([name, recipe.method, recipe.loss.kind, hard, random, epochs])
    table("recipes", ["name", "method", "loss", "hard", "random", "epochs"], rows)
    return {AUTO_RECIPE: {}, **by_name}
