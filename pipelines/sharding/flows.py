"""Later flows of sharding: labels in order, and ids of those that points name; rows to tokens; shards to files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.common.exchange import Exchange, Files, Packet
from pipelines.common.flow import Flow, sum_of
from pipelines.common.summary import SUMMARY, Summary, write_sum
from pipelines.formats.base import LABELS, PAIRS
from pipelines.sharding.labels import (
    Blocks,
    group_blocks,
    ids_of_table,
    keep_labels,
    order_labels,
    resolve_labels,
    write_labels,
)
from pipelines.sharding.plans import LabelsPlan, QueriesPlan
from pipelines.sharding.queries import AGAIN, FREQUENCIES, Group, assemble_queries, write_queries
from pipelines.sharding.steps import keep, reopen
from pipelines.sharding.versions.changes import CHANGED, STATES, leave_out, order_labels_onto, patch_labels
from pipelines.sharding.versions.earlier import EarlierData


@dataclass(frozen=True)
class TablePlans:
    """Plans of all tables. base: of a version, which is built at `built`. rejects: where these are left.

    seed: of the hash of keys.
    """

    queries: Sequence[QueriesPlan]
    labels: LabelsPlan
    seed: int
    base: EarlierData | None
    built: str
    rejects: Files


def join(
    flow: Flow, bulk: Exchange, summary_url: str, tables: TablePlans, raw: Summary, rows: Files, ids: Files
) -> None:
    """Put the labels in order, in `rows`, and find the `ids` of those that points name; both are kept for later.

    raw: the first flow's blocks. Bulk data goes through `bulk`.
    """
    base, labels = tables.base, tables.labels
    blocks, summaries = raw.blocks_of(LABELS), []
    if base is None:
        ordered = order_labels(flow, labels, blocks, bulk, rows, tables.rejects)
    else:
        version = order_labels_onto(flow, labels, base, blocks, bulk, rows, tables.rejects)
        ordered = version.ordered
        summaries += [keep(version.states, STATES, rows), keep(version.changed, CHANGED, rows)]
    summaries.append(keep_labels(ordered, rows))
    for table, groups in _groups(tables, raw).items():
        if any(block.mentions for _, blocks in groups for block in blocks):
            named = flow.create(f"Blocks of {table}", groups)
            resolved = resolve_labels(named, ordered, labels, tables.seed, bulk, ids)
            summaries.append(keep(resolved, ids_of_table(table), ids))
    write_sum(sum_of(summaries), summary_url)


def tokenize(
    flow: Flow, bulk: Exchange, summary_url: str, tables: TablePlans, raw: Summary, joined: Summary, rows: Files
) -> None:
    """Send every split's rows, tokenized and with their labels' ids, to its shards; they are left in `rows`."""
    groups = {
        table: [Group(blocks, joined.kept.get(ids_of_table(table), {}).get(number)) for number, blocks in some]
        for table, some in _groups(tables, raw).items()
    }
    summaries = [assemble_queries(flow, plan, groups, rows, tables.rejects) for plan in tables.queries]
    write_sum(sum_of(summaries), summary_url)


def write(flow: Flow, bulk: Exchange, summary_url: str, tables: TablePlans, assembled: Summary) -> None:
    """Write all tables from what `tokenize` left, with training counts for the labels."""
    base, labels, built = tables.base, tables.labels, tables.built
    written = {plan.split: write_queries(flow, plan, assembled, bulk, tables.rejects) for plan in tables.queries}
    summaries = [outputs[SUMMARY] for outputs in written.values()]
    counts = written["train"][FREQUENCIES]
    for plan in tables.queries:
        if plan.older and base is not None:
            left = leave_out(written[plan.split][AGAIN], plan, base, built, assembled.label_sizes, bulk)
            summaries.append(left[SUMMARY])
            if plan.split == "train":
                counts += left[FREQUENCIES]
    if base is not None:
        changes = {name: reopen(flow, assembled, name) for name in (STATES, CHANGED)}
        older = counts.flat_map("Of labels before", _of_labels, labels.shards_before, False)
        patched = flow.join("Join what changes", {"counts": older, **changes})
        summaries.append(patched.map("Patch labels", patch_labels, base, built))
        counts = counts.flat_map("Of new labels", _of_labels, labels.shards_before, True)
    write_sum(sum_of([*summaries, write_labels(counts, labels, assembled)]), summary_url)


def _of_labels(element: tuple[int, Packet], before: int, new: bool) -> Iterator[tuple[int, Packet]]:
    """Pass counts of a shard of labels that are new, or not new."""
    if (element[0] >= before) == new:
        yield element


def _groups(tables: TablePlans, raw: Summary) -> dict[str, list[tuple[int, Blocks]]]:
    """Return the blocks of points and pairs in groups, by input table."""
    sources = dict.fromkeys(table for plan in tables.queries for table in (plan.source, PAIRS + plan.source))
    return {table: group_blocks(raw.blocks_of(table), tables.labels.shards) for table in sources}
