"""The linear ranker: TF-IDF of words and pairs of words, or a data set's own features, and the tree over them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import PAD
from schemas.errors import TableError
from schemas.layout import DataLayout
from schemas.manifest import Shard, check_shard, write_file
from schemas.ragged import Ragged, SparseRows, offsets_of
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from trainer.encoders.features import count_words, inverse_document_frequency, normalize_rows, scale_features
from trainer.inputs import Inputs
from trainer.linear.tree import LabelTree
from trainer.methods.sections import Data
from trainer.stream import open_queries

if TYPE_CHECKING:
    import scipy.sparse

FILE = "linear.safetensors"
BUDGET = 1 << 30  # bytes of training rows
_ENTRY_BYTES = 16  # a word of a row, and again for each of the row's labels


class Points(NamedTuple):
    """Rows of counted features, and the labels of each."""

    rows: SparseRows
    labels: Ragged


@dataclass(frozen=True, eq=False)
class RowFeatures:
    """Rows to unit vectors over the features `seen` [F] in training, with their `factors` [F].

    `vocabulary`: tokens, whose pairs are counted too; 0 for rows that have features of their own.
    """

    vocabulary: int
    seen: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, counted: SparseRows, vocabulary: int) -> "RowFeatures":
        """Learn the features of counted training rows, and the document frequencies of words."""
        seen, frequency = np.unique(counted.ids, return_counts=True)
        factors = inverse_document_frequency(frequency, counted.rows) if vocabulary else np.ones(len(seen), np.float32)
        return cls(vocabulary, seen.astype(np.int32), factors)

    def __call__(self, inputs: Inputs) -> SparseRows:
        """Return unit rows with features numbered [0, F); a feature that no training row had is left out."""
        return self.weigh(count_features(inputs, self.vocabulary))

    def weigh(self, counted: SparseRows) -> SparseRows:
        """Return what a call does for rows that are counted."""
        place = np.searchsorted(self.seen, counted.ids)
        known = np.append(self.seen, PAD)[place] == counted.ids
        kept = counted.keep(known)._replace(ids=place[known].astype(np.int32))
        return normalize_rows(scale_features(kept, self.factors))


def count_features(inputs: Inputs, vocabulary: int) -> SparseRows:
    """Return the words and pairs of rows of a `vocabulary`, or without one their own features; ids are int32."""
    if vocabulary and inputs.tokens is not None:
        counted = count_words(inputs.tokens, vocabulary)
        return counted._replace(ids=counted.ids.astype(np.int32))
    assert inputs.features is not None, "rows have neither tokens nor features"
    return inputs.features


@dataclass(frozen=True, eq=False)
class LinearRanker:
    """Labels of a row by the words that it has."""

    words: RowFeatures
    tree: LabelTree

    @classmethod
    def of(cls, data: DataLayout, trained: Data, columns: Sequence[str], budget: int = BUDGET) -> "LinearRanker | None":
        """Fit to the rows that a run trains on, of the `columns` that its encoder reads.

        The first rows are taken, as many as `budget` bytes hold: any rows are random ones. None: it holds none. Raises
        TableError.
        """
        labels, table = Table.open(data.labels, "labels"), open_queries(data, trained.split)
        vocabulary = Table.open(data.tokenizer, "tokenizer").parameters["vocabulary"] if "input_ids" in columns else 0
        groups = _first(trained.trained.batches(table, [*columns, "label_ids"]), vocabulary, budget)
        points = [*groups]
        if not sum(part.rows.rows for part in points):
            return None
        texts = None
        if {*columns} <= {*labels.columns}:
            texts = _join(count_features(Inputs.of(group), vocabulary) for group in labels.batches(columns))
        counted = Points(_join(part.rows for part in points), Ragged.join(part.labels for part in points))
        return cls.fit(counted, labels.rows, vocabulary, texts)

    @classmethod
    def fit(cls, points: Points, count: int, vocabulary: int, texts: SparseRows | None = None) -> "LinearRanker":
        """Fit to `points` with labels of [0, `count`); `texts`: those of all labels, which say what is alike."""
        words = RowFeatures.of(points.rows, vocabulary)
        x, features = words.weigh(points.rows), len(words.seen)
        centroids = _sum_of_points(x, features, points.labels, count)
        if texts is not None:
            centroids = _unit_rows(_matrix(centroids, features) + _matrix(words.weigh(texts), features))
        return cls(words, LabelTree.fit(x, features, points.labels, centroids))

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k] in [0, 1], label ids [B, k] best first); 0 and -1 pad."""
        return self.tree.rank(self.words(inputs), k)

    def votes(self, inputs: Inputs, k: int) -> SparseRows:
        """Return the best `k` labels of each row, ascending, with their scores in [0, 1]."""
        scores, ids = self.rank(inputs, k)
        order = np.argsort(ids, axis=1)
        ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
        found = ids != PAD
        return SparseRows(ids[found], scores[found], offsets_of(found.sum(1)))

    @classmethod
    def read(cls, table: Table) -> "LinearRanker | None":
        """Read what `write` wrote among the files of `table`; None where it has no ranker. Raises TableError."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        shard = next((shard for shard in table.shards if shard.path == FILE), None)
        if shard is None:
            return None
        try:
            arrays = load(check_shard(table.url, shard, "Fit it again."))
            words = RowFeatures(int(arrays.pop("vocabulary")[0]), arrays.pop("seen"), arrays.pop("factors"))
            return cls(words, LabelTree.from_arrays(len(words.seen), arrays))
        except (SafetensorError, KeyError, ValueError) as error:
            raise TableError(f"{table.url}/{FILE}: no linear ranker: {error}. Fit it again.") from None

    def write(self, url: str) -> Shard:
        """Write a file under `url`, and return the entry that names it in a manifest."""
        from safetensors.numpy import save

        words = self.words
        arrays = {"vocabulary": np.array([words.vocabulary]), "seen": words.seen, "factors": words.factors}
        return write_file(url, FILE, save({**arrays, **self.tree.arrays()}))


def _first(groups: Iterator[pa.Table], vocabulary: int, budget: int) -> Iterator[Points]:
    """Count the first rows, as many as `budget` bytes hold."""
    left = budget
    for group in groups:
        rows, labels = count_features(Inputs.of(group), vocabulary), list_column(group, "label_ids")
        ends = np.cumsum(_ENTRY_BYTES * np.diff(rows.offsets) * (1 + labels.counts))
        count = int(np.searchsorted(ends, left, side="right"))
        yield Points(rows.slice(0, count), labels.slice(0, count))
        if count < group.num_rows:
            return
        left -= int(ends[-1]) if count else 0


def _join(parts: Iterable[SparseRows]) -> SparseRows:
    ids, values, counts = zip(*((part.ids, part.values, np.diff(part.offsets)) for part in parts), strict=True)
    return SparseRows(np.concatenate(ids), np.concatenate(values), offsets_of(np.concatenate(counts)))


def _sum_of_points(x: SparseRows, features: int, labels: Ragged, count: int) -> SparseRows:
    """Return for each label the unit sum of its points (Yu et al., 2022, PIFA)."""
    listed = SparseRows(labels.entries, np.ones(len(labels.entries), np.float32), labels.offsets - labels.offsets[0])
    return _unit_rows(_matrix(listed, count).T @ _matrix(x, features))


def _matrix(rows: SparseRows, columns: int) -> "scipy.sparse.csr_matrix":
    import scipy.sparse

    return scipy.sparse.csr_matrix((rows.values, rows.ids, rows.offsets), shape=(rows.rows, columns))


def _unit_rows(matrix: Any) -> SparseRows:
    matrix = matrix.tocsr()
    rows = SparseRows(matrix.indices.astype(np.int32), matrix.data.astype(np.float32), matrix.indptr.astype(np.int64))
    return normalize_rows(rows)
