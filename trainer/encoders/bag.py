"""The bag of token vectors without PyTorch, as exports use it: options, sparse features with TF-IDF weights, x."""

import itertools
from pathlib import Path

import numpy as np

from schemas.errors import TableError
from schemas.mapped import MapFile, MappedFile, map_tensors
from schemas.ragged import Ragged, SparseRows, counts_of, is_first_key, offsets_of
from trainer.input_kinds import INPUT_NAMES, input_names
from trainer.inputs import Inputs
from trainer.methods.kinds import BagSection, Sizes

PAIR_BUCKETS = 1 << 20  # number of features for pairs of words
MIX = np.uint64(0x9E3779B97F4A7C15)
FINISH = np.uint64(0xD6E8FEB86659FD93)


def scale_features(rows: SparseRows, factors: np.ndarray) -> SparseRows:
    """Multiply each value by the factor of its feature."""
    return rows._replace(values=rows.values * factors[rows.ids])


def normalize_rows(rows: SparseRows) -> SparseRows:
    """Scale each row to unit L2 norm; zero rows stay zero."""
    row_of, values = rows.row_of(), rows.values.astype(np.float64)
    square = np.bincount(row_of, values * values, rows.rows)
    scale = 1 / np.maximum(np.sqrt(square), 1e-12)
    return rows._replace(values=(values * scale[row_of]).astype(np.float32))


def join_rows(left: SparseRows, right: SparseRows) -> SparseRows:
    """Append each row of `right` to the row of `left` with the same index; all ids in `right` must be larger."""
    both = SparseRows.join([left, right])
    # Row i of `left`, followed by row i of `right`.
    return both.take(np.arange(2 * left.rows).reshape(2, -1).T.ravel())._replace(offsets=left.offsets + right.offsets)


def count_ngrams(rows: Ragged, *, ngrams: int, vocabulary: int, buckets: int, damped: bool = True) -> SparseRows:
    """Count the tokens and the hashed n-grams of 2 to `ngrams` tokens in each row.

    Tokens have ids [0, vocabulary), n-grams have ids [vocabulary, vocabulary + buckets). The weight of a feature is 1 +
    ln(count in the row), or the count itself if not `damped`.
    """
    tokens, row_of = rows.values, rows.row_of()
    ends = rows.offsets[1:][row_of]
    size = vocabulary + buckets
    keys = [row_of * size + tokens.astype(np.int64)]
    code = tokens.astype(np.uint64) + np.uint64(1)
    for length in range(2, ngrams + 1):
        code = code[: max(len(tokens) - length + 1, 0)] * MIX + tokens[length - 1 :].astype(np.uint64) + np.uint64(1)
        inside = np.arange(len(code)) + length <= ends[: len(code)]
        mixed = (code[inside] ^ (code[inside] >> np.uint64(32))) * FINISH
        bucket = (mixed >> np.uint64(20)).astype(np.int64) % buckets + vocabulary
        keys.append(row_of[: len(code)][inside] * size + bucket)
    key = np.concatenate(keys)
    key.sort()
    first = np.flatnonzero(is_first_key(key))
    row, features = np.divmod(key[first], size)
    counts = counts_of(np.append(first, len(key)))
    weights = ((1 + np.log(counts)) if damped else counts).astype(np.float32)
    return SparseRows(features, weights, offsets_of(np.bincount(row, minlength=rows.rows)))


def inverse_document_frequency(document_frequency: np.ndarray, documents: int) -> np.ndarray:
    """Return ln((1 + documents) / (1 + df)) + 1 for every feature, float32."""
    return (np.log((1 + documents) / (1 + document_frequency)) + 1).astype(np.float32)


WEIGHTS = "model.safetensors"
_LEAST = 1e-12  # least norm that a vector is divided by


class BagFeatures:
    """Features that a bag reads from a row: tokens, then hashed n-grams, then the data's sparse features.

    N-grams have ids [`vocabulary`, `sparse_from`), sparse features [`sparse_from`, `features`). `dense`: length of a
    row's dense vector. Inputs that the bag does not read get no ids.
    """

    def __init__(self, config: BagSection, vocabulary: int, features: int, dense: int) -> None:
        reads_tokens, reads_features, reads_dense = (part in input_names(config.inputs) for part in INPUT_NAMES)
        if reads_dense and not dense:
            raise ValueError(f"encoder.inputs = {config.inputs!r} needs vectors, but the data has none")
        self._config = config
        self.dense = dense if reads_dense else 0
        self.vocabulary = vocabulary if reads_tokens else 0
        self.sparse_from = self.vocabulary + (config.buckets if reads_tokens and config.ngrams > 1 else 0)
        self.features = self.sparse_from + (features if reads_features else 0)

    def count(self, inputs: Inputs) -> SparseRows:
        """Return the features of each row with their weights before IDF. Raises TableError for an unknown feature."""
        parts = input_names(self._config.inputs)
        if "tokens" not in parts:
            return self._sparse_features(inputs) if "features" in parts else _no_features(inputs)
        if "features" not in parts:
            return self._ngrams(inputs)
        return join_rows(self._ngrams(inputs), self._sparse_features(inputs))

    def weigh(self, inputs: Inputs, weights: np.ndarray) -> SparseRows:
        """Return each row's features with their weights in x; `weights` [F]: IDF times the configured factor."""
        rows = scale_features(self.count(inputs), weights)
        return normalize_rows(rows) if self._config.unit_features else rows

    def dense_of(self, inputs: Inputs) -> np.ndarray | None:
        """Return the dense vectors [B, d]; None if the bag reads no vectors. Raises TableError for another length."""
        dense = inputs.dense if self.dense else None
        if dense is not None and dense.shape[1] != self.dense:
            raise TableError(
                f"a row has a vector of {dense.shape[1]:,} numbers, but the data manifest specifies {self.dense:,}. "
                "Shard the data again."
            )
        return dense

    def _sparse_features(self, inputs: Inputs) -> SparseRows:
        assert inputs.features is not None, "these rows were read without features"
        ids, values, offsets = inputs.features
        if ids.size and not 0 <= ids.min() <= ids.max() < self.features - self.sparse_from:
            raise TableError(
                f"a row contains feature {ids.max() if ids.min() >= 0 else ids.min()}, but the data manifest specifies "
                f"{self.features - self.sparse_from} features. Shard the data again."
            )
        return SparseRows(ids.astype(np.int64) + self.sparse_from, values, offsets)

    def _ngrams(self, inputs: Inputs) -> SparseRows:
        assert inputs.tokens is not None, "these rows were read without tokens"
        config = self._config
        return count_ngrams(inputs.tokens, ngrams=config.ngrams, vocabulary=self.vocabulary, buckets=config.buckets)


def _no_features(inputs: Inputs) -> SparseRows:
    assert inputs.dense is not None, "these rows were read without dense vectors"
    return SparseRows(np.empty(0, np.int64), np.empty(0, np.float32), np.zeros(len(inputs.dense) + 1, np.int64))


class BagInference:
    """Computes x = r(sum_f weight_f E_f + P d) from a mapped file, like `BagEncoder` without dropout.

    Up to rounding, the x of a row does not depend on other rows.
    """

    @classmethod
    def open(cls, section: BagSection, folder: Path, map_file: MapFile, sizes: Sizes, device: str) -> "BagInference":
        """Open the files that `Encoder.write` wrote. Raises ValueError if the file belongs to a different bag."""
        return cls(section, map_file(WEIGHTS), *sizes)

    def __init__(self, config: BagSection, file: MappedFile, vocabulary: int, features: int, dense: int) -> None:
        self._config, self._read = config, BagFeatures(config, vocabulary, features, dense)
        tensors = map_tensors(file)
        self._table, self._weights = tensors["embedding"], tensors["feature_weights"]
        self._layers = {name: tensor.T for name, tensor in tensors.items() if name.endswith((".weight", ".bias"))}
        d, hidden = config.dimension, config.hidden or config.dimension
        shapes: dict[str, tuple[int, ...]] = {"projection.weight": (self._read.dense, d)} if self._read.dense else {}
        if config.relu:
            shapes |= {"dense.bias": (d,)}
        if config.residual:
            shapes |= {"dense.inner.weight": (d, hidden), "dense.inner.bias": (hidden,)}
        if config.hidden:
            shapes |= {"dense.outer.weight": (hidden, d), "dense.outer.bias": (d,)}
        found = {name: tensor.shape for name, tensor in self._layers.items()}
        expected = (self._read.features, d), (self._read.features,)
        if (self._table.shape, self._weights.shape) != expected or found != shapes:
            raise ValueError(f"{Path(file.path).name}: the tensors do not match the encoder of the recipe")

    def embed(self, inputs: Inputs) -> np.ndarray:
        """Return x float32 [B, D]."""
        ids, values, offsets = self._read.weigh(inputs, self._weights)
        x = np.empty((len(offsets) - 1, self._config.dimension), np.float32)
        bounds = offsets.tolist()
        for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
            np.dot(values[start:stop], self._table.take(ids[start:stop], axis=0), out=x[row])
        dense, layers = self._read.dense_of(inputs), self._layers
        if dense is not None:
            x += (self._config.dense_weight * unit(dense)) @ layers["projection.weight"]
        if self._config.relu:
            x = np.maximum(x + layers["dense.bias"], 0)
        if self._config.residual:
            within = np.maximum(x @ layers["dense.inner.weight"] + layers["dense.inner.bias"], 0)
            if self._config.hidden:
                within = within @ layers["dense.outer.weight"] + layers["dense.outer.bias"]
            x += within
        if self._config.normalize:
            x = unit(x)
        return x * np.float32(self._config.scale) if self._config.scale != 1 else x


def unit(rows: np.ndarray) -> np.ndarray:
    """Return rows [B, D] in float32, scaled to length 1; zero rows stay zero."""
    rows = rows.astype(np.float32, copy=False)
    return rows / np.maximum(np.sqrt(np.einsum("bd,bd->b", rows, rows))[:, None], np.float32(_LEAST))
