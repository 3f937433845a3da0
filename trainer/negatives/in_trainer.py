"""Choice between the trainer's own indexes."""

from search.factory import AUTO
from trainer.negatives.base import NegativeSource, SourceContext
from trainer.negatives.index_kinds import FRESH, MOST_FRESH
from trainer.negatives.indexes import CopiedIndex, FreshIndex, IndexOptions


def open_index(options: IndexOptions, context: SourceContext) -> NegativeSource:
    """Open the index of a rank's labels."""
    few = context.vectors.stop - context.vectors.start <= MOST_FRESH
    if options.kind == FRESH or (options.kind == AUTO and few):
        return FreshIndex(options.width, options.first_epoch, context)
    return CopiedIndex(options, context)
