"""Memory of training points as unit embeddings with their labels, of which the nearest to a query vote."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize

from schemas import PAD
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import Shard
from schemas.ragged import Ragged, SparseRows, offsets_of
from schemas.shard_files.parquet import list_array, list_column, matrix_array, matrix_column, write_shard
from schemas.table import Table
from trainer.evaluation.search import top_k
from trainer.methods.sections import Data
from trainer.model import Model
from trainer.stream import open_queries
from trainer.stream.sources import RowShare

NEIGHBOURS = 30
TEMPERATURE = 0.05


def count_votes(
    similarity: np.ndarray, rows: np.ndarray, labels: Ragged, temperature: float = TEMPERATURE
) -> SparseRows:
    """Let training points vote: `similarity` [B, K] of `rows` [B, K] int64, -1 pads, with `labels` of all points.

    A point has the share softmax(similarity / temperature) of a query's K and gives it to each of its labels, so that
    a label that all of them have gets 1. Returns each query's labels, ascending, with their votes.
    """
    listed = rows != PAD
    scaled = np.where(listed, similarity.astype(np.float64) / temperature, -np.inf)
    weight = np.exp(scaled - np.where(listed.any(1), scaled.max(1, initial=-np.inf), 0)[:, None])
    weight /= np.maximum(weight.sum(1, keepdims=True), 1e-300)
    voted = labels.take(rows[listed])
    query = np.repeat(np.nonzero(listed)[0], voted.counts)
    share = np.repeat(weight[listed], voted.counts)
    stride = 1 + int(voted.values.max(initial=0))
    key, place = np.unique(query * stride + voted.values, return_inverse=True)
    votes = np.bincount(place, share, minlength=len(key)).astype(np.float32)
    counts = np.bincount(key // stride, minlength=len(rows)) if len(key) else np.zeros(len(rows), np.int64)
    return SparseRows(key % stride, votes, offsets_of(counts))


def votes_of(votes: SparseRows, ids: np.ndarray) -> np.ndarray:
    """Return the votes of `ids` [B, K], float32; 0 where a query's have none, and for -1 pads."""
    stride = 2 + max(int(votes.ids.max(initial=0)), int(ids.max(initial=0)))
    keys = votes.row_of() * stride + votes.ids
    sought = np.arange(votes.rows)[:, None] * stride + ids
    if not len(keys):
        return np.zeros(ids.shape, np.float32)
    place = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
    return np.where((keys[place] == sought) & (ids != PAD), votes.values[place], np.float32(0))


FOLDER = "memory"
BUDGET = 4 << 30  # bytes
ROWS_A_FILE = 1 << 20
_GROUP_ROWS = 1 << 14
_BYTES_A_LABEL = _OFFSET_BYTES = 8


@dataclass(frozen=True, eq=False)
class Memory:
    """N training points: `vectors` float16 [N, D] of length 1, and the `labels` of each."""

    vectors: torch.Tensor
    labels: Ragged

    @classmethod
    def build(cls, model: Model, data: DataLayout, trained: Data, budget: int = BUDGET) -> "Memory":
        """Embed the rows that the run trains on, the first of them that `budget` bytes hold: any rows are random ones.

        Raises InputError where the run mixes splits; TableError.
        """
        if trained.mix:
            raise InputError("data.mix: a memory holds the training points of one split, and this run mixes several.")
        return cls._of(model, data, trained.split, trained.trained, budget)

    def with_held_out(self, model: Model, data: DataLayout, trained: Data, budget: int = BUDGET) -> "Memory":
        """Return this memory with the rows behind it that the run held out, as many as `budget` bytes hold in all.

        Raises TableError.
        """
        held_out = self._of(model, data, trained.split, trained.held_out, budget - self.bytes)
        return Memory(torch.cat([self.vectors, held_out.vectors]), Ragged.join([self.labels, held_out.labels]))

    def first(self, rows: int) -> "Memory":
        """Return the first `rows` points."""
        return Memory(self.vectors[:rows], self.labels.slice(0, rows))

    @classmethod
    def read(cls, table: Table) -> "Memory | None":
        """Read what `write` wrote among the files of `table`; None where it has no memory. Raises TableError."""
        shards = [number for number, shard in enumerate(table.shards) if shard.path.startswith(f"{FOLDER}/")]
        groups = itertools.chain.from_iterable(map(table.batches_of, shards))
        parts = ((torch.tensor(matrix_column(g, "vector")), list_column(g, "label_ids")) for g in groups)
        return cls._join(parts) if shards else None

    def write(self, url: str) -> Iterator[Shard]:
        """Write files under `url`, and yield the entries that name them in a manifest."""
        rows = len(self.vectors)
        starts = range(0, max(rows, 1), ROWS_A_FILE)
        for number, start in enumerate(starts):
            labels = self.labels.slice(start, min(start + ROWS_A_FILE, rows))
            vectors = self.vectors[start : start + ROWS_A_FILE].cpu().numpy()
            columns = {
                "vector": matrix_array(vectors, pa.float16()),
                "label_ids": list_array(labels.entries, labels.offsets, pa.int64()),
            }
            shard = write_shard(f"{url}/{FOLDER}", number, len(starts), pa.table(columns), _GROUP_ROWS)
            yield shard.model_copy(update={"path": f"{FOLDER}/{shard.path}"})

    def to(self, device: torch.device) -> "Memory":
        """Return this memory with its vectors on `device`, where queries are that it is asked for."""
        return Memory(self.vectors.to(device), self.labels)

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self.vectors.nbytes + self.labels.values.nbytes + self.labels.offsets.nbytes

    def votes(self, x: torch.Tensor) -> SparseRows:
        """Return the labels of the nearest training points of x [B, D or more], with their votes in (0, 1]."""
        unit = normalize(x[:, : self.vectors.shape[1]].float())
        similarity, rows = top_k(unit, self.vectors, min(NEIGHBOURS, len(self.vectors)))
        return count_votes(similarity.cpu().numpy(), rows.cpu().numpy(), self.labels)

    @classmethod
    def _of(cls, model: Model, data: DataLayout, split: str, part: RowShare, budget: int) -> "Memory":
        table = open_queries(data, split)
        rows = part.batches(table, [*model.columns, "label_ids"])
        empty = torch.empty(0, model.encoder.dimension, dtype=torch.float16), Ragged.empty(0)
        return cls._join([empty, *_embed(model, _first(rows, budget, model.encoder.dimension))])

    @classmethod
    def _join(cls, parts: Iterable[tuple[torch.Tensor, Ragged]]) -> "Memory":
        vectors, labels = zip(*parts, strict=True)
        joined = Ragged.join(labels)
        return cls(torch.cat(vectors), joined._replace(values=joined.values.astype(np.int64, copy=False)))


def _first(groups: Iterable[pa.Table], budget: int, dimension: int) -> Iterator[pa.Table]:
    """Yield the first rows, as many as `budget` bytes hold with vectors [N, D] float16."""
    left = budget - _OFFSET_BYTES
    for group in groups:
        counts = list_column(group, "label_ids").counts
        ends = np.cumsum(2 * dimension + _OFFSET_BYTES + _BYTES_A_LABEL * counts)
        rows = int(np.searchsorted(ends, left, side="right"))
        yield group.slice(0, rows)
        if rows < group.num_rows:
            return
        left -= int(ends[-1])


def _embed(model: Model, groups: Iterable[pa.Table]) -> Iterator[tuple[torch.Tensor, Ragged]]:
    for rows in groups:
        x = model.embed_table(rows)[:, : model.encoder.dimension]
        yield normalize(x.float()).half().cpu(), list_column(rows, "label_ids")
