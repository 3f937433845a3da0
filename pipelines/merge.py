"""`extremis merge`: tables of hard negatives of the same rows, which several miners made, as one.

    shards of the rows ─▶ merge and write ─▶ sum up ─▶ publish

Memory is bounded by one row group of each table, and the labels of equal text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelines.common.flow import Flow
from pipelines.common.progress import Meter, Progress, Watch, silent
from pipelines.common.summary import Summary, read_summary, write_sum
from pipelines.mining.aliases import find_aliases, read_aliases
from pipelines.mining.candidates import rows_of_table
from pipelines.options import MergeOptions
from pipelines.runners.runner import choose_runner, for_workers
from schemas import arrow, storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, staging
from schemas.manifest import Manifest, columns_of
from schemas.owners.build import building, clean_up
from schemas.owners.place import require_place
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import matrix_column, writing_shard
from schemas.sizes import require_room
from schemas.storage import join
from schemas.table import Table
from search.candidates import EMPTY, pack, unpack
from search.exclusions import Exclusions, drop_excluded

_STEP = "merge"
_DROPS = ("repeated", "positives_dropped", "filtered_dropped", "same_text_dropped")


@dataclass(frozen=True)
class MergePlan:
    """Plan of one run. `width` is K of the table, `labels` L, `aliases` the URL of labels of equal text, if any."""

    rows: Table
    tables: tuple[Table, ...]
    out: str
    width: int
    labels: int
    options: MergeOptions
    aliases: str | None = None
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the table."""
        return arrow.negatives(self.width, arrow.label_type(self.labels))


def merge(
    data: str,
    tables: Sequence[str],
    out: str,
    options: MergeOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Merge tables of hard negatives of rows of DATA into one at OUT, each label once a row, positives never.

    A finished OUT of the same tables and options is returned as it is. Raises InputError (fewer than two tables, too
    large a width, OUT holds something else), TableError (of other rows or labels, by label ranges, damaged),
    StorageError.
    """
    data, out, *urls = (for_workers(beam_options, url) for url in (data, out, *tables))
    options, layout = options or MergeOptions(), DataLayout(data)
    require_place(out, "mined", [data, *urls])
    opened = tuple(Table.open(url, "negatives") for url in urls)
    labels = Table.open(layout.labels, "labels")
    rows = _open_rows(layout, labels, opened)
    width = options.width or max(table.width("label_ids") for table in opened)
    if width > (most := sum(table.width("label_ids") for table in opened)):
        raise InputError(f"--width {width}: the tables have {most} negatives of a row together. Give that or less.")
    aliases = find_aliases(labels, options.equal_texts)
    request = Request(
        "negatives",
        {"queries": rows.digest, **{f"table-{number}": table.digest for number, table in enumerate(opened)}},
        {
            **{name: opened[0].parameters.get(name) for name in ("by", "epoch", "step", "use_from")},
            "merged": options.by,
            "width": width,
            "labels": labels.rows,
            "equal_texts": {"rule": options.equal_texts, "labels": labels.digest} if aliases else None,
        },
    )
    remedy = "Give another OUT, or remove it first."
    if (finished := find_reusable(out, request, remedy)) is not None:
        clean_up(out, "mined")
        return finished
    require_room(out, {"tables": rows.rows * width * 6}, "Give another OUT.")
    with choose_runner(beam_options, [rows.url, out]) as runner, building(out, "mined", progress) as build:
        if (finished := find_reusable(out, request, remedy)) is not None:  # the last owner may have made it
            return finished
        watch = Watch(staging(build.url), progress or silent)
        watch.expect({_STEP: rows.rows})
        place = None if aliases is None else join(staging(build.url), "aliases")
        if aliases is not None and place is not None:
            aliases.write(place)
        plan = MergePlan(rows, opened, build.url, width, labels.rows, options, place, watch.meter)
        runner.check([table.place(0) for table in opened if table.shards], build.url, progress or silent)
        flow, summary = Flow(), join(staging(build.url), "summary.json")
        write_sum(flow.create("Shards", range(len(rows.shards))).map("Merge shards", merge_shard, plan), summary)
        runner.run(flow, watch)
        made = read_summary(summary)
        manifest = Manifest(
            kind="negatives",
            columns=columns_of(plan.schema),
            shards=made.shards_of("negatives"),
            rows=rows.rows,
            row_group_rows=rows.manifest.row_group_rows,
            id_range=rows.manifest.id_range,
            parents=dict(request.parents or {}),
            parameters=dict(request.parameters),
            counters=dict(made.counters["negatives"]),
        )
        build.publish(manifest)
        watch.summarize()
        return manifest


def merge_shard(shard: int, plan: MergePlan) -> Summary:
    """Write shard `shard` of the table. Raises TableError, StorageError."""
    plan.meter.start(_STEP)
    rows, names = plan.rows, ("rows", "padded_rows", "candidates", *_DROPS, "outranked", "kept")
    counts = Counter(dict.fromkeys(names, 0))
    aliases = read_aliases(plan.aliases) if plan.aliases else None
    file = writing_shard(plan.out, shard, len(rows.shards), plan.schema, rows.manifest.group_rows(shard))
    columns = [name for name in (rows.id_column, "label_ids", "filter_label_ids") if name in rows.columns]
    groups = [rows.batches_of(shard, columns)]
    groups += [table.batches_of(shard, ["query_id", "label_ids", "scores"]) for table in plan.tables]
    with file as out:
        for points, *offers in zip(*groups, strict=True):
            ids, exclusions = points.column(rows.id_column).combine_chunks(), Exclusions.of(points)
            offered = [_read(plan, table, shard, ids, offer) for table, offer in zip(plan.tables, offers, strict=True)]
            exclusions = aliases.add_to(exclusions) if aliases else exclusions
            keys = merge_rows(offered, plan.options.by, exclusions, plan.width, counts)
            out.write(rows_of_table(ids, keys, plan.schema))
            plan.meter.count(_STEP, len(keys))
    plan.meter.count(_STEP, 0, out.entry.bytes)
    return Summary({"negatives": (out.entry,)}, {"negatives": counts})


def merge_rows(
    offered: Sequence[np.ndarray], by: str, exclusions: Exclusions, width: int, counts: Counter[str]
) -> np.ndarray:
    """Return keys [B, width] of keys [B, K] of each table: in turns, best first of each table, or by score.

    Of a label that several tables have, the first stays. `counts` gets rows, and candidates by their fate.
    """
    if by == "score":
        keys = np.sort(np.concatenate(offered, axis=1), axis=1)
    else:
        most = max(each.shape[1] for each in offered)
        even = [np.pad(each, ((0, 0), (0, most - each.shape[1])), constant_values=EMPTY) for each in offered]
        keys = np.stack(even, axis=2).reshape(len(even[0]), -1)
    labels, again = unpack(keys)[0], np.zeros(keys.shape, bool)
    order = np.argsort(labels, axis=1, kind="stable")
    ordered = np.take_along_axis(labels, order, axis=1)
    np.put_along_axis(again, order[:, 1:], (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0), axis=1)
    left, dropped = drop_excluded(np.where(again, EMPTY, keys), exclusions)
    first = np.argsort(left == EMPTY, axis=1, kind="stable")[:, :width]
    kept = np.take_along_axis(left, first, axis=1)
    repeated, stay, whole = int(again.sum()), int((left != EMPTY).sum()), int((kept != EMPTY).sum())
    counts.update(dropped)
    counts.update(candidates=repeated, repeated=repeated, outranked=stay - whole, kept=whole)
    counts.update(rows=len(kept), padded_rows=int((kept == EMPTY).any(axis=1).sum()))
    return kept


def _read(plan: MergePlan, table: Table, shard: int, ids: pa.Array, offer: pa.Table) -> np.ndarray:
    """Return keys [B, K] of a row group. Raises TableError: rows, labels or scores that cannot be."""
    labels, scores = matrix_column(offer, "label_ids"), matrix_column(offer, "scores").astype(np.float32)
    fault = None
    if not ids.equals(offer.column("query_id").combine_chunks()):
        fault = f"its query_id column is not that of {plan.rows.place(shard)}"
    elif labels.max(initial=-1) >= plan.labels or labels.min(initial=0) < -1:
        fault = f"a label is outside of [0, {plan.labels})"
    elif not np.isfinite(scores[labels >= 0]).all():
        fault = "the score of a label is not finite"
    if fault:
        raise TableError(f"{table.place(shard)}: {fault}. Make this table again.")
    return pack(labels.astype(np.int64), scores)


def _open_rows(layout: DataLayout, labels: Table, tables: Sequence[Table]) -> Table:
    """Open the rows that all tables are of. Raises InputError, TableError."""
    if len(tables) < 2:
        raise InputError("one table alone: nothing to merge. Name the others with --with TABLE,TABLE.")
    splits = storage.list_names(join(layout.root, "queries"))
    known = [labels, *(found for split in splits if (found := Table.find(layout.queries(split), "queries")))]
    rows = next((table for table in known if table.digest == tables[0].parents.get("queries")), None)
    if rows is None:
        raise TableError(f"{tables[0].url}: made from rows that {layout.root} does not have. Give its own DATA.")
    for table in tables:
        table.require_aligned(rows, "Make it again from these rows.")
        if table.parameters.get("labels", labels.rows) != labels.rows:
            raise TableError(
                f"{table.url}: negatives out of {table.parameters['labels']} labels; {labels.url} has {labels.rows}. "
                "Make it again from these labels."
            )
        if len(table.parameters.get("ranges") or ()) > 1:
            raise TableError(f"{table.url}: has columns for each label range. Make it again without --ranges.")
    return rows
