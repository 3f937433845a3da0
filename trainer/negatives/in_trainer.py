"""Which of the trainer's own indexes a recipe means."""

from search.factory import AUTO
from trainer.config import Recipe
from trainer.negatives.base import NegativeSource, SourceContext
from trainer.negatives.copied_index import CopiedIndex, IndexOptions
from trainer.negatives.fresh_index import FreshIndex

_FRESH = "fresh"  # every label, scored by the vectors as they are
_MOST_SCORED = 1 << 17  # labels of a rank up to which 'auto' scores all in every step


def open_index(recipe: Recipe, context: SourceContext) -> NegativeSource:
    """Open the index of a rank's labels."""
    refresh, width = recipe.refresh, recipe.negatives.table_width
    few = context.vectors.stop - context.vectors.start <= _MOST_SCORED
    if refresh.index == _FRESH or (refresh.index == AUTO and few):
        return FreshIndex(width, refresh.start, context)
    options = IndexOptions(refresh.index, refresh.every_steps, refresh.rebuild_steps, width, refresh.start)
    return CopiedIndex(options, context)
