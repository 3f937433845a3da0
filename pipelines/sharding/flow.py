"""Second and third pipeline of sharding: rows to tokens, spread over the shards; and shards to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PCollection

from pipelines.common.exchange import Exchange, Files
from pipelines.common.summary import SUMMARY, Summary, merge_and_write
from pipelines.formats.base import LABELS, PAIRS
from pipelines.sharding.assemble import assemble_queries
from pipelines.sharding.labels import OrderedLabels, keep_labels, order_labels, write_labels
from pipelines.sharding.onto.base import Base
from pipelines.sharding.onto.gone import leave_out
from pipelines.sharding.onto.labels import CHANGED, STATES, order_labels_onto
from pipelines.sharding.onto.patches import patch_labels
from pipelines.sharding.plan import LabelsPlan, QueriesPlan
from pipelines.sharding.queries import AGAIN, FREQUENCIES, write_queries
from pipelines.sharding.resolve import group_blocks, resolve_labels
from pipelines.sharding.steps import keep, reopen


@dataclass(frozen=True)
class Tables:
    """Plans of all tables. base: of a version, which is built at `built`. rejects: where these are left.

    seed: of the hash of keys.
    """

    queries: Sequence[QueriesPlan]
    labels: LabelsPlan
    seed: int
    base: Base | None
    built: str
    rejects: Files


def tokenize(
    pipeline: beam.Pipeline, bulk: Exchange, summary_url: str, tables: Tables, raw: Summary, rows: str
) -> None:
    """Wire labels in order, and every split with its labels' ids; what the third pipeline needs is left below `rows`.

    raw: the first pipeline's blocks. Bulk data goes through `bulk`.
    """
    base, labels, staged, rejects = tables.base, tables.labels, Files(rows), tables.rejects
    blocks, summaries = raw.blocks_of(LABELS), []
    if base is None:
        ordered = pipeline | "Labels" >> order_labels(labels, blocks, bulk, staged, rejects)
    else:
        version = pipeline | "Labels" >> order_labels_onto(labels, base, blocks, bulk, staged, rejects)
        ordered = version.ordered
        for name, changes in ((STATES, version.states), (CHANGED, version.changed)):
            summaries.append(changes | f"Keep {name}" >> keep(name, staged))
    summaries.append(ordered | "Keep labels" >> keep_labels(staged))
    sources = dict.fromkeys(table for plan in tables.queries for table in (plan.source, PAIRS + plan.source))
    named = {table: _name_labels(pipeline, table, raw, ordered, labels, tables.seed, bulk) for table in sources}
    for plan in tables.queries:
        pairs = named[PAIRS + plan.source] if plan.pairs else None
        assembling = assemble_queries(plan, pairs, staged, rejects)
        summaries.append(named[plan.source] | f"Queries {plan.split}" >> assembling)
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


def _name_labels(
    pipeline: beam.Pipeline,
    table: str,
    raw: Summary,
    ordered: OrderedLabels,
    labels: LabelsPlan,
    seed: int,
    bulk: Exchange,
) -> dict[str, PCollection]:
    """Return the `blocks` of an input table, in groups, with the `ids` of the labels that they name."""
    blocks = raw.blocks_of(table)
    numbered = pipeline | f"Blocks {table}" >> beam.Create(group_blocks(blocks, labels.shards))
    if any(block.mentions for block in blocks):
        resolving = resolve_labels(ordered, labels.shards, seed, bulk, labels.shards_before)
        return {"blocks": numbered, "ids": numbered | f"Resolve {table}" >> resolving}
    return {"blocks": numbered, "ids": pipeline | f"No ids {table}" >> beam.Create([], reshuffle=False)}
