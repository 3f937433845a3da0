"""Tables of negatives from other tables: `merge` several, or let a teacher score one (`teach`).

`make_derived` and `write_derived` are common to both: the job, and the reading and writing of a shard.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.job import REMEDY, Job, Summary, describe, make_table
from pipelines.mining.filters import (
    Aliases,
    above_margin,
    find_aliases,
    has_margin,
    read_aliases,
    rows_of_table,
    weakest_positives,
)
from pipelines.models import once_a_process
from pipelines.options import MergeOptions, TeachOptions
from pipelines.progress import Meter, Progress, silent
from pipelines.runners.local import for_workers
from schemas import arrow, storage
from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout, staging
from schemas.manifest import Manifest
from schemas.owners import require_output_folder
from schemas.ragged import Ragged, is_repeated
from schemas.shard_files.parquet import matrix_column, writing_shard
from schemas.storage import join
from schemas.table import Request, Table, find_reusable
from search.exclusions import Exclusions, drop_excluded
from search.topk import EMPTY, pack, unpack
from trainer.device import open_device
from trainer.encoders.texts import Teacher, TeacherFiles

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

    needs, reads = {"tables": rows.rows * 8 * plan.width}, [each.shard_url(0) for each in plan.tables if each.shards]
    find = functools.partial(find_reusable, plan.out, request, REMEDY)
    work = plan.out, "mined", find, make, beam_options, say or silent
    return make_table(*work, needs=needs, urls=[rows.url, plan.out], reads=reads)


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
            offered = []
            for table, offer in zip(plan.tables, offers, strict=True):
                label_ids, scores = matrix_column(offer, "label_ids"), matrix_column(offer, "scores").astype(np.float32)
                fault = None
                if not ids.equals(offer.column("query_id").combine_chunks()):
                    fault = f"the column query_id differs from the ids in {rows.shard_url(shard)}"
                elif label_ids.max(initial=-1) >= plan.labels.rows or label_ids.min(initial=0) < -1:
                    fault = f"a label id is outside [0, {plan.labels.rows})"
                elif not np.isfinite(scores[label_ids >= 0]).all():
                    fault = "the score of a label is not finite"
                if fault:
                    raise TableError(f"{table.shard_url(shard)}: {fault}. Make this table again.")
                offered.append(pack(label_ids.astype(np.int64), scores))
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


def _open_tables(data: str, urls: Sequence[str]) -> tuple[Table, tuple[Table, ...], Table]:
    """Open the tables at `urls`; return the rows in DATA that the tables were built from, the tables, and the labels.

    Raises TableError if a table was built from other rows or labels, contains points instead of labels, or has separate
    columns for label ranges.
    """
    layout, tables = DataLayout(data), tuple(Table.open(url, "negatives") for url in urls)
    labels = Table.open(layout.labels, "labels")
    splits = storage.list_names(join(data, "queries"))
    known = [labels, *(Table.find(layout.queries(split), "queries") for split in splits)]
    rows = next((table for table in known if table and table.digest == tables[0].parents.get("queries")), None)
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
                f"{table.url}: this table has columns for each label range. Make it again without {option('ranges')}."
            )
    return rows, tables, labels


@dataclass(frozen=True, kw_only=True)
class MergePlan(DerivedPlan):
    by: str
    aliased: bool  # whether there are labels with equal texts


def merge(
    data: str,
    tables: Sequence[str],
    out: str,
    options: MergeOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Merge tables of hard negatives for rows of DATA into the table OUT, without duplicates or positives in a row.

    If OUT was already built from the same tables with the same options, it is returned. Raises InputError (fewer than
    two tables, a width that is too large, OUT contains something else), TableError (other rows or labels, label ranges,
    damaged), StorageError.
    """
    data, out, *urls = (for_workers(beam_options, url) for url in (data, out, *tables))
    options = options or MergeOptions()
    require_output_folder(out, "mined", [data, *urls])
    if len(urls) < 2:
        raise InputError(f"only one table is given. Name more tables with {option('others')}.")
    rows, opened, labels = _open_tables(data, urls)
    widths = [table.width("label_ids") for table in opened]
    width = options.width or max(widths)
    if width > sum(widths):
        raise InputError(
            f"{option('width', width)}: together the tables have {sum(widths)} negatives for each row. Give fewer."
        )
    aliases = find_aliases(labels, options.equal_texts)
    parameters = {
        "merged": options.by,
        "equal_texts": {"rule": options.equal_texts, "labels": labels.digest} if aliases else None,
    }
    plan = MergePlan(rows, opened, labels, out, width, by=options.by, aliased=aliases is not None)
    return make_derived(plan, {}, parameters, merge_shard, beam_options, progress, aliases)


def merge_shard(shard: int, plan: MergePlan) -> Summary:
    """Write shard `shard` of the table. Raises TableError, StorageError."""

    def make(points: pa.Table, ids: pa.Array, offered: list[np.ndarray], counts: Counter[str]) -> pa.Table:
        exclusions = Exclusions.of(points)
        if plan.aliased:
            exclusions = read_aliases(plan.aliases).add_to(exclusions)
        return rows_of_table(ids, merge_rows(offered, plan.by, exclusions, plan.width, counts), plan.schema)

    return write_derived(shard, plan, ["label_ids", "filter_label_ids"], make)


def merge_rows(
    offered: Sequence[np.ndarray], by: str, exclusions: Exclusions, width: int, counts: Counter[str]
) -> np.ndarray:
    """Merge the keys [B, K] of all tables into keys [B, width], by score, or in turns starting with each table's best.

    If several tables contain the same label, the first entry is kept. `counts` counts rows, and candidates by outcome.
    """
    if by == "score":
        keys = np.sort(np.concatenate(offered, axis=1), axis=1)
    else:
        most = max(each.shape[1] for each in offered)
        even = [np.pad(each, ((0, 0), (0, most - each.shape[1])), constant_values=EMPTY) for each in offered]
        keys = np.stack(even, axis=2).reshape(len(even[0]), -1)
    labels = unpack(keys)[0]
    again = is_repeated(labels) & (labels >= 0)
    left, dropped = drop_excluded(np.where(again, EMPTY, keys), exclusions)
    counts.update(dropped)
    counts.update(candidates=int(again.sum()), repeated=int(again.sum()))
    return np.take_along_axis(left, first_positions(left, width, counts), axis=1)


_open_teacher = once_a_process(TeacherFiles.open)


@dataclass(frozen=True, kw_only=True)
class TeachPlan(DerivedPlan):
    teacher: TeacherFiles
    options: TeachOptions
    device: str

    @property
    def schema(self) -> pa.Schema:
        return arrow.negatives(self.width, arrow.label_type(self.labels.rows), teacher=True)


def teach(
    data: str,
    table: str,
    teacher: str,
    out: str,
    options: TeachOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    device: str = "auto",
) -> Manifest:
    """Score the negatives of a table with the cross-encoder in the directory `teacher`, and write the table OUT.

    OUT has a column `teacher` (float16 [K], aligned with `label_ids`). With a margin, negatives that score too close to
    the weakest positive are dropped. Raises InputError (no teacher, a teacher with several outputs, OUT contains
    something else), TableError (other rows or labels, no texts, damaged), StorageError.
    """
    data, table, teacher, out = (for_workers(beam_options, url) for url in (data, table, teacher, out))
    options = options or TeachOptions()
    require_output_folder(out, "mined", [data, table, teacher])
    if not beam_options:  # remote workers may have packages or devices that this machine lacks
        open_device(device)
    rows, (opened,), labels = _open_tables(data, [table])
    if "text" not in rows.columns:
        raise TableError(
            f"{rows.url}: no texts, which the teacher needs. Shard the data again with {option('keep_text', True)}."
        )
    files, most = TeacherFiles.find(teacher, options.label), opened.width("label_ids")
    width = options.width or most
    if width > most:
        raise InputError(
            f"{option('width', width)}: the table has {most} negatives for each row. Give a smaller {option('width')}, "
            "or mine more negatives."
        )
    plan = TeachPlan(rows, (opened,), labels, out, width, teacher=files, options=options, device=device)
    parents = {"labels": labels.digest, "teacher": files.digest}
    return make_derived(plan, parents, options.model_dump(), teach_shard, beam_options, progress)


def teach_shard(shard: int, plan: TeachPlan) -> Summary:
    """Write shard `shard` of the table. Raises InputError, TableError, StorageError."""
    options, teacher = plan.options, _open_teacher(plan.teacher, open_device(plan.device))

    def make(points: pa.Table, ids: pa.Array, offered: list[np.ndarray], counts: Counter[str]) -> pa.Table:
        keys, queries = offered[0], points.column("text").to_pylist()
        negatives = unpack(keys)[0]
        scores = np.full(keys.shape, -np.inf, np.float32)
        some = negatives >= 0
        scores[some] = _score(plan, teacher, queries, np.nonzero(some)[0], negatives[some])
        counts.update(candidates=int(some.sum()), above_teacher_margin=0)
        if has_margin(options):
            positives: Ragged = Exclusions.of(points).positives
            of = positives.row_of()
            weakest = weakest_positives(len(keys), of, _score(plan, teacher, queries, of, positives.entries))
            gone = some & above_margin(options, scores, weakest)
            counts.update(above_teacher_margin=int(gone.sum()))
            keys = np.where(gone, EMPTY, keys)
        places = first_positions(keys, plan.width, counts)
        keys, scores = (np.take_along_axis(each, places, axis=1) for each in (keys, scores))
        return rows_of_table(ids, keys, plan.schema, scores)

    return write_derived(shard, plan, ["label_ids", "text"], make)


def _score(plan: TeachPlan, teacher: Teacher, queries: list[str], rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Score pairs of a query, given by its row, and a label, float32 [V]. Raises TableError if no label has a text."""
    if not len(labels):
        return np.empty(0, np.float32)
    unique, at = np.unique(labels, return_inverse=True)
    texts = plan.labels.rows_at(unique, ["text"]).column("text").to_pylist()
    if not any(texts):
        raise TableError(
            f"{plan.labels.url}: this table has no texts, which the teacher needs. Shard the data again with texts of "
            "labels."
        )
    pairs = [queries[row] for row in rows.tolist()], [texts[label] for label in at.tolist()]
    return teacher.score(*pairs, plan.options.batch)
