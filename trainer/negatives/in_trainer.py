"""Which of the trainer's own indexes a recipe means."""

from search.factory import AUTO
from trainer.negatives.base import NegativeSource, SourceContext
from trainer.negatives.copied_index import CopiedIndex, IndexOptions
from trainer.negatives.fresh_index import FreshIndex

_FRESH = "fresh"  # every label, scored by the vectors as they are
_MOST_SCORED = 1 << 17  # labels of a rank up to which 'auto' scores all in every step


def open_index(options: IndexOptions, context: SourceContext) -> NegativeSource:
    """Open the index of a rank's labels."""
    few = context.vectors.stop - context.vectors.start <= _MOST_SCORED
    if options.kind == _FRESH or (options.kind == AUTO and few):
        return FreshIndex(options.width, options.first_epoch, context)
    return CopiedIndex(options, context)
