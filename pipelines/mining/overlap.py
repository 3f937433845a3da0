"""Overlap of a new table with the one before it: how fast hard negatives go stale."""

import numpy as np

from pipelines.common.aligned import Source
from schemas.errors import ExtremisError
from schemas.layout import RunLayout, numbered
from schemas.ragged import Ragged
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from search.candidates import unpack


def find_previous(run: str, source: Source, use_from: int | None) -> Table | None:
    """Return the newest table of `source` in the run made for an epoch before `use_from`; None where there is none."""
    layout = RunLayout(run)
    for epoch in reversed(numbered(layout.negatives_root)):
        if use_from is not None and epoch >= use_from:
            continue
        table = Table.find(layout.negatives(epoch, source.name), "negatives")
        if table is not None:
            same = [shard.rows for shard in table.shards] == [shard.rows for shard in source.queries.shards]
            return table if same and table.parents["queries"] == source.queries.digest else None
    return None


def overlaps(previous: Table, shard: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray | None:
    """Return the share [S] of each row's negatives (keys [S, K]) that `previous` holds: `rows` int64 [S] of the shard.

    Rows without negatives are left out. None where the table before is no longer whole: it may be replaced any time.
    """
    label_ids, _ = unpack(keys)
    shares, first = [np.empty(0)], 0
    try:
        for table in previous.batches_of(shard, ["label_ids"]):
            inside = (rows >= first) & (rows < first + table.num_rows)
            old = matrix_column(table, "label_ids")[rows[inside] - first]
            new = label_ids[inside]
            hits = Ragged.from_matrix(np.sort(old, axis=1)).contains(new)
            sizes = (new >= 0).sum(axis=1)
            shares.append(hits.sum(axis=1)[sizes > 0] / sizes[sizes > 0])
            first += table.num_rows
    except (ExtremisError, IndexError):
        return None
    return np.concatenate(shares)
