"""Hardness of a table's negatives: their scores under the current model, compared with the scores in the table."""

import itertools

import numpy as np
import torch

from schemas import PAD
from schemas.errors import TableError
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from trainer.group import Group
from trainer.model import Model
from trainer.stream import Batch, Source
from trainer.stream.transfer import send

GROUPS = 8  # maximum number of row groups of a table to read
ROWS = 64  # maximum number of rows of a batch to score
_Row = tuple[int, np.ndarray, np.ndarray]  # place in a batch, label ids [K], and scores [K]


@torch.no_grad()
def measure(model: Model, group: Group, sources: list[Source], batch: Batch) -> dict[str, float]:
    """Return the mean score of (query, hard negative) pairs in the table, the mean score now, and the difference.

    The pairs come from some rows of the batch, which are encoded as in training, with dropout, before the model trains
    on the batch.

    Every rank calls the function with its part of the batch. The result is empty if there is nothing to compare,
    because no row has a table, or because the table was mined with label embeddings.
    """
    places, pairs, labels, scores = _stored(sources, batch.rows)
    key = (batch.epoch, batch.step)
    if len(places):
        # A slice of a batch has adjacent rows, so all rows up to the last place are encoded.
        stop = int(places.max()) + 1
        encoder = model.encoder
        x = model.head.extend(encoder.encode(encoder.prepare(batch.inputs.slice(0, stop), key), key))
        x = x[send(places, x.device)]
    else:
        x = torch.empty(0, model.head.vectors.shape[1], device=model.device)
    sizes = group.sizes(len(places))
    if not sum(sizes):
        return {}
    x = group.all_gather(x, sizes)
    pairs, labels, scores = group.all_gather_arrays(pairs + sum(sizes[: group.rank]), labels, scores)
    own = (labels >= model.head.start) & (labels < model.head.stop)
    query, place = send((pairs[own], labels[own] - model.head.start), x.device)
    vectors = model.head.vectors
    score = float((x[query] * vectors[place.to(vectors.device)].to(x)).sum())
    sums = torch.tensor([float(scores[own].sum()), score, float(own.sum())], dtype=torch.float64)
    then, today, count = group.sum(sums).tolist()
    if not count:
        return {}
    then, today = then / count, today / count
    return {"score_then": then, "score_now": today, "score_drop": then - today}


def _stored(sources: list[Source], rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return positions of some `rows` [n], and their pairs: index of the position, label id int64, score float32.

    The rows come from only a few row groups. Row ids are counted over all sources, in storage order.
    """
    first, parts = 0, list[list[_Row]]()
    for source in sources:
        table, stop = source.negatives, first + source.rows
        if table is not None and table.parameters.get("by", "classifier") == "classifier":
            inside = np.flatnonzero((rows >= first) & (rows < stop))
            parts += _rows_of_table(table, inside, rows[inside] - first)
        first = stop
    some = sorted(itertools.chain.from_iterable(parts[:GROUPS]), key=lambda row: row[0])[:ROWS]
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))]
    for number, (_, labels, scores) in enumerate(some):
        kept = labels != PAD
        pairs.append((np.full(kept.sum(), number), labels[kept], scores[kept]))
    return np.array([place for place, _, _ in some], np.int64), *map(np.concatenate, zip(*pairs, strict=True))


def _rows_of_table(table: Table, places: np.ndarray, rows: np.ndarray) -> list[list[_Row]]:
    """Return `rows` of one table, one list per row group. Damaged row groups, which the stream reports, are skipped."""
    owner = table.groups.of_rows(rows)
    parts = []
    for m in np.unique(owner)[:GROUPS].tolist():
        try:
            read = table.read_group(m, ["label_ids", "scores"])
        except TableError:
            continue
        mine = owner == m
        within = rows[mine] - table.groups.first[m]
        labels = matrix_column(read, "label_ids")[within].astype(np.int64)
        scores = matrix_column(read, "scores")[within].astype(np.float32)
        parts.append([*zip(places[mine].tolist(), labels, scores, strict=True)])
    return parts
