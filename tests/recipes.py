"""Every recipe by name: those that ship by it, those of papers/ by their path."""

from tests.command import ROOT
from trainer.recipe_files import recipe_names

RECIPES = {
    **{name: name for name in recipe_names()},
    **{path.stem: str(path) for path in sorted((ROOT / "papers").glob("*/*.toml"))},
}
