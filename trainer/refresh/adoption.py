"""Tables that are refreshed during training: hard negatives (ASTRA, section 3.2), or clusters (NGAME, section 3).

For the table that epoch e uses, the trainer stores the query embeddings of epoch e - 2, which training computes anyway,
and dumps the embeddings at the end of that epoch. For hard negatives, the dump also contains the classifier vectors.
The miner works during epoch e - 1. At the start of epoch e, the trainer decides once which table to use. Unused files
are removed when a run starts over.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from schemas import storage
from schemas.errors import ExtremisError, InputError, PeerError, TableError, option
from schemas.layout import CLUSTERS, RunLayout, epoch_folder, list_numbers
from schemas.manifest import Manifest, is_published, unpublish
from schemas.storage import join, read_json, write_json
from schemas.table import Table
from schemas.waits import Say, waiting
from trainer.methods.recipe import Recipe
from trainer.methods.sections import LEAD, TableSchedule
from trainer.stream import Source


class StoppedError(ExtremisError):
    """The run stopped on request. The exit status is always 143, as after SIGTERM."""

    exit_status = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Interrupts:
    """Reasons to end a run, or its wait for a table, early: a signal to `stop`, or the loss of the miner."""

    stop: threading.Event = field(default_factory=threading.Event)
    miner_ended: threading.Event = field(default_factory=threading.Event)
    check: Callable[[], None] = lambda: None  # raises errors of background writing: a failed dump makes no table


@dataclass(frozen=True)
class Adoption:
    """Decision that an epoch uses the table built for `table_epoch` (None: random negatives only, or random order)."""

    epoch: int
    table_epoch: int | None
    digests: dict[str, str]
    late: bool  # the table that was due was missing
    stale: bool = False  # the newest table was also too old, so `refresh.stale` decided
    dumped_at: int | None = None  # the step of the run when the vectors were dumped
    overlap: float | None = None  # mean fraction of a row's hard negatives that the previous table also contained
    recall: float | None = None  # of the table's negatives, against exact search
    epochs: int | None = None  # planned number of epochs of the run at that time

    @property
    def age(self) -> int | None:
        """Number of epochs between the dump of the table and this epoch."""
        return None if self.table_epoch is None else self.epoch - self.table_epoch + LEAD

    def staleness(self, step: int) -> dict[str, int | float | bool | None]:
        """Return the age of the table at `step`, in epochs and steps, and the overlap with the previous table."""
        return {
            "epoch": self.epoch,
            "table_epoch": self.table_epoch,
            "age": self.age,
            "age_steps": None if self.dumped_at is None else step - self.dumped_at,
            "overlap": self.overlap,
            "stale": self.stale,
        }


def adopt(
    run: RunLayout,
    recipe: Recipe,
    sources: list[Source],
    epoch: int,
    say: Say,
    epochs: int | None = None,
    interrupts: Interrupts | None = None,
) -> tuple[Adoption, list[Source]]:
    """Decide once which table `epoch` trains on, record the decision with `epochs`, and join the table to `sources`.

    The newest finished table that was built for this or an earlier epoch is chosen; if it is older than
    `refresh.max_age`, `refresh.stale` decides. A resumed run follows a recorded decision even if newer tables exist.
    Raises TableError if a recorded table is missing or differs; PeerError if `refresh.stale` is "stop"
    (nothing is recorded, and the run can resume when a table exists); StoppedError if a signal to stop comes during the
    wait for a table.
    """
    decision = _recorded(run, epoch)
    if decision is None:
        decision = replace(_decide(run, recipe, sources, epoch, say, interrupts or Interrupts()), epochs=epochs)
        write_json(run.adoption(epoch), asdict(decision))
    if decision.table_epoch is None:
        return decision, [source.with_negatives(None) for source in sources]
    joined = []
    for source in sources:
        url = _url(run, recipe, decision.table_epoch, source)
        joined_source = source.with_clusters(url) if recipe.is_clustered else source.with_negatives(url, None)
        table = joined_source.table if recipe.is_clustered else joined_source.negatives
        assert table is not None
        if table.manifest.digest != decision.digests[source.name]:
            raise TableError(
                f"{table.url}: epoch {epoch} was trained on another version of this table (digest "
                f"{decision.digests[source.name][:12]}…, now {table.manifest.digest[:12]}…). A resumed run needs the "
                "original table. Restore the table, or start a new run."
            )
        joined.append(joined_source)
    return decision, joined


def follow(
    run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, seconds: float = 600.0
) -> tuple[Adoption, list[Source]]:
    """Wait up to `seconds` for the decision about `epoch` that another rank records with `adopt`, and follow it.

    Raises InputError if no decision is recorded in time, and TableError as `adopt` does.
    """
    for _ in waiting(f"rank 0 to record its decision about epoch {epoch} ({run.adoption(epoch)})", print, seconds):
        if storage.exists(run.adoption(epoch)):
            return adopt(run, recipe, sources, epoch, print)
    raise InputError(
        f"{run.adoption(epoch)}: no decision about epoch {epoch} after {seconds:g} seconds. Is rank 0 "
        "running, and do all ranks use the same RUN?"
    )


def _recorded(run: RunLayout, epoch: int) -> Adoption | None:
    try:
        remedy = "Start a new run, because the table of this epoch is unknown."
        return Adoption(**read_json(run.adoption(epoch), remedy))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise TableError(
            f"{run.adoption(epoch)}: this file contains no decision about an epoch: {error}. Start a new run."
        ) from None


def _decide(
    run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, say: Say, interrupts: Interrupts
) -> Adoption:
    if not recipe.uses_table(epoch):
        return Adoption(epoch, None, {}, False)
    options = recipe.tables
    assert options is not None
    due = max((e for e in recipe.table_epochs() if e <= epoch), default=0)
    newest = _newest(run, recipe, sources, epoch)
    if newest is None and epoch < options.start:  # there are no earlier clusters
        return Adoption(epoch, None, {}, False)
    if options.stale == "wait":
        table = _describe_table(due, recipe)
        setting = "(refresh.wait_seconds)"
        for _ in waiting(table, say, options.wait_seconds, until=setting, stop=interrupts.stop):
            interrupts.check()
            no_miner, newest = interrupts.miner_ended.is_set(), _newest(run, recipe, sources, epoch)
            if no_miner or not _is_stale(newest, epoch, options):
                break
        if interrupts.stop.is_set() and _is_stale(newest, epoch, options):
            raise StoppedError(f"stopped by a signal while epoch {epoch} waited for {table}.")
    late, stale = newest is None or newest < due, _is_stale(newest, epoch, options)
    if late or stale:
        _report_missing(newest, due, epoch, stale, recipe, options, say)
    if newest is None or (stale and options.stale == "random-only"):
        return Adoption(epoch, None, {}, late, stale)
    kind = "queries" if recipe.is_clustered else "negatives"
    tables = {source.name: Table.open(_url(run, recipe, newest, source), kind) for source in sources}
    if not recipe.is_clustered:  # check before the decision is recorded
        for found in tables.values():
            found.require_ids_of("points" if recipe.table_parameters.get("by") == "points" else "labels")
    # Sorted, because a resumed run reads the digests in this order, and its record must have the same bytes.
    digests = {name: tables[name].digest for name in sorted(tables)}
    step = next(iter(tables.values())).parameters.get("step")
    manifests = [table.manifest for table in tables.values()]
    overlap, recall = _mean(manifests, "overlap_with_previous"), _mean(manifests, "recall_at_k")
    return Adoption(epoch, newest, digests, late, stale, step, overlap, recall)


def _describe_table(due: int, recipe: Recipe) -> str:
    table = "the table of clusters due at epoch" if recipe.is_clustered else "the hard-negative table due at epoch"
    return f"{table} {due}"


def _is_stale(table_epoch: int | None, epoch: int, options: TableSchedule) -> bool:
    return table_epoch is None or epoch - table_epoch + LEAD > options.oldest


def _report_missing(
    newest: int | None, due: int, epoch: int, stale: bool, recipe: Recipe, options: TableSchedule, say: Say
) -> None:
    """Report which table is missing and what is used instead. Raises PeerError if `refresh.stale` is "stop"."""
    command, alone = ("cluster", "random order") if recipe.is_clustered else ("mine", "random negatives only")
    missing = f"epoch {epoch}: {_describe_table(due, recipe)} is not finished yet"
    if stale and options.stale == "stop":
        age = "" if newest is None else f"the table of epoch {newest} is {epoch - newest + LEAD} epochs old"
        state = age or "there is no older table"
        raise PeerError(
            f"{missing}; {state}, and refresh.max_age allows {options.oldest}. Is the miner running (extremis "
            f"{command} DATA RUN --watch)? Continue with {option('resume', True)} once it is finished."
        )
    none = newest is None or (stale and options.stale == "random-only")
    say(f"{missing}; continuing with " + (alone if none else f"the table of epoch {newest}"))


def _mean(tables: list[Manifest], name: str) -> float | None:
    """Return the mean over all rows of what the miner found out as `name`; None if a table does not record it."""
    shares = [(table.quality.get(name), table.rows) for table in tables]
    rows = sum(count for _, count in shares)
    if not rows or any(share is None for share, _ in shares):
        return None
    return float(sum(share * count for share, count in shares if share is not None) / rows)


def _newest(run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int) -> int | None:
    """Return the newest epoch, at most `epoch`, that has a finished table for every source."""
    root = run.clusters_root if recipe.is_clustered else run.negatives_root
    due = [number for number in recipe.table_epochs() if number <= epoch][-1:]  # a store may list new files late
    for number in sorted({*list_numbers(root), *due}, reverse=True):
        if number <= epoch and all(is_published(_url(run, recipe, number, source)) for source in sources):
            return number
    return None


def _url(run: RunLayout, recipe: Recipe, epoch: int, source: Source) -> str:
    return run.clusters(epoch, source.name) if recipe.is_clustered else run.negatives(epoch, source.name)


def discard_refreshes(run: RunLayout) -> None:
    """Remove the decisions and dumps of a run, and the tables built from the dumps. Raises StorageError.

    Tables that were built for the run from other embeddings are not removed.
    """
    for root in (run.negatives_root, run.clusters_root):
        for epoch in list_numbers(root):
            folder = epoch_folder(root, epoch)
            for name in storage.list_names(folder):
                parameters: Mapping[str, Any] = {}
                with contextlib.suppress(TableError):
                    parameters = Table.open(join(folder, name)).parameters
                if parameters.get(CLUSTERS, parameters).get("epoch") is not None:  # built from a dump
                    unpublish(join(folder, name))
                    storage.remove(join(folder, name), recursive=True)
    for place in (run.adoptions, run.dumps):
        storage.remove(place, recursive=True)
