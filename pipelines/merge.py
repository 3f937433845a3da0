"""`extremis merge`: merge tables of hard negatives for the same rows, from several miners, into one table.

Memory is bounded by one row group of each table plus the labels with equal texts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.common.progress import Progress
from pipelines.job import Summary
from pipelines.mining.aliases import find_aliases, read_aliases
from pipelines.mining.candidates import rows_of_table
from pipelines.mining.derived import DerivedPlan, first_positions, make_derived, open_tables, write_derived
from pipelines.options import MergeOptions
from pipelines.runners.local import for_workers
from schemas.errors import InputError
from schemas.manifest import Manifest
from schemas.owners.outputs import require_output_folder
from schemas.ragged import is_repeated
from search.candidates import EMPTY, unpack
from search.exclusions import Exclusions, drop_excluded


@dataclass(frozen=True, kw_only=True)
class MergePlan(DerivedPlan):
    """Plan of one run. `aliased`: whether there are labels with equal texts."""

    by: str
    aliased: bool


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
        raise InputError("only one table is given. Name more tables with --others.")
    rows, opened, labels = open_tables(data, urls)
    widths = [table.width("label_ids") for table in opened]
    width = options.width or max(widths)
    if width > sum(widths):
        raise InputError(
            f"--width {width}: together the tables have {sum(widths)} negatives for each row. Give a smaller --width."
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
    aliases = read_aliases(plan.aliases) if plan.aliased else None

    def make(points: pa.Table, ids: pa.Array, offered: list[np.ndarray], counts: Counter[str]) -> pa.Table:
        exclusions = Exclusions.of(points)
        exclusions = aliases.add_to(exclusions) if aliases else exclusions
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
