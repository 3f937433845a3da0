"""Recipes: frozen, typed, validated, saved with a run. One TOML file per recipe; `--set a.b=c` changes an option."""
