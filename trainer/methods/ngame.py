"""NGAME: batches of similar queries, and a triplet loss with a margin.

The positives of a query are hard negatives for the other queries of its batch. Module M1 trains the encoder of queries
and labels. Module M2 freezes this encoder and trains a vector per label.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from schemas.options import key
from trainer.methods.dexml import DualEncoder, Positives
from trainer.methods.recipe import ClassifierRecipe, NegativesSection, Recipe
from trainer.methods.sections import Order, TableSchedule
from trainer.schedule import ClusterSchedule


class ClusterOrder(Order):
    """Order in which the stream deals rows, one cluster at a time (section 3)."""

    cluster: int = key(
        1,
        "C, the number of queries in a cluster; must divide batch / streams. A batch consists of batch / C random "
        "clusters of similar queries, from tables of `extremis cluster`; with 1, a batch consists of random queries",
        ge=1,
    )
    cluster_doubles_every: int = key(0, "number of epochs after which C doubles, up to batch / streams; 0: never", ge=0)

    @property
    def clusters(self) -> ClusterSchedule:
        """Cluster size C of every epoch."""
        return ClusterSchedule(self.cluster, self.cluster_doubles_every)

    @model_validator(mode="after")
    def _check_clusters(self) -> ClusterOrder:
        if self.rows_per_stream % self.cluster:
            raise ValueError(
                f"order.cluster = {self.cluster} does not divide order.batch / order.streams = "
                f"{self.rows_per_stream}, the number of queries from each stream in a batch: lower "
                "order.streams or order.cluster"
            )
        return self


class InBatchNegatives(NegativesSection):
    """The batch's positives, for every query (Algorithm 1, step 8); `loss.radius` excludes distant labels."""


class Clustered(Recipe):
    """Recipe whose batches are whole clusters of queries; queries are clustered again every `refresh.every` epochs."""

    order: ClusterOrder = ClusterOrder()
    negatives: InBatchNegatives = InBatchNegatives()
    refresh: TableSchedule = TableSchedule()

    @property
    def tables(self) -> TableSchedule | None:
        """Schedule of the cluster tables; None without clusters."""
        return self.refresh if self.is_clustered else None

    @property
    def table_parameters(self) -> dict[str, Any]:
        """The split to cluster, and the cluster sizes of the last and the first epoch."""
        from schemas.layout import CLUSTERS  # imported late, so that a typo in a recipe is reported quickly

        largest = self.order.clusters.at(self.train.epochs - 1, self.order.rows_per_stream)
        return {"split": self.data.split, CLUSTERS: {"size": largest, "smallest": self.order.cluster}}

    @model_validator(mode="after")
    def _check_rows(self) -> Clustered:
        rows = self.data
        others = rows.holdout or rows.share < 1 or rows.mix or rows.label_texts or self.order.batches != "mixed"
        if self.is_clustered and others:
            raise ValueError(
                "order.cluster needs all rows of a single split: leave out data.holdout, data.share, data.mix, "
                "data.label_texts and order.batches, or set order.cluster = 1 and order.cluster_doubles_every = 0"
            )
        return self


class Ngame(Clustered, DualEncoder):
    """Module M1: a Siamese encoder of queries and labels."""


class NgameM2(Clustered, ClassifierRecipe):
    """Module M2: a vector per label, initialised with the embedding of the label's text, and then trained."""

    head: Positives = Positives()

    @property
    def positives(self) -> int:
        return self.head.positives
