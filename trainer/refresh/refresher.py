"""Tables of a run, epoch by epoch: one is adopted, and what the next is made from is dumped."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from schemas.layout import CLUSTERS, RunLayout
from trainer.config import LEAD, Recipe
from trainer.group import Group
from trainer.model import Model
from trainer.refresh.adoption import Adoption, adopt, follow
from trainer.refresh.dump import EmbeddingCollector, dump_is_published
from trainer.refresh.hardness import measure
from trainer.stream import Batch, Source


class EpochDump:
    """Embeddings of an epoch's queries for a later table; nothing where no table is made of the epoch."""

    def __init__(self, collector: EmbeddingCollector | None = None) -> None:
        self.collector = collector

    def __enter__(self) -> "EpochDump":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.collector is not None:
            self.collector.close()

    def add(self, rows: np.ndarray, x: torch.Tensor) -> None:
        """Keep x [B, D] of the rows [B]."""
        if self.collector is not None:
            self.collector.add(rows, x)

    def save_part(self, step: int) -> None:
        """Publish what came since the last part; the epoch is resumed at `step`."""
        if self.collector is not None:
            self.collector.save_part(step)


@dataclass(frozen=True)
class Refresher:
    """Decides for all ranks which table an epoch trains on, and dumps what later ones are made from."""

    run: RunLayout
    recipe: Recipe
    tables: list[Source]
    group: Group
    say: Callable[[str], None]

    def adopt(self, epoch: int, epochs: int) -> tuple[Adoption, list[Source]]:
        """Return rank 0's decision about `epoch`, with `epochs` recorded beside, and the tables joined by it."""
        facts = self.run, self.recipe, self.tables, epoch
        decision = adopt(*facts, self.say, epochs) if self.group.first else None
        self.group.barrier()
        return decision or follow(*facts)

    def staleness(
        self, adoption: Adoption, step: int, model: Model, tables: list[Source], batch: Batch
    ) -> dict[str, int | float | bool | None]:
        """Return how old the adopted table is before `step`, what is new in it, and what its negatives still score."""
        hardness = None if self.recipe.clusters else measure(model, self.group, tables, batch)
        return adoption.staleness(step) | (hardness.facts() if hardness else {})

    def dump(self, epoch: int, step: int, tables: list[Source], columns: int) -> EpochDump:
        """Open the dump of `epoch`, restored up to its `step`, where a later table wants it and it is not there."""
        if epoch + LEAD not in self.recipe.table_epochs():
            return EpochDump()
        for_clusters = tables[0].name if self.recipe.clusters else None
        if self.group.decide(lambda: dump_is_published(self.run, epoch, for_clusters)):
            return EpochDump()
        collector = EmbeddingCollector(self.run, epoch, tables, columns, self.group)
        if step:
            collector.restore(step)
        return EpochDump(collector)

    def publish(self, dump: EpochDump, model: Model, step: int) -> None:
        """Publish a dump with the vectors as they are at global `step`. Raises StorageError."""
        recipe, collector = self.recipe, dump.collector
        if collector is None:
            return
        facts = {"step": step, "use_from": collector.epoch + LEAD, "bias": model.head.bias}
        if recipe.clusters:
            order = recipe.order
            clusters = {"size": order.clusters.at(recipe.train.epochs - 1, order.share), "smallest": order.cluster}
            collector.publish_for_clusters({**facts, "split": recipe.data.split, CLUSTERS: clusters})
            return
        wishes = {
            "table_width": recipe.negatives.table_width,
            "index": recipe.refresh.index,
            "by": recipe.refresh.by,
        }
        collector.publish(model.head.vectors, model.head.labels, {**facts, **wishes})
