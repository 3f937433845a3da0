"""Which rows a run trains on, in which order, and how they are read."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.errors import InputError
from schemas.layout import LABEL_TEXTS
from schemas.options import Options
from schemas.sizes import parse_bytes
from trainer.schedule import MOST_WEIGHT, ClusterSchedule

_RESERVED = {"queries", "vectors"}  # the source without a mix; what lies beside the sources' embeddings in a dump


class Data(Options):
    """Which rows are trained on."""

    split: str = "train"
    label_texts: bool = Field(False, description="label texts are training points too, each with its own label")
    mix: dict[str, Annotated[float, Field(gt=0, le=MOST_WEIGHT)]] = Field(
        default_factory=dict,
        description="in place of split and label_texts, how often an epoch deals each row of the splits named; "
        "`labels` are the label texts. A weight of 1.5 deals all rows once and half of them once more",
    )

    @model_validator(mode="after")
    def _mixed(self) -> "Data":
        if not self.mix:
            return self
        for name in _RESERVED & self.mix.keys():
            raise ValueError(f"data.mix.{name}: a source of this name cannot be mixed; give the split another name")
        if self.split not in ("train", *self.mix):
            raise ValueError(
                f"data.split = {self.split!r} is not in data.mix, which names every source: add {self.split} = 1.0 "
                "to it, or leave data.split out"
            )
        if self.label_texts and LABEL_TEXTS not in self.mix:
            raise ValueError(
                "data.label_texts = true, but data.mix, which names every source, is without label texts: add "
                f"{LABEL_TEXTS} = 1.0 to it, or set data.label_texts = false"
            )
        return self


class Order(Options):
    """The stream's order (DESIGN section 5)."""

    batch: int = Field(512, ge=1, description="B, queries a step over all ranks")
    streams: int = Field(8, ge=1, description="S canonical streams; ranks divide it, and it divides the batch")
    window_groups: int = Field(4, ge=1, description="row groups that a stream permutes rows within")
    threads: int = Field(1, ge=0, description="threads that read and decode ahead; 0 reads in line")
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
    def _divides(self) -> "Order":
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
        """B/S, what a stream gives to a batch."""
        return self.batch // self.streams

    @property
    def clusters(self) -> ClusterSchedule:
        """C of every epoch."""
        return ClusterSchedule(self.cluster, self.cluster_doubles_every)


class Storage(Options):
    """How the stream reads storage. It changes no order and no number, so a resumed run may have it otherwise."""

    verify: bool = Field(True, description="checksums of what is read are verified")
    damaged: Literal["stop", "skip"] = Field("stop", description="a row group that does not match them: stop, or skip")
    fetch_threads: int = Field(16, ge=0, description="requests to a remote store at a time, ahead of use; 0: none")
    cache: str = Field("", description="a local directory of its own for what remote stores gave; empty: none")
    cache_size: str = Field("", description="what the cache may hold, e.g. '50GiB'")

    @property
    def cache_bytes(self) -> int:
        return parse_bytes(self.cache_size) if self.cache_size else 0

    @model_validator(mode="after")
    def _complete(self) -> "Storage":
        try:
            size = self.cache_bytes
        except InputError as error:
            raise ValueError(f"storage.cache_size = {error}".rstrip(".")) from None
        if self.cache and not size:
            raise ValueError(f"storage.cache = {self.cache!r} needs a limit: set storage.cache_size, e.g. '50GiB'")
        if size and not self.cache:
            raise ValueError("storage.cache_size is the limit of a cache: set storage.cache to a local directory")
        if "://" in self.cache:
            raise ValueError(f"storage.cache = {self.cache!r}: a cache is a directory on a local disk, not a URL")
        return self
