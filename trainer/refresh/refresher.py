"""Dumps of a run, epoch by epoch: what the next tables are made from."""

from dataclasses import dataclass
from typing import Any

from schemas import storage
from schemas.layout import RunLayout
from schemas.owners.claim import Claim
from trainer.checkpoints.background import BackgroundWriter, ReadRows
from trainer.group import Group
from trainer.methods.recipe import Recipe
from trainer.methods.tables import LEAD
from trainer.model import Model
from trainer.refresh.dump import EmbeddingCollector, dump_is_published
from trainer.stream import Source


@dataclass(frozen=True)
class Refresher:
    """Dumps, on all ranks, what the tables of later epochs are made from."""

    run: RunLayout
    recipe: Recipe
    group: Group
    claim: Claim
    writer: BackgroundWriter

    def dump(self, epoch: int, step: int, tables: list[Source], columns: int) -> EmbeddingCollector | None:
        """Open the dump of `epoch`, restored up to its `step`; None where no table is made of it, or it is there."""
        if epoch + LEAD not in self.recipe.table_epochs():
            return None
        for_clusters = tables[0].name if self.recipe.clusters else None
        if self.group.decide(lambda: dump_is_published(self.run, epoch, for_clusters)):
            if self.group.first:  # a crash may have come between a dump and the end of its parts
                self.claim.require()
                storage.remove(self.run.parts(epoch), recursive=True)
            return None
        collector = EmbeddingCollector(self.run, epoch, tables, columns, self.writer.group, self.claim)
        if step:
            collector.restore(step)
        return collector

    def save_part(self, dump: EmbeddingCollector, step: int, global_step: int) -> None:
        """Begin to write what came to a dump up to the epoch's `step`. Raises StorageError of what was begun before."""
        rows = dump.take_fresh()
        self.writer.begin(global_step, {}, lambda _: dump.save_part(step, rows))

    def publish(self, dump: EmbeddingCollector, model: Model, step: int) -> None:
        """Begin to write a dump with the vectors as they are at global `step`. Raises StorageError as `save_part`."""
        head = model.head
        dump.fetch()
        facts: dict[str, Any] = {"step": step, "use_from": dump.epoch + LEAD, "bias": head.bias}
        facts |= self.recipe.table_facts
        rows, vectors = ({}, None) if self.recipe.clusters else (head.rows(), head.vectors)

        def write(read: ReadRows) -> None:
            vectors_then = (lambda low, high: read(low, high, "weight")["weight"]) if rows else None
            dump.publish(vectors, head.labels, facts, vectors_then)

        self.writer.begin(step, rows, write)
