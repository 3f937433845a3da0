"""Joined stream of training batches."""

from trainer.group import Ranks as Ranks
from trainer.group import ranks_of_environment as ranks_of_environment
from trainer.stream.batch import Batch as Batch
from trainer.stream.dataset import JoinedStream as JoinedStream
from trainer.stream.dataset import StreamOptions as StreamOptions
from trainer.stream.row_groups import ReadOptions as ReadOptions
from trainer.stream.sources import Source as Source
from trainer.stream.sources import by_shares as by_shares
from trainer.stream.sources import open_queries as open_queries
from trainer.stream.sources import open_sources as open_sources
