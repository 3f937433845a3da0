"""Queries of clustered labels with a known truth, written as a stream; equal sizes give equal bytes.

A cluster has FACETS facets with EACH labels. A query is about one facet of one cluster: the labels of the facet are
right, the other labels of the cluster are wrong neighbours. The text has words of the cluster, words of the facet and
random words. A share HIDDEN of the queries has no word of the facet, so that the text does not determine the facet.
Words are numbers of sparse features, the fastest form of input.

Training queries cover so many clusters that each covered label has POINTS points on average. All other labels are never
right, but are also candidates. Random numbers come from Philox, keyed by the split and the block of rows.
"""

import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FACETS, EACH = 16, 5
CLUSTER = FACETS * EACH  # labels per cluster
POINTS = 16
HIDDEN = 0.1
# Words per cluster or facet; the number of them in a query; and the number of words of all clusters.
CLUSTER_POOL, CLUSTER_WORDS, CLUSTER_VOCABULARY = 8, 5, 20_000
FACET_POOL, FACET_WORDS, FACET_VOCABULARY = 3, 2, 500_000
NOISE_WORDS, NOISE_VOCABULARY = 2, 10_000
WORDS = CLUSTER_WORDS + FACET_WORDS + NOISE_WORDS
VOCABULARY = CLUSTER_VOCABULARY + FACET_VOCABULARY + NOISE_VOCABULARY
BLOCK = 1 << 16  # rows drawn at a time
_SPLITS = {"train": 0, "test": 1}
_OF_CLUSTERS, _OF_FACETS = 1, 2  # keys of the hashes
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class QueryDistribution:
    """Parameters of the queries: `labels` in total; only the labels of `clusters` clusters are right for any query."""

    labels: int
    clusters: int
    seed: int = 0

    @classmethod
    def of(cls, queries: int, labels: int, seed: int = 0) -> "QueryDistribution":
        """Cover as many clusters as `queries` training queries fill. Raises ValueError if there are too few labels."""
        if labels < CLUSTER:
            raise ValueError(f"{labels} labels; a cluster has {CLUSTER}")
        wanted = max(1, round(queries / (POINTS * FACETS)))
        return cls(labels, min(wanted, labels // CLUSTER), seed)

    @property
    def covered(self) -> int:
        """Number of labels that are right for at least one query."""
        return self.clusters * CLUSTER

    @property
    def best(self) -> float:
        """Best possible mean P@1 and P@5: if a query has no words of its facet, the facet is a guess."""
        return 1 - HIDDEN * (1 - 1 / FACETS)

    def draw(self, split: str, start: int, stop: int) -> "Queries":
        """Draw the queries [start, stop) of `split`, which are in one block."""
        block = start // BLOCK
        bits = np.random.Philox(key=[self.seed, _SPLITS[split]], counter=[0, block, 0, 0])
        draw, rows = np.random.Generator(bits), np.arange(start - block * BLOCK, stop - block * BLOCK)
        facets = draw.integers(0, self.clusters * FACETS, BLOCK)[rows]
        hidden = (draw.random(BLOCK) < HIDDEN)[rows]
        of_cluster = _some(draw, CLUSTER_POOL, CLUSTER_WORDS)[rows]
        of_facet = _some(draw, FACET_POOL, FACET_WORDS)[rows]
        noise = draw.integers(0, NOISE_VOCABULARY, (BLOCK, NOISE_WORDS + FACET_WORDS))[rows]
        words = np.empty((len(rows), WORDS), np.int32)
        first, second = CLUSTER_WORDS, CLUSTER_WORDS + FACET_WORDS
        words[:, :first] = _hashed(_OF_CLUSTERS, facets[:, None] // FACETS, of_cluster) % CLUSTER_VOCABULARY
        words[:, first:second] = CLUSTER_VOCABULARY + (
            _hashed(_OF_FACETS, facets[:, None], of_facet) % FACET_VOCABULARY
        )
        words[:, second:] = CLUSTER_VOCABULARY + FACET_VOCABULARY + noise[:, :NOISE_WORDS]
        meaningless = CLUSTER_VOCABULARY + FACET_VOCABULARY + noise[:, NOISE_WORDS:]
        words[hidden, first:second] = meaningless[hidden]
        return Queries(words, self.label_ids(facets[:, None] * EACH + np.arange(EACH)))

    def label_ids(self, places: np.ndarray) -> np.ndarray:
        """Return the ids int64 of the labels at `places`; ids of one cluster are spread over all labels."""
        return places * self._step % self.labels

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the cluster of each label id, int64; clusters from `clusters` on have no queries."""
        return ids * pow(self._step, -1, self.labels) % self.labels // CLUSTER

    @property
    def _step(self) -> int:
        """A number coprime to `labels`, whose multiples spread over all labels."""
        step = max(1, round(self.labels * _GOLDEN))
        while math.gcd(step, self.labels) > 1:
            step += 1
        return step


@dataclass(frozen=True)
class Queries:
    """Queries: `words` int32 [n, WORDS], and right `labels` int64 [n, EACH]."""

    words: np.ndarray
    labels: np.ndarray


def write_clustered(folder: Path, distribution: QueryDistribution, train: int, test: int) -> int:
    """Write `train` and `test` queries as sparse matrices (form `xc-sparse`) to `folder`; return the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)

    def words(queries: Queries) -> np.ndarray:
        return queries.words

    def labels(queries: Queries) -> np.ndarray:
        return queries.labels

    for split, short, rows in (("train", "trn", train), ("test", "tst", test)):
        write_matrix(folder / f"{short}_X_Xf.npz", rows, VOCABULARY, WORDS, blocks(distribution, split, rows, words))
        write_matrix(
            folder / f"{short}_X_Y.npz", rows, distribution.labels, EACH, blocks(distribution, split, rows, labels)
        )
    return sum(file.stat().st_size for file in folder.iterdir())


def blocks(
    distribution: QueryDistribution, split: str, rows: int, take: Callable[[Queries], np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the result of `take` for the first `rows` queries of `split`, one block at a time."""
    for start in range(0, rows, BLOCK):
        yield take(distribution.draw(split, start, min(start + BLOCK, rows)))


def write_matrix(path: Path, rows: int, columns: int, each: int, indices: Iterator[np.ndarray]) -> None:
    """Write a matrix with `each` ones per row, like `scipy.sparse.save_npz`, but without the matrix in memory."""
    with zipfile.ZipFile(path, "w") as file:
        for name, value in (("format", np.array(b"csr")), ("shape", np.array([rows, columns], np.int64))):
            _write_array(file, name, value.dtype, value.shape, iter([value]))
        ends = (np.arange(low, min(low + BLOCK, rows + 1), dtype=np.int64) * each for low in range(0, rows + 1, BLOCK))
        _write_array(file, "indptr", np.dtype(np.int64), (rows + 1,), ends)
        _write_array(file, "indices", np.dtype(np.int32), (rows * each,), (some.astype(np.int32) for some in indices))
        ones = (np.ones(min(BLOCK, rows - low) * each, np.int8) for low in range(0, rows, BLOCK))
        _write_array(file, "data", np.dtype(np.int8), (rows * each,), ones)


def _write_array(
    file: zipfile.ZipFile, name: str, dtype: np.dtype, shape: tuple[int, ...], parts: Iterator[np.ndarray]
) -> None:
    with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as out:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, header)
        for part in parts:
            out.write(np.ascontiguousarray(part).tobytes())


def _some(draw: np.random.Generator, pool: int, count: int) -> np.ndarray:
    """Draw `count` distinct numbers of [0, pool) for every row of a block."""
    return np.argsort(draw.random((BLOCK, pool)), axis=1)[:, :count]


def _hashed(key: int, *numbers: np.ndarray) -> np.ndarray:
    """Return a hash of the numbers, int64 of 31 bits (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        value: np.ndarray = np.array(key, np.uint64)
        for number in numbers:
            value = (value + number.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    hashed: np.ndarray = (value >> np.uint64(33)).astype(np.int64)
    return hashed
