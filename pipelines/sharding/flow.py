"""Later pipelines of sharding: labels in order, and ids of those that points name; rows to tokens; shards to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam

from pipelines.common.exchange import Exchange, Files
from pipelines.common.summary import SUMMARY, Summary, merge_and_write
from pipelines.formats.base import LABELS, PAIRS
from pipelines.sharding.assemble import Group, assemble_queries
from pipelines.sharding.labels import keep_labels, order_labels, write_labels
from pipelines.sharding.plan import LabelsPlan, QueriesPlan
from pipelines.sharding.queries import AGAIN, FREQUENCIES, write_queries
from pipelines.sharding.resolve import Blocks, group_blocks, ids_of_table, resolve_labels
from pipelines.sharding.steps import keep, reopen
from pipelines.sharding.versions.changes import CHANGED, STATES, leave_out, order_labels_onto, patch_labels
from pipelines.sharding.versions.earlier import EarlierData


@dataclass(frozen=True)
class Tables:
    """Plans of all tables. base: of a version, which is built at `built`. rejects: where these are left.

    seed: of the hash of keys.
    """

    queries: Sequence[QueriesPlan]
    labels: LabelsPlan
    seed: int
    base: EarlierData | None
    built: str
    rejects: Files


@dataclass(frozen=True)
class Places:
    """Prefixes of what `join` leaves for later: labels in order, and ids."""

    labels: str
    ids: str


def join(
    pipeline: beam.Pipeline, bulk: Exchange, summary_url: str, tables: Tables, raw: Summary, places: Places
) -> None:
    """Wire the labels, which are put in order, and the ids of those that points name; both are kept for later.

    raw: the first pipeline's blocks. Bulk data goes through `bulk`.
    """
    base, labels, rows = tables.base, tables.labels, Files(places.labels)
    blocks, summaries = raw.blocks_of(LABELS), []
    if base is None:
        ordered = pipeline | "Labels" >> order_labels(labels, blocks, bulk, rows, tables.rejects)
    else:
        version = pipeline | "Labels" >> order_labels_onto(labels, base, blocks, bulk, rows, tables.rejects)
        ordered = version.ordered
        for name, changes in ((STATES, version.states), (CHANGED, version.changed)):
            summaries.append(changes | f"Keep {name}" >> keep(name, rows))
    summaries.append(ordered | "Keep labels" >> keep_labels(rows))
    ids = Files(places.ids)
    for table, groups in _groups(tables, raw).items():
        if any(block.mentions for _, blocks in groups for block in blocks):
            resolving = resolve_labels(ordered, labels, tables.seed, bulk, ids)
            named = pipeline | f"Blocks of {table}" >> beam.Create(groups) | f"Resolve {table}" >> resolving
            summaries.append(named | f"Keep ids of {table}" >> keep(ids_of_table(table), ids))
    merge_and_write(summaries | "All summaries" >> beam.Flatten(), summary_url)


def tokenize(
    pipeline: beam.Pipeline, bulk: Exchange, summary_url: str, tables: Tables, raw: Summary, joined: Summary, rows: str
) -> None:
    """Wire every split's rows, tokenized and with their labels' ids, to its shards; they are left below `rows`."""
    groups = {
        table: [Group(blocks, joined.kept.get(ids_of_table(table), {}).get(number)) for number, blocks in some]
        for table, some in _groups(tables, raw).items()
    }
    summaries = [
        pipeline | f"Queries {plan.split}" >> assemble_queries(plan, groups, Files(rows), tables.rejects)
        for plan in tables.queries
    ]
    merge_and_write(summaries | "All summaries" >> beam.Flatten(), summary_url)


def write(pipeline: beam.Pipeline, bulk: Exchange, summary_url: str, tables: Tables, assembled: Summary) -> None:
    """Wire the writing of all tables from what `tokenize` left, with training counts for the labels."""
    base, labels, built, rejects = tables.base, tables.labels, tables.built, tables.rejects
    outputs, more = {}, []
    for plan in tables.queries:
        writing = write_queries(plan, assembled, bulk, rejects)
        outputs[plan.split] = pipeline | f"Queries {plan.split}" >> writing
        if plan.older and base is not None:
            leaving = leave_out(plan, base, built, assembled.label_sizes, bulk)
            more.append(outputs[plan.split][AGAIN] | f"Again in {plan.split}" >> leaving)
            if plan.split == "train":
                counts = (outputs["train"][FREQUENCIES], more[-1][FREQUENCIES]) | "Less" >> beam.Flatten()
                outputs["train"] = {**outputs["train"], FREQUENCIES: counts}
    counts = outputs["train"][FREQUENCIES]
    if base is not None:
        older, counts = (
            counts | name >> beam.Filter(_is_new, new, labels.shards_before)
            for name, new in (("Of labels before", False), ("Of new labels", True))
        )
        changes = {
            name: pipeline | f"Kept {name}" >> reopen(assembled.kept.get(name, {})) for name in (STATES, CHANGED)
        }
        patched = {"counts": older, **changes} | "Join what changes" >> beam.CoGroupByKey()
        more.append({SUMMARY: patched | "Patch labels" >> beam.Map(patch_labels, base, built)})
    written = counts | "Write labels" >> write_labels(labels, assembled)
    summaries = [written, *(output[SUMMARY] for output in [*outputs.values(), *more])]
    merge_and_write(summaries | "All summaries" >> beam.Flatten(), summary_url)


def _is_new(element: tuple[int, Any], new: bool, before: int) -> bool:
    """Tell whether counts are of a shard of labels that are new, or not new."""
    return (element[0] >= before) == new


def _groups(tables: Tables, raw: Summary) -> dict[str, list[tuple[int, Blocks]]]:
    """Return the blocks of points and pairs in groups, by input table."""
    sources = dict.fromkeys(table for plan in tables.queries for table in (plan.source, PAIRS + plan.source))
    return {table: group_blocks(raw.blocks_of(table), tables.labels.shards) for table in sources}
