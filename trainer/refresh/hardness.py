"""Hardness of a table's negatives: their scores by the model of today against those that the table stores."""

import numpy as np
import torch

from schemas import PAD
from schemas.errors import TableError
from schemas.ragged import widened
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from trainer.group import Group
from trainer.model import Model
from trainer.stream import Batch, Source
from trainer.stream.transfer import send

GROUPS = 8  # row groups of a table that are read for it, at most
ROWS = 64  # of a batch that are scored, at most


@torch.no_grad()
def measure(model: Model, group: Group, sources: list[Source], batch: Batch) -> dict[str, float]:
    """Return the mean score of the same (query, hard negative) pairs as the table holds it, today, and the difference.

    Over some rows of the batch, encoded as in training, with dropout, before the batch changes anything.

    Every rank calls it with its part of the batch. Empty where there is nothing to compare: no rows of a table, or one
    that was mined by label embeddings.
    """
    places, labels, scores = _stored(sources, batch.rows)
    key = (batch.epoch, batch.step)
    if len(places):
        # Rows stand next to each other in what a batch can be cut into.
        stop = int(places.max()) + 1
        encoder = model.encoder
        x = model.head.extend(encoder.encode(encoder.prepare(batch.inputs.slice(0, stop), key), key))
        x = x[send(places, x.device)]
    else:
        x = torch.empty(0, model.head.vectors.shape[1], device=model.device)
    sizes = group.sizes(len(places))
    width = max(group.sizes(labels.shape[1]))
    if not sum(sizes) or not width:
        return {}
    x = group.gather(x, sizes)
    labels = group.gather(torch.from_numpy(widened(labels, width, PAD)), sizes).numpy()
    scores = group.gather(torch.from_numpy(widened(scores, width, 0.0)), sizes).numpy()
    row, column = np.nonzero((labels >= model.head.start) & (labels < model.head.stop))
    query, place = send((row, labels[row, column] - model.head.start), x.device)
    vectors = model.head.vectors
    score = float((x[query] * vectors[place.to(vectors.device)].to(x)).sum())
    sums = torch.tensor([float(scores[row, column].sum()), score, float(len(row))], dtype=torch.float64)
    then, score, pairs = group.sum(sums).tolist()
    if not pairs:
        return {}
    then, today = then / pairs, score / pairs
    return {"score_then": then, "score_now": today, "score_drop": then - today}


def _stored(sources: list[Source], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (places in `rows` [n], label ids int64 [n, K], scores float32 [n, K]) of some rows.

    They come out of few row groups. Row ids count source after source in storage order.
    """
    first = 0
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for source in sources:
        table, stop = source.negatives, first + source.rows
        if table is not None and table.parameters.get("by", "classifier") == "classifier":
            inside = np.flatnonzero((rows >= first) & (rows < stop))
            parts += _of_table(table, inside, rows[inside] - first)
        first = stop
    parts = parts[:GROUPS]
    if not parts:
        return np.empty(0, np.int64), np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)
    width = max(labels.shape[1] for _, labels, _ in parts)
    order = np.concatenate([places for places, _, _ in parts])
    labels = np.concatenate([widened(some, width, PAD) for _, some, _ in parts])
    scores = np.concatenate([widened(some, width, 0.0) for _, _, some in parts])
    kept = np.argsort(order)[:ROWS]
    return order[kept], labels[kept], scores[kept]


def _of_table(table: Table, places: np.ndarray, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the same of one table's `rows`, a row group each; what is damaged is left for the stream to report."""
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
        parts.append((places[mine], labels, matrix_column(read, "scores")[within].astype(np.float32)))
    return parts
