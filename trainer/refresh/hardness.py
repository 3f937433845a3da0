"""How hard a table's negatives are, and the true ranks of a sample of them."""

import itertools

import numpy as np
import torch

from schemas import PAD
from schemas.errors import TableError
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from trainer.device import send
from trainer.group import Group
from trainer.model import Model
from trainer.stream import Batch, Source

GROUPS = 8  # maximum number of row groups of a table to read
ROWS = 64  # maximum number of rows of a batch to score
LABELS = 1 << 16  # labels scored at a time
_TIE = 1e-9  # scores with a smaller relative difference may differ only by the rounding of their sums
_Row = tuple[int, np.ndarray, np.ndarray]  # place in a batch, label ids [K], and scores [K]


@torch.no_grad()
def measure(model: Model, group: Group, sources: list[Source], batch: Batch) -> dict[str, float]:
    """Return the mean score of (query, hard negative) pairs in the table, the mean score now, and the difference.

    Every rank calls this with its part of a batch that the model has not trained on yet. Some of its rows give pairs,
    and are encoded as in training, with dropout. The result is empty without a table of classifier vectors.
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
    """Return places of some `rows` [n] in few row groups, and their pairs: index of place, label id, score float32."""
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


def describe(ranks: np.ndarray) -> dict[str, float]:
    """Return the quantiles of `ranks` [n], and the fractions of ranks below 10, 100 and 1000."""
    quantiles = np.quantile(ranks, (0.1, 0.5, 0.9), method="inverted_cdf").tolist()
    named = dict(zip(("rank_p10", "rank_p50", "rank_p90"), quantiles, strict=True))
    within = {f"within_{first}": float((ranks < first).mean()) for first in (10, 100, 1000)}
    return {"negatives": len(ranks), **named, **within}


@torch.no_grad()
def measure_true_ranks(
    vectors: torch.Tensor, start: int, x: torch.Tensor, batch: Batch, hard: np.ndarray, group: Group
) -> np.ndarray:
    """Return one rank per (query, hard negative), [n] int64 ascending: the number of non-positives that score higher.

    Uses the first rows of the global batch. Every rank calls the function and gets the same result. `vectors` [n, D]:
    vectors of the rank's labels, the first of which is label `start`. x [B, D]. `hard` [B, k]: labels of this rank,
    counted from `start`, padded with -1.
    """
    rows = min(ROWS, len(batch))
    x, hard = x[:rows].double(), hard[:rows]
    ids = torch.from_numpy(np.where(hard == PAD, 0, hard)).to(vectors.device)
    mine = torch.einsum("bd,bkd->bk", x, vectors[ids].to(x))
    mine = mine.masked_fill(torch.from_numpy(hard == PAD).to(x.device), -torch.inf)
    widths = group.sizes(hard.shape[1])
    if not sum(widths):
        return np.empty(0, np.int64)
    # Scores [k, B] of all ranks are concatenated and sorted in each row, so one search serves all scores.
    scores = torch.sort(group.all_gather(mine.T.contiguous(), widths).T.contiguous(), dim=1).values
    above = group.sum(_above(scores, x, vectors, start, batch, rows))
    return np.sort(above[torch.isfinite(scores)].cpu().numpy())


def _above(
    scores: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor, start: int, batch: Batch, rows: int
) -> torch.Tensor:
    """For each of the `scores` [rows, k], ascending in each row, count the non-positive `vectors` that score higher."""
    counts = torch.zeros(rows, scores.shape[1] + 1, dtype=torch.int64, device=x.device)
    offsets = batch.positive_offsets[: rows + 1]
    query = np.repeat(np.arange(rows), np.diff(offsets))
    label = batch.positives[: offsets[-1]].astype(np.int64) - start
    for first in range(0, len(vectors), LABELS):
        chunk = x @ vectors[first : first + LABELS].to(x).T
        inside = (label >= first) & (label < first + chunk.shape[1])
        chunk[query[inside], label[inside] - first] = -torch.inf
        place = torch.searchsorted(scores, chunk - _TIE * (1 + chunk.abs()))  # number of lower scores
        counts.scatter_add_(1, place, torch.ones_like(place))
    # A label at place p scores higher than the first p scores.
    return counts.flip(1).cumsum(1).flip(1)[:, 1:]
