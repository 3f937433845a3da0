"""Every recipe by name: those that ship by it, those of papers/ by their path."""

from tests.command import ROOT
from trainer.config.load import recipe_names

PAPER_RECIPES = {path.stem: str(path) for path in sorted((ROOT / "papers").glob("*/*.toml"))}
RECIPES = {**{name: name for name in recipe_names()}, **PAPER_RECIPES}
