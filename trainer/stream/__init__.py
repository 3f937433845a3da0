"""Joined stream of training batches."""

from trainer.stream.batch import Batch
from trainer.stream.dataset import JoinedStream, StreamOptions
from trainer.stream.processes import Ranks, ranks_of_environment
from trainer.stream.row_groups import Reading
from trainer.stream.sources import Source, by_shares, open_queries, open_sources

__all__ = [
    "Batch",
    "JoinedStream",
    "Ranks",
    "Reading",
    "Source",
    "StreamOptions",
    "by_shares",
    "open_queries",
    "open_sources",
    "ranks_of_environment",
]
