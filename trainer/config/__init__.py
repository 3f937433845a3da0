"""Recipes: frozen, typed, validated, saved with a run. One TOML file a recipe, changed by `--set a.b=c`."""
