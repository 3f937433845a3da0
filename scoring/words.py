"""Words of texts as sparse features, rows of training data with such features, and the best labels by products."""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas import PAD, storage
from schemas.errors import TableError
from schemas.hashing import combine, hash_bytes
from schemas.layout import DataLayout
from schemas.manifest import Shard, read_shard, verify_shard, write_file
from schemas.mapped import MappedFile, map_tensors
from schemas.ragged import Ragged, SparseRows
from schemas.shard_files.parquet import list_column
from schemas.shares import RowShare
from schemas.table import Table
from trainer.encoders.bag import PAIR_BUCKETS, count_ngrams, inverse_document_frequency, join_rows, scale_features
from trainer.inputs import Inputs, with_titles

BUDGET = 1 << 30  # maximum bytes of training rows
ENTRY_BYTES = 32  # bytes for a word of a row: as read, sorted by rows, and sorted by words
_MANY = 64  # minimum number of rows to load Numba for


class Points(NamedTuple):
    rows: SparseRows
    labels: Ragged


@dataclass(frozen=True, eq=False)
class RowFeatures:
    """Maps rows to vectors over the features `seen` [F] in training, which are scaled by `factors` [F].

    The words of a row are a unit vector; the words of its title are further features, a vector of length `title`.
    `vocabulary`: number of tokens, if tokens and, with `pairs`, pairs of tokens are counted; 0 if the rows come with
    features.
    """

    vocabulary: int
    seen: np.ndarray
    factors: np.ndarray
    title: float = 0.0
    pairs: bool = True

    @classmethod
    def of(
        cls, counted: SparseRows, vocabulary: int, queries: int | None = None, title: float = 0.0, pairs: bool = True
    ) -> "RowFeatures":
        """Collect the features of counted rows, and the document frequencies of words in the first `queries` rows."""
        queries = counted.rows if queries is None else queries
        seen, place = np.unique(counted.ids, return_inverse=True)
        frequency = np.bincount(place[: counted.offsets[queries]], minlength=len(seen))
        factors = inverse_document_frequency(frequency, queries) if vocabulary else np.ones(len(seen), np.float32)
        return cls(vocabulary, seen.astype(np.int32), factors, title, pairs)

    def __call__(self, inputs: Inputs) -> SparseRows:
        """Return rows with features numbered [0, F); features that no training row has are left out."""
        return self.weigh(count_features(inputs, self.vocabulary, self.pairs, bool(self.title)))

    def weigh(self, counted: SparseRows) -> SparseRows:
        """Scale counted rows by `factors` and to the lengths of both vectors."""
        of_title = (
            counted.ids >= self.vocabulary + PAIR_BUCKETS if self.vocabulary else np.zeros(len(counted.ids), bool)
        )
        if not self.title:
            counted, of_title = counted.keep(~of_title), of_title[~of_title]
        numbers, known = find_features(self.seen, counted.ids)
        scaled, of_title = scale_features(counted.keep(known)._replace(ids=numbers), self.factors), of_title[known]
        part = 2 * scaled.row_of() + of_title
        square = np.bincount(part, scaled.values.astype(np.float64) ** 2, 2 * scaled.rows)
        length = np.where(of_title, self.title, 1) / np.maximum(np.sqrt(square[part]), 1e-12)
        return scaled._replace(values=(scaled.values * length).astype(np.float32))


def find_features(seen: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions int32 in `seen` [F], ascending, of the `features` [n] that are there; and which are, [n]."""
    place = np.searchsorted(seen, features)
    known = place < len(seen)
    known[known] = seen[place[known]] == features[known]
    return place[known].astype(np.int32), known


def count_features(inputs: Inputs, vocabulary: int, pairs: bool = True, titles: bool = True) -> SparseRows:
    """Return the counts of each row's words and word pairs if there is a `vocabulary`, else each row's features.

    With `titles`, the words of titles have ids from `vocabulary` + PAIR_BUCKETS on. Without `pairs`, counts are damped.
    """
    if not vocabulary or inputs.tokens is None:
        assert inputs.features is not None, "rows have neither tokens nor features"
        return inputs.features
    count = partial(count_ngrams, vocabulary=vocabulary, buckets=PAIR_BUCKETS, damped=not pairs)
    counted = count(inputs.tokens, ngrams=2 if pairs else 1)
    if titles and inputs.titles is not None:
        of_title = count(titles_of(inputs.tokens, inputs.titles), ngrams=1)
        counted = join_rows(counted, of_title._replace(ids=of_title.ids + vocabulary + PAIR_BUCKETS))
    return counted._replace(ids=counted.ids.astype(np.int32))


def titles_of(tokens: Ragged, lengths: np.ndarray) -> Ragged:
    """Return the first `lengths` [B] tokens of each row."""
    within = np.arange(len(tokens.entries)) - np.repeat(tokens.offsets[:-1] - tokens.offsets[0], tokens.counts)
    return Ragged(tokens.entries, tokens.offsets - tokens.offsets[0]).keep(within < np.repeat(lengths, tokens.counts))


def open_vocabulary(data: DataLayout, columns: Sequence[str]) -> int:
    """Return the size of DATA's vocabulary, or 0 if the token ids are not among `columns`. Raises TableError."""
    return Table.open(data.tokenizer, "tokenizer").parameters["vocabulary"] if "input_ids" in columns else 0


def read_points(
    table: Table, shares: Sequence[RowShare], columns: Sequence[str], vocabulary: int, budget: int, pairs: bool = True
) -> list[Points]:
    """Read the first rows of each part of `shares` that fit into the part's share of `budget` bytes."""
    points = list[Points]()
    for share in shares:
        parts = [(part, share.rows(part)) for part in table.by_part()]
        for number, (part, rows) in enumerate(parts):
            to_come = sum(rows for _, rows in parts[number:])
            left = budget - ENTRY_BYTES * sum(len(each.rows.ids) for each in points)
            groups = share.batches(part, [*with_titles(table, columns), "label_ids"])
            points += _first(groups, vocabulary, left * rows // max(1, to_come), pairs)
    return points


def join_points(points: Sequence[Points]) -> Points:
    return Points(SparseRows.join(part.rows for part in points), Ragged.join(part.labels for part in points))


def best_labels(x: SparseRows, weights: SparseRows, labels: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return w.x above 0, float32 [B, k], and ids [B, k] below `labels`, best first, padded with 0 and -1.

    `weights` lists the labels of each feature of x with their weights.
    """
    if x.rows >= _MANY and importlib.util.find_spec("numba"):
        from scoring import solver

        return solver.best_labels(x, weights, labels, k)
    return _best_labels(x, weights, labels, k)


def _best_labels(x: SparseRows, weights: SparseRows, labels: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Do the same as `solver.best_labels` without Numba, because loading Numba takes a third of a second."""
    found, scores = np.full((x.rows, k), PAD, np.int64), np.zeros((x.rows, k), np.float32)
    for row in range(x.rows):
        of_row = slice(x.offsets[row], x.offsets[row + 1])
        starts, stops = weights.offsets[x.ids[of_row]], weights.offsets[x.ids[of_row] + 1]
        lists = [slice(*bounds) for bounds in zip(starts.tolist(), stops.tolist(), strict=True)]
        if not lists:
            continue
        added = np.concatenate([weights.values[each] for each in lists]) * np.repeat(x.values[of_row], stops - starts)
        sums = np.bincount(np.concatenate([weights.ids[each] for each in lists]), added, labels)
        sums = sums[:labels].astype(np.float32)
        best = np.flatnonzero(sums > 0)  # zeros come out first: a partition among many zeros takes eight times as long
        if len(best) > k:
            best = best[sums[best] >= np.partition(sums[best], -k)[-k]]
        best = best[np.argsort(-sums[best], kind="stable")][:k]
        found[row, : len(best)], scores[row, : len(best)] = best, sums[best]
    return scores, found


def _first(groups: Iterator[pa.Table], vocabulary: int, budget: int, pairs: bool) -> Iterator[Points]:
    """Yield the first rows that fit into `budget` bytes, one row group at a time."""
    left = budget
    for group in groups:
        rows, labels = count_features(Inputs.of(group), vocabulary, pairs), list_column(group, "label_ids")
        ends = np.cumsum(ENTRY_BYTES * np.diff(rows.offsets))
        count = int(np.searchsorted(ends, left, side="right"))
        yield Points(rows.slice(0, count), labels.slice(0, count))
        if count < group.num_rows:
            return
        left -= int(ends[-1]) if count else 0


def hash_texts(inputs: Inputs) -> np.ndarray:
    """Return a hash of the inputs of each row, uint64 [B], by which rows with the same inputs are known."""
    parts = list[tuple[np.ndarray, np.ndarray]]()  # numbers, and offsets of the rows
    if inputs.tokens is not None:
        parts.append((inputs.tokens.values.astype(np.uint32), inputs.tokens.offsets))
    if inputs.features is not None:
        ids, values, offsets = inputs.features
        parts += [(ids.astype(np.uint32), offsets), (values.astype(np.float32), offsets)]
    if inputs.dense is not None:
        parts.append((np.ascontiguousarray(inputs.dense), np.arange(len(inputs.dense) + 1) * inputs.dense.shape[1]))
    hashed = (
        hash_bytes(numbers.reshape(-1).view(np.uint8), numbers.itemsize * offsets.astype(np.int64), 0)
        for numbers, offsets in parts
    )
    return reduce(combine, hashed)


@contextlib.contextmanager
def reading_arrays(
    table: Table, name: str, what: str
) -> Iterator[tuple[Mapping[str, np.ndarray], MappedFile | None] | None]:
    """Open the safetensors file `name` of a fusion: the arrays, and the file if it is local and thus mapped.

    Gives None if the table has no such file. Raises TableError, also instead of errors in the block about the content.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    shard = next((shard for shard in table.shards if shard.path == name), None)
    try:
        if shard is None:
            yield None
        elif storage.is_local(table.url):
            place = storage.filesystem(verify_shard(table.url, shard, remedy="Fit the fusion again."))[1]
            file = MappedFile(place, shard.bytes, private=True)
            yield map_tensors(file), file
        else:
            yield load(read_shard(table.url, shard, "Fit the fusion again.")), None
    except (SafetensorError, KeyError, ValueError) as error:
        raise TableError(f"{table.url}/{name}: not {what}: {error}. Fit the fusion again.") from None


def write_arrays(url: str, name: str, arrays: Mapping[str, np.ndarray]) -> Shard:
    """Write a safetensors file under `url`, and return its manifest entry."""
    from safetensors.numpy import save

    return write_file(url, name, save(dict(arrays)))
