"""Hard negatives that are refreshed beside the training (ASTRA, section 3.2).

To use a table in epoch e, the query embeddings of epoch e - 2 are kept (the training computes them anyway) and dumped
with the classifier vectors at its end; the miner works during e - 1; e starts with one decision about what it found.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import RunLayout, parse_number
from schemas.manifest import is_published, open_manifest
from trainer.config import Recipe
from trainer.stream import Source

LEAD = 2  # epochs between a dump and the first use of its table


@dataclass(frozen=True)
class Adoption:
    """What an epoch trains on: the table made for `table_epoch` (None: random negatives only); late or not."""

    epoch: int
    table_epoch: int | None
    digests: dict[str, str]
    late: bool

    @property
    def age(self) -> int | None:
        """Epochs between the dump that the table was mined from and this epoch."""
        return None if self.table_epoch is None else self.epoch - self.table_epoch + LEAD


def adopt(
    run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, say: Callable[[str], None]
) -> tuple[Adoption, list[Source]]:
    """Decide once which table `epoch` trains on, record it, and join it to `sources`.

    The newest finished table made for an epoch up to this one wins. A decision recorded before (by the run that is
    being resumed) stands, whatever has appeared since. Raises TableError when a recorded table is gone or differs.
    """
    decision = _recorded(run, epoch)
    if decision is None:
        decision = _decide(run, recipe, sources, epoch, say)
        body = {"epoch": epoch, "table_epoch": decision.table_epoch, "digests": decision.digests, "late": decision.late}
        storage.write_bytes(run.adoption(epoch), json.dumps(body, sort_keys=True).encode())
    if decision.table_epoch is None:
        return decision, [source.with_negatives(None) for source in sources]
    joined = [source.with_negatives(run.negatives(decision.table_epoch, source.name)) for source in sources]
    for source in joined:
        assert source.negatives is not None
        if source.negatives.manifest.digest != decision.digests[source.name]:
            raise TableError(
                f"{source.negatives.url}: epoch {epoch} was trained on another version of this table "
                f"(digest {decision.digests[source.name][:12]}…, now {source.negatives.manifest.digest[:12]}…). "
                "A resumed run needs the table it started with; start a new run instead."
            )
    return decision, joined


def follow(
    run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, seconds: float = 600.0
) -> tuple[Adoption, list[Source]]:
    """What the rank that calls `adopt` decided for `epoch`, waited for up to `seconds`: for all the other ranks.

    Raises InputError when no decision is recorded in time, TableError as `adopt` does.
    """
    deadline = time.monotonic() + seconds
    while not storage.exists(run.adoption(epoch)):
        if time.monotonic() > deadline:
            raise InputError(
                f"{run.adoption(epoch)}: no decision about epoch {epoch} after {seconds:g} seconds. Does rank 0 run, "
                "and do all ranks have the same RUN?"
            )
        time.sleep(0.1)
    return adopt(run, recipe, sources, epoch, print)


def _recorded(run: RunLayout, epoch: int) -> Adoption | None:
    try:
        body = json.loads(storage.read_bytes(run.adoption(epoch)))
    except FileNotFoundError:
        return None
    return Adoption(body["epoch"], body["table_epoch"], body["digests"], body["late"])


def _decide(run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, say: Callable[[str], None]) -> Adoption:
    if not recipe.uses_table(epoch):
        return Adoption(epoch, None, {}, False)
    due = max(e for e in recipe.table_epochs() if e <= epoch)
    deadline = time.monotonic() + (recipe.refresh.wait_seconds if recipe.refresh.late == "wait" else 0)
    found = _newest(run, sources, epoch)
    while (found is None or found < due) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = _newest(run, sources, epoch)
    late = found is None or found < due
    if late:
        instead = "random negatives only" if found is None else f"the table of epoch {found}"
        say(f"epoch {epoch}: the hard-negative table due at epoch {due} is not there yet; going on with {instead}")
    if found is None:
        return Adoption(epoch, None, {}, late)
    digests = {s.name: open_manifest(run.negatives(found, s.name), "negatives").digest for s in sources}
    return Adoption(epoch, found, digests, late)


def _newest(run: RunLayout, sources: list[Source], epoch: int) -> int | None:
    """The newest epoch up to `epoch` with a finished table for every source."""
    numbers = [parse_number(name) for name in storage.list_names(run.negatives_root)]
    for number in sorted((n for n in numbers if n is not None and n <= epoch), reverse=True):
        if all(is_published(run.negatives(number, source.name)) for source in sources):
            return number
    return None
