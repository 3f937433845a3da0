"""The joined stream of training batches (DESIGN section 5)."""

from trainer.stream.batch import Batch
from trainer.stream.dataset import JoinedStream
from trainer.stream.source import Source, Table, open_queries, open_sources

__all__ = ["Batch", "JoinedStream", "Source", "Table", "open_queries", "open_sources"]
