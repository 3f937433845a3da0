"""Build tables of negatives from other tables with the same rows, shard by shard, one row group at a time."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.common.progress import Meter, Progress, silent
from pipelines.job import REMEDY, Job, Summary, describe, make_table
from pipelines.mining.aliases import Aliases
from schemas import arrow, storage
from schemas.errors import TableError
from schemas.layout import DataLayout, staging
from schemas.manifest import Manifest
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import matrix_column, writing_shard
from schemas.storage import join
from schemas.table import Table
from search.candidates import EMPTY, pack

STEP = "write"


@dataclass(frozen=True)
class DerivedPlan:
    """Plan of a table of negatives at `out`, built from `tables` with the same `rows`. `labels`: the labels table."""

    rows: Table
    tables: tuple[Table, ...]
    labels: Table
    out: str
    width: int
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the table."""
        return arrow.negatives(self.width, arrow.label_type(self.labels.rows))

    @property
    def aliases(self) -> str:
        """URL of the file of labels with equal texts, if there are any."""
        return join(staging(self.out), "aliases")


Plan = TypeVar("Plan", bound=DerivedPlan)


def make_derived(
    plan: Plan,
    parents: Mapping[str, str],
    parameters: Mapping[str, Any],
    write_shard: Callable[[int, Plan], Summary],
    beam_options: Sequence[str],
    say: Progress | None,
    aliases: Aliases | None = None,
) -> Manifest:
    """Build the table that `plan` describes, or return the existing table. Workers read `aliases`.

    The manifest records `parents` and `parameters` in addition to the usual fields. Raises InputError, TableError,
    StorageError.
    """
    rows, before = plan.rows, plan.tables[0].parameters
    tables = {f"table-{number}": table.digest for number, table in enumerate(plan.tables)}
    taken = {name: before.get(name) for name in ("by", "epoch", "step", "use_from")}  # the run and epoch of the table
    recorded = {**taken, **parameters, "width": plan.width, "labels": plan.labels.rows}
    request = Request("negatives", {"queries": rows.digest, **tables, **parents}, recorded)

    def make(job: Job) -> Manifest:
        own = replace(plan, out=job.build.url, meter=job.watch.meter)
        if aliases is not None:
            aliases.write(own.aliases)
        made, of = job.run_step(STEP, rows.rows, range(len(rows.shards)), write_shard, own), rows.manifest
        return job.build.publish(describe(request, made, own.schema, of.row_group_rows, of.id_range))

    return make_table(
        plan.out,
        "mined",
        functools.partial(find_reusable, plan.out, request, REMEDY),
        make,
        beam_options,
        say or silent,
        needs={"tables": rows.rows * 8 * plan.width},
        urls=[rows.url, plan.out],
        reads=[table.shard_url(0) for table in plan.tables if table.shards],
    )


Make = Callable[[pa.Table, pa.Array, list[np.ndarray], Counter[str]], pa.Table]


def write_derived(shard: int, plan: DerivedPlan, columns: Sequence[str], make: Make) -> Summary:
    """Write shard `shard` of the table, one row group at a time; return its manifest entry and the counts of `make`.

    `make` receives the rows (ids and the available `columns`), the ids [B], the keys [B, K] of each table, and the
    counter. Raises TableError, StorageError.
    """
    plan.meter.start(STEP)
    rows, counts = plan.rows, Counter[str]()
    file = writing_shard(plan.out, shard, len(rows.shards), plan.schema, rows.manifest.group_rows(shard))
    groups = [rows.batches_of(shard, [name for name in (rows.id_column, *columns) if name in rows.columns])]
    groups += [table.batches_of(shard, ["query_id", "label_ids", "scores"]) for table in plan.tables]
    with file as out:
        for points, *offers in zip(*groups, strict=True):
            ids = points.column(rows.id_column).combine_chunks()
            offered = [_read(plan, table, shard, ids, offer) for table, offer in zip(plan.tables, offers, strict=True)]
            out.write(make(points, ids, offered, counts))
            plan.meter.count(STEP, len(ids))
    plan.meter.count(STEP, 0, out.entry.bytes)
    return Summary({"negatives": (out.entry,)}, {"negatives": counts})


def first_positions(keys: np.ndarray, width: int, counts: Counter[str]) -> np.ndarray:
    """Return the positions [B, width] of each row's first `width` keys, padded with EMPTY entries; update `counts`."""
    gone = np.pad(keys == EMPTY, ((0, 0), (0, max(0, width - keys.shape[1]))), constant_values=True)
    places = np.argsort(gone, axis=1, kind="stable")[:, :width]
    left, kept = int((~gone).sum()), ~np.take_along_axis(gone, places, axis=1)
    counts.update(outranked=left - int(kept.sum()), kept=int(kept.sum()))
    counts.update(rows=len(keys), padded_rows=int((~kept).any(axis=1).sum()))
    return places


def _read(plan: DerivedPlan, table: Table, shard: int, ids: pa.Array, offer: pa.Table) -> np.ndarray:
    """Return the keys [B, K] of a row group. Raises TableError if rows, labels or scores are invalid."""
    labels, scores = matrix_column(offer, "label_ids"), matrix_column(offer, "scores").astype(np.float32)
    fault = None
    if not ids.equals(offer.column("query_id").combine_chunks()):
        fault = f"the column query_id differs from the ids in {plan.rows.shard_url(shard)}"
    elif labels.max(initial=-1) >= plan.labels.rows or labels.min(initial=0) < -1:
        fault = f"a label id is outside [0, {plan.labels.rows})"
    elif not np.isfinite(scores[labels >= 0]).all():
        fault = "the score of a label is not finite"
    if fault:
        raise TableError(f"{table.shard_url(shard)}: {fault}. Make this table again.")
    return pack(labels.astype(np.int64), scores)


def open_tables(data: str, urls: Sequence[str]) -> tuple[Table, tuple[Table, ...], Table]:
    """Open the tables at `urls`; return the rows in DATA that the tables were built from, the tables, and the labels.

    Raises TableError if a table was built from other rows or labels, contains points instead of labels, or has separate
    columns for label ranges.
    """
    layout, tables = DataLayout(data), tuple(Table.open(url, "negatives") for url in urls)
    labels = Table.open(layout.labels, "labels")
    splits = storage.list_names(join(data, "queries"))
    known = [labels, *(found for split in splits if (found := Table.find(layout.queries(split), "queries")))]
    rows = next((table for table in known if table.digest == tables[0].parents.get("queries")), None)
    if rows is None:
        raise TableError(
            f"{tables[0].url}: this table was built from rows that are not in {data}. Give the DATA that "
            "the table was built from."
        )
    for table in tables:
        table.require_ids_of("labels")
        table.require_aligned(rows, "Make the table again from these rows.")
        if table.parameters.get("labels", labels.rows) != labels.rows:
            raise TableError(
                f"{table.url}: this table was built with {table.parameters['labels']} labels, but {labels.url} has "
                f"{labels.rows}. Make the table again with these labels."
            )
        if len(table.parameters.get("ranges") or ()) > 1:
            raise TableError(
                f"{table.url}: this table has columns for each label range. Make the table again without --ranges."
            )
    return rows, tables, labels
