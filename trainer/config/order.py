"""Section `order`: the order of a run's rows."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.options import MOST_THREADS, Options
from trainer.schedule import ClusterSchedule


class Order(Options):
    """Order of the stream's rows."""

    batch: int = Field(512, ge=1, le=1 << 24, description="B, queries a step over all ranks")
    streams: int = Field(8, ge=1, description="S canonical streams; ranks divide it, and it divides the batch")
    window_groups: int = Field(4, ge=1, le=1 << 20, description="row groups that a stream permutes rows within")
    threads: int = Field(1, ge=0, le=MOST_THREADS, description="threads that read and decode ahead; 0 reads in line")
    tail: Literal["keep", "drop"] = Field("keep", description="the last batch of an epoch: shorter, or left out")
    cluster: int = Field(
        1,
        ge=1,
        description="C, queries of a cluster (NGAME): a batch is batch / C random clusters of queries that lie near "
        "each other, by tables of `extremis cluster`; divides batch / streams. 1: a batch is random queries",
    )
    cluster_doubles_every: int = Field(
        0, ge=0, description="epochs after which C doubles, again and again up to batch / streams; 0: never"
    )

    @model_validator(mode="after")
    def _check(self) -> "Order":
        if self.batch % self.streams:
            raise ValueError(f"order.streams = {self.streams} does not divide order.batch = {self.batch}")
        if self.share % self.cluster:
            raise ValueError(
                f"order.cluster = {self.cluster} does not divide order.batch / order.streams = {self.share}, which is "
                "what a stream gives to a batch: lower order.streams or order.cluster"
            )
        return self

    @property
    def share(self) -> int:
        """B/S, rows of a batch that come from one stream."""
        return self.batch // self.streams

    @property
    def clusters(self) -> ClusterSchedule:
        """C of every epoch."""
        return ClusterSchedule(self.cluster, self.cluster_doubles_every)
