"""Tables of a run, epoch by epoch: one is adopted, and what the next is made from is dumped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas import storage
from schemas.layout import RunLayout
from schemas.owners.claim import Claim
from trainer.checkpoints.background import BackgroundWriter, ReadRows
from trainer.config import Recipe
from trainer.group import Group
from trainer.methods.tables import LEAD
from trainer.model import Model
from trainer.refresh.adoption import Adoption, Interrupts, adopt, follow
from trainer.refresh.dump import EmbeddingCollector, dump_is_published
from trainer.refresh.hardness import measure
from trainer.stream import Batch, Source


@dataclass(frozen=True)
class Refresher:
    """Decides for all ranks which table an epoch trains on, and dumps what later ones are made from."""

    run: RunLayout
    recipe: Recipe
    tables: list[Source]
    group: Group
    say: Callable[[str], None]
    claim: Claim
    writer: BackgroundWriter

    def adopt(self, epoch: int, epochs: int, interrupts: Interrupts) -> tuple[Adoption, list[Source]]:
        """Return rank 0's decision about `epoch`, with `epochs` recorded beside, and the tables joined by it.

        Raises StoppedError where it waits for a table and is asked to stop.
        """
        facts = self.run, self.recipe, self.tables, epoch
        decision = adopt(*facts, self.say, epochs, interrupts) if self.group.first else None
        self.group.barrier()
        return decision or follow(*facts)

    def staleness(
        self, adoption: Adoption, step: int, model: Model, tables: list[Source], batch: Batch
    ) -> dict[str, int | float | bool | None]:
        """Return how old the adopted table is before `step`, what is new in it, and what its negatives still score."""
        hardness = {} if self.recipe.clusters else measure(model, self.group, tables, batch)
        return adoption.staleness(step) | hardness

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
