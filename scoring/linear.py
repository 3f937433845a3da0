"""The linear ranker: one sparse vector per label over TF-IDF of words and word pairs, or over the data's features."""

import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import PAD, storage
from schemas.arrow import DENSE
from schemas.errors import TableError
from schemas.layout import DataLayout
from schemas.manifest import Shard, read_shard, verify_shard, write_file
from schemas.mapped import MappedFile, map_tensors
from schemas.ragged import Ragged, SparseRows, offsets_of, take_per_row
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from trainer.encoders.bag import count_words, inverse_document_frequency, normalize_rows, scale_features
from trainer.inputs import Inputs, open_queries

if TYPE_CHECKING:
    from trainer.methods.sections import Data

FILE, TRAINED_FILE = "linear.safetensors", "linear-trained.safetensors"  # the second is fitted without held-out rows
_WEIGHTS = ("of_labels", "weights", "offsets")
BUDGET = 1 << 30  # maximum bytes of training rows
_ENTRY_BYTES = 32  # bytes for a word of a row: as read, sorted by rows, and sorted by words
_MANY = 64  # minimum number of rows to load Numba for
_SMALLEST = 0.5  # weights below this, divided by the root of the mean number of words of a row, are dropped


class Points(NamedTuple):
    rows: SparseRows
    labels: Ragged


@dataclass(frozen=True, eq=False)
class RowFeatures:
    """Maps rows to unit vectors over the features `seen` [F] in training, which are scaled by `factors` [F].

    `vocabulary`: number of tokens, if tokens and pairs of tokens are counted; 0 if the rows come with features.
    """

    vocabulary: int
    seen: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, counted: SparseRows, vocabulary: int, queries: int | None = None) -> "RowFeatures":
        """Collect the features of counted rows, and the document frequencies of words in the first `queries` rows."""
        queries = counted.rows if queries is None else queries
        seen, place = np.unique(counted.ids, return_inverse=True)
        frequency = np.bincount(place[: counted.offsets[queries]], minlength=len(seen))
        factors = inverse_document_frequency(frequency, queries) if vocabulary else np.ones(len(seen), np.float32)
        return cls(vocabulary, seen.astype(np.int32), factors)

    def __call__(self, inputs: Inputs) -> SparseRows:
        """Return unit rows with features numbered [0, F); features that no training row has are left out."""
        return self.weigh(count_features(inputs, self.vocabulary))

    def weigh(self, counted: SparseRows) -> SparseRows:
        """Scale counted rows by `factors`, and return them as unit rows."""
        numbers, known = find_features(self.seen, counted.ids)
        kept = counted.keep(known)._replace(ids=numbers)
        return normalize_rows(scale_features(kept, self.factors))


def find_features(seen: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions int32 in `seen` [F], ascending, of the `features` [n] that are there; and which are, [n]."""
    place = np.searchsorted(seen, features)
    known = place < len(seen)
    known[known] = seen[place[known]] == features[known]
    return place[known].astype(np.int32), known


def count_features(inputs: Inputs, vocabulary: int) -> SparseRows:
    """Return the counts of each row's words and word pairs if there is a `vocabulary`, else each row's features."""
    if vocabulary and inputs.tokens is not None:
        counted = count_words(inputs.tokens, vocabulary, damped=False)
        return counted._replace(ids=counted.ids.astype(np.int32))
    assert inputs.features is not None, "rows have neither tokens nor features"
    return inputs.features


@dataclass(frozen=True, eq=False)
class LinearRanker:
    """Scores labels [0, `labels`) for a row; `weights` lists the labels of each feature with their weights."""

    words: RowFeatures
    weights: SparseRows
    labels: int
    file: MappedFile | None = None  # the file that contains the weights

    @classmethod
    def of(
        cls,
        data: DataLayout,
        training_data: "Data",
        columns: Sequence[str],
        budget: int = BUDGET,
        held_out: bool = False,
        seconds: float = math.inf,
    ) -> "LinearRanker | None":
        """Fit to the training rows of a run, in the `columns` that the run's encoder reads, and to the label texts.

        The fit uses the first rows of each part of a version that fit into the part's share of `budget` bytes. As long
        as the fit would take more than `seconds`, the number of rows is halved. Returns None if no rows fit, or if rows
        have only dense vectors. With `held_out`, the rows that the run held out are used as well. Raises TableError.
        """
        labels, table = Table.open(data.labels, "labels"), open_queries(data, training_data.split)
        columns = [name for name in columns if name != DENSE]
        if not columns:
            return None
        vocabulary = Table.open(data.tokenizer, "tokenizer").parameters["vocabulary"] if "input_ids" in columns else 0
        shares = [training_data.training_rows, *([training_data.held_out_rows] if held_out else [])]
        left, points = budget, list[Points]()
        for share in shares:
            parts = [(part, share.rows(part)) for part in table.by_part()]
            for number, (part, rows) in enumerate(parts):
                to_come = sum(rows for _, rows in parts[number:])
                groups = share.batches(part, [*columns, "label_ids"])
                taken = [*_first(groups, vocabulary, left * rows // max(1, to_come))]
                left -= _ENTRY_BYTES * sum(len(each.rows.ids) for each in taken)
                points += taken
        queries = sum(part.rows.rows for part in points)
        entries = sum(len(part.rows.ids) for part in points)
        if not entries:
            return None
        if {*columns} <= {*labels.columns}:
            first = 0
            for group in labels.batches(columns):
                own = np.arange(first, first + group.num_rows)
                points.append(Points(count_features(Inputs.of(group), vocabulary), Ragged.from_matrix(own[:, None])))
                first += group.num_rows
        joined = Points(SparseRows.join(part.rows for part in points), Ragged.join(part.labels for part in points))
        fitted = cls.fit(joined, labels.rows, vocabulary, queries, seconds)
        return fitted or cls.of(data, training_data, columns, _ENTRY_BYTES * entries // 2, held_out, seconds)

    @classmethod
    def fit(
        cls, points: Points, labels: int, vocabulary: int, queries: int | None = None, seconds: float = math.inf
    ) -> "LinearRanker | None":
        """Fit to `points` with labels in [0, `labels`); document frequencies come from the first `queries` points.

        Returns None if the fit would take more than `seconds`.
        """
        from scoring.solver import fit_labels
        from trainer.rows.numba_kernels import by_row

        words = RowFeatures.of(points.rows, vocabulary, queries)
        x, features = words.weigh(points.rows), len(words.seen)
        columns = SparseRows(*by_row(x.ids, x.row_of().astype(np.int32), x.values, features))
        owners = points.labels.row_of()
        of_label, _, offsets = by_row(points.labels.entries, owners, owners, labels)
        smallest = _SMALLEST / np.sqrt(max(1.0, len(x.ids) / x.rows))
        weights = fit_labels(x, features, columns, Ragged(of_label, offsets), smallest, seconds)
        return None if weights is None else cls(words, weights, labels)

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (w.x float32 [B, k], ids [B, k]), best first, padded with 0 and -1; correct labels have about 2."""
        return best_labels(self.words(inputs), self.weights, self.labels, k)

    def votes(self, inputs: Inputs, k: int) -> SparseRows:
        """Return the best `k` labels of each row with scores above 0, in ascending order of labels."""
        scores, ids = self.rank(inputs, k)
        order = np.argsort(ids, axis=1)
        ids, scores = take_per_row(ids, order), take_per_row(scores, order)
        found = ids != PAD
        return SparseRows(ids[found], scores[found], offsets_of(found.sum(1)))

    def explain(self, tokens: np.ndarray, label: int) -> list[tuple[tuple[int, ...], float]]:
        """Return the words and pairs of words in a text's `tokens`, with their contributions to w.x, largest first."""
        names = sorted({*((word,) for word in tokens.tolist()), *itertools.pairwise(tokens.tolist())})
        listed = np.fromiter(itertools.chain.from_iterable(names), np.int64)
        each = Ragged.from_counts(listed, np.array([*map(len, names)], np.int64))
        counted = count_features(Inputs(each), self.words.vocabulary)
        last = counted.ids[counted.offsets[1:] - 1].tolist()  # the feature of a pair has a greater id than its words
        x, added = self.words(Inputs(Ragged.from_matrix(tokens[None]))), {}
        for place, value in zip(x.ids.tolist(), x.values.tolist(), strict=True):
            of_feature = slice(*self.weights.offsets[place : place + 2])
            weights = self.weights.values[of_feature][self.weights.ids[of_feature] == label]
            added[int(self.words.seen[place])] = value * float(weights.sum())
        found = [(name, added.get(feature, 0.0)) for name, feature in zip(names, last, strict=True)]
        return sorted((pair for pair in found if pair[1]), key=lambda pair: -pair[1])

    @classmethod
    def read(cls, table: Table, name: str = FILE) -> "LinearRanker | None":
        """Read the file of `table` that `write` wrote; None if the table has no ranker. Raises TableError."""
        from safetensors import SafetensorError

        try:
            opened = open_arrays(table, name)
            if opened is None:
                return None
            arrays, file = opened
            vocabulary, labels = arrays["sizes"].tolist()
            weights = SparseRows(*(arrays[name] for name in _WEIGHTS))
            if not (
                len(arrays["seen"]) == weights.rows
                and 0 <= weights.ids.min(initial=0) <= weights.ids.max(initial=0) < labels
            ):
                raise ValueError("the arrays are inconsistent")
            return cls(RowFeatures(vocabulary, arrays["seen"], arrays["factors"]), weights, labels, file)
        except (SafetensorError, KeyError, ValueError) as error:
            raise TableError(f"{table.url}/{name}: not a linear ranker: {error}. Fit the fusion again.") from None

    def write(self, url: str, name: str = FILE) -> Shard:
        from safetensors.numpy import save

        arrays = dict(zip(_WEIGHTS, self.weights, strict=True))
        arrays |= {"seen": self.words.seen, "factors": self.words.factors}
        return write_file(url, name, save({"sizes": np.array([self.words.vocabulary, self.labels]), **arrays}))


def open_arrays(table: Table, name: str) -> tuple[dict[str, np.ndarray], MappedFile | None] | None:
    """Return the arrays of the safetensors file `name` of a fusion, and the file if it is local and thus mapped.

    Returns None if the table has no such file. Raises TableError for a damaged one; SafetensorError, ValueError or
    KeyError for other content.
    """
    from safetensors.numpy import load

    shard = next((shard for shard in table.shards if shard.path == name), None)
    if shard is None:
        return None
    if not storage.is_local(table.url):
        return load(read_shard(table.url, shard, "Fit the fusion again.")), None
    place = storage.filesystem(verify_shard(table.url, shard, remedy="Fit the fusion again."))[1]
    file = MappedFile(place, shard.bytes, private=True)
    return map_tensors(file), file


def best_labels(x: SparseRows, weights: SparseRows, labels: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return w.x above 0, float32 [B, k], and label ids [B, k]: best first, ties by id, padded with 0 and -1."""
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
        sums = np.bincount(np.concatenate([weights.ids[each] for each in lists]), added, labels).astype(np.float32)
        best = np.flatnonzero(sums > 0)  # zeros come out first: a partition among many zeros takes eight times as long
        if len(best) > k:
            best = best[sums[best] >= np.partition(sums[best], -k)[-k]]
        best = best[np.argsort(-sums[best], kind="stable")][:k]
        found[row, : len(best)], scores[row, : len(best)] = best, sums[best]
    return scores, found


def _first(groups: Iterator[pa.Table], vocabulary: int, budget: int) -> Iterator[Points]:
    """Yield the first rows that fit into `budget` bytes, one row group at a time."""
    left = budget
    for group in groups:
        rows, labels = count_features(Inputs.of(group), vocabulary), list_column(group, "label_ids")
        ends = np.cumsum(_ENTRY_BYTES * np.diff(rows.offsets))
        count = int(np.searchsorted(ends, left, side="right"))
        yield Points(rows.slice(0, count), labels.slice(0, count))
        if count < group.num_rows:
            return
        left -= int(ends[-1]) if count else 0
