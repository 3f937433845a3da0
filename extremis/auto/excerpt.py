"""Excerpt of DATA: some labels with all of their training points, as a data set of its own.

Fewer rows of all labels would leave each label fewer points than it has, and recipes that need few would look best.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from schemas import storage
from schemas.layout import DataLayout
from schemas.manifest import Manifest, is_published, publish
from schemas.randomness import Purpose, generator
from schemas.shard_files import shards
from schemas.shard_files.parquet import list_array, list_column
from schemas.storage import join
from schemas.table import PARTS, Table
from schemas.version import VERSION
from trainer.stream import open_queries
from trainer.stream.sources import ALL_ROWS

SCANNED_ROWS = 5_000_000  # of the training split, at most
_SPLIT = "train"
_SEED = 0


def write_excerpt(data: DataLayout, root: str, rows: int) -> None:
    """Write an excerpt of about `rows` training rows at `root`, if there is none. Raises StorageError, TableError."""
    if is_published(root):
        return
    layout, whole, kept = DataLayout(root), Table.open(data.root, "data"), draw_labels(data, rows)
    parents: dict[str, str] = {}
    if "tokenizer" in whole.parents:
        tokenizer = Table.open(data.tokenizer, "tokenizer")
        for name, content in tokenizer.read_files().items():
            storage.write_bytes(join(layout.tokenizer, name), content)
        shards_here = tuple(shard.model_copy(update={"view": None}) for shard in tokenizer.shards)
        parents["tokenizer"] = publish(
            layout.tokenizer, tokenizer.manifest.model_copy(update={"shards": shards_here})
        ).digest
    queries, of_all = _write_queries(data, layout, kept), Table.open(data.labels, "labels")
    named = of_all.rows_at(np.flatnonzero(kept))
    labels = _write(layout.labels, "label_id", [named], of_all, of_all.parameters)
    parents |= {f"queries/{_SPLIT}": queries.digest, "labels": labels.digest}
    facts = {**_plain(whole.parameters), "labels": labels.rows, "rows": {_SPLIT: queries.rows}}
    publish(root, Manifest(kind="data", parents=parents, parameters=facts))


def draw_labels(data: DataLayout, rows: int) -> np.ndarray:
    """Draw labels until about `rows` training rows have one of them: bool [L], those drawn. Raises TableError."""
    labels = Table.open(data.labels, "labels").rows
    place = generator(_SEED, Purpose.EXCERPT).permutation(labels)
    firsts = [np.empty(0, np.int64)]  # of each row with labels, the first place of them
    for group in ALL_ROWS.batches(open_queries(data, _SPLIT), ["label_ids"], SCANNED_ROWS):
        ids, offsets = list_column(group, "label_ids")
        if len(ids):
            firsts.append(np.minimum.reduceat(place[ids], offsets[:-1][np.diff(offsets) > 0]))
    first = np.concatenate(firsts)
    if len(first) <= rows:
        return np.ones(labels, bool)
    drawn: np.ndarray = place <= np.partition(first, rows - 1)[rows - 1]
    return drawn


def _write_queries(data: DataLayout, layout: DataLayout, kept: np.ndarray) -> Manifest:
    queries = open_queries(data, _SPLIT)
    columns = [name for name in queries.columns if name != "filter_label_ids"]
    ids, parts = np.cumsum(kept) - 1, []
    for group in ALL_ROWS.batches(queries, columns, SCANNED_ROWS):
        labels = list_column(group, "label_ids")
        labels = labels.keep(kept[labels.values])
        field = group.schema.field("label_ids")
        column = list_array(ids[labels.values], labels.offsets, field.type.value_type)
        group = group.set_column(columns.index("label_ids"), field, column)
        parts.append(group.filter(pa.array(labels.counts > 0)))
    facts = {**queries.parameters, "labels": int(kept.sum())}
    return _write(layout.queries(_SPLIT), "query_id", parts, queries, facts)


def _write(url: str, key: str, parts: list[pa.Table], whole: Table, parameters: Mapping[str, Any]) -> Manifest:
    """Publish a table of the rows of `parts`, numbered anew in column `key`, in row groups as those of the whole."""
    rows = pa.concat_tables(parts).combine_chunks()
    place = rows.schema.get_field_index(key)
    rows = rows.set_column(place, rows.schema.field(key), pa.array(np.arange(rows.num_rows)))
    groups, ids = whole.manifest.row_group_rows or 1, (0, rows.num_rows)
    return shards.write_table(url, whole.kind, [rows], groups, parameters=_plain(parameters), id_range=ids)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters without what they say of versions: an excerpt is none."""
    return {name: value for name, value in parameters.items() if name not in (VERSION, PARTS)}
