"""Exact best k of inner products: equal scores by label, NaN an error, the same keys on every device.

A candidate is a uint64 key that sorts as its score. The last bits of a product of matrices depend on its shape, and so
on the number of blocks. Therefore products only find candidates. Every candidate is scored again, one pair at a time,
and a bound on the rounding errors proves that no other label can be in the result.

Faiss and PyTorch are loaded when they are first needed: a trainer may need only the keys.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schemas import PAD
from schemas.errors import DivergedError, InputError
from schemas.process import free_memory, one_thread_in_children
from schemas.ragged import Ragged, pad_columns
from search import NOT_A_NUMBER

if TYPE_CHECKING:
    import faiss

EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # no candidate; sorts last
MOST_LABELS = 1 << 32
CPU = "cpu"
_DRIVER = Path("/dev/nvidiactl")
_SLACKS = 8, 256  # extra labels to fetch for a proof; the second number is for rows that the first leaves without one
_CODED_SLACKS = 128, 1024  # like _SLACKS, for codes: the error of a code is about 1 % of a vector
_CODED = 1 << 12  # fewest rows of a block with codes
_CODES_SHARE = 3  # codes take at most 1 / _CODES_SHARE of the free memory; Faiss copies them once
# Below this number of queries, codes are faster than a matrix product. The keys are bytes per number: half precision
# must be widened for a matrix product.
_FEW = {4: 8, 2: 64}
_MANY = 1024  # Faiss's blocked search is faster from this number of queries on; below, it is up to six times slower
_MANY_ALONE = 8  # the same if Faiss uses one thread, because several threads call Faiss
_SCORES = 1 << 20  # scores in memory at a time
_PAIRS, _WIDE_PAIRS = 1 << 22, 1 << 25  # the same for rows without a proof; half precision is widened for more of them
_FEW_PAIRS = 1 << 12
_WIDENED = 1 << 21  # half-precision numbers that are widened at a time
_GATHERED = 1 << 18  # half-precision numbers that are gathered and widened at a time
_ROUNDED = 1 << 10  # vectors that are rounded to codes at a time
_LANES = 16
_ZERO = np.float32(128)  # the code of the number zero
_SCORE_ALL_LOCK = threading.Lock()  # lets one thread at a time score all labels of a block
os.register_at_fork(
    before=_SCORE_ALL_LOCK.acquire, after_in_parent=_SCORE_ALL_LOCK.release, after_in_child=_SCORE_ALL_LOCK.release
)


def pack(label_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return uint64 keys of `label_ids` (integers in [0, 2^32), PAD: no label) and `scores` (float32, same shape).

    In ascending order of keys, the best score comes first; among equal scores, the smaller label comes first. So a
    merge is a sort, and its result does not depend on the order of the blocks.
    """
    bits = (scores + np.float32(0)).view(np.int32)  # + 0 turns -0 into 0, so that -0 and 0 are the same score
    # An IEEE float is a sign and a magnitude. For positive numbers, all bits except the sign are flipped. As unsigned
    # integers, the floats then sort in descending order. The bits are flipped in place, because these arrays are the
    # largest of a search.
    downward = bits >> 31
    np.invert(downward, out=downward)
    downward &= np.int32(0x7FFFFFFF)
    downward ^= bits
    halves = np.empty((*bits.shape, 2), "<u4")
    halves[..., 0], halves[..., 1] = label_ids, downward.view(np.uint32)
    keys = halves.view("<u8")[..., 0]
    np.copyto(keys, EMPTY, where=label_ids == PAD)
    return keys


def unpack(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (label_ids int64, scores float32) of uint64 keys; an EMPTY key gives PAD and -inf."""
    label_ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    label_ids[keys == EMPTY] = PAD
    return label_ids, scores_of(keys)


def scores_of(keys: np.ndarray) -> np.ndarray:
    """Return the float32 scores of uint64 keys; -inf for EMPTY."""
    downward = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    # The operation in `pack` is its own inverse.
    bits = np.invert(downward >> 31)
    bits &= np.int32(0x7FFFFFFF)
    bits ^= downward
    scores = bits.view(np.float32)
    scores[keys == EMPTY] = -np.inf
    return scores


def best(keys: np.ndarray, width: int) -> np.ndarray:
    """Return the best `width` keys of each row, best first: [B, C] -> [B, width], padded with EMPTY if C < width."""
    if keys.shape[1] > width:
        return np.sort(np.partition(keys, width - 1, axis=1)[:, :width], axis=1)
    return pad_columns(np.sort(keys, axis=1), width, EMPTY)


def merge(blocks: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return the best `width` keys of each row over P blocks: arrays [B, K] -> [B, width]. Blocks share no label."""
    return best(np.concatenate(blocks, axis=1), width)


@dataclass(frozen=True)
class Block:
    """Labels [start, start + n), with `vectors` [n, D] and an index over the vectors, or None for exact search.

    Vectors are float32 or float16, and may be mapped from a file. Parts of float16 vectors are widened as they are
    read. Exact search runs on `device` (cpu, or a PyTorch device), with the same result on every device. With `coded`,
    codes of one byte per number are kept in memory, which pays off for many searches of a few queries each.
    """

    start: int
    vectors: np.ndarray
    index: "faiss.Index | None" = None
    device: str = CPU
    coded: bool = False

    @property
    def stop(self) -> int:
        """End of the range of labels, exclusive."""
        return self.start + len(self.vectors)

    @property
    def exact(self) -> "Block":
        """The same block without its index."""
        return self if self.index is None else self._without_index

    @cached_property
    def _without_index(self) -> "Block":
        return replace(self, index=None)  # not for a block without an index: a cycle would keep its vectors in memory

    @cached_property
    def codes(self) -> "Codes | None":
        """Codes of one byte per number, which make a scan much faster; None if they save no time, or do not fit."""
        if not self.coded or self.device != CPU or len(self.vectors) < _CODED:
            return None
        return None if _CODES_SHARE * self.vectors.size > free_memory() else Codes.of(self.vectors)

    @cached_property
    def longest(self) -> float:
        """Largest norm of a vector."""
        if self.codes is not None:
            return self.codes.longest_vector
        return max((_longest(rows) for _, rows in iterate_float32(self.vectors)), default=0.0)

    def prepare(self) -> None:
        """Compute cached values now, before the first search, so that forked processes share them."""
        _ = self.codes, self.longest

    @cached_property
    def on_device(self) -> Any:
        """The vectors on `device`, which is not the CPU."""
        from search.torch_topk import DeviceVectors

        return DeviceVectors(self.vectors, self.device)


def search(block: Block, queries: np.ndarray, width: int, refine: int = 1) -> np.ndarray:
    """Return keys [B, width] of the block's best labels for `queries` float32 [B, D].

    If the block has fewer than `width` labels, the last keys are EMPTY. An index returns `refine` times `width`
    candidates, which are then ranked by exact scores. A query that finds too few labels in the inverted lists is
    searched exactly. Raises ExtremisError if a query, or a vector that is searched exactly, is not finite.
    """
    if block.index is None or not len(queries):
        return search_exactly(block, queries, width)
    if not np.isfinite(queries).all():
        raise DivergedError(NOT_A_NUMBER)
    keys, found = search_index(block, queries, width, refine)
    short = np.flatnonzero(found < min(width, len(block.vectors)))
    if short.size:
        keys[short] = search_exactly(block, queries[short], width)
    return keys


def search_index(block: Block, queries: np.ndarray, width: int, refine: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys [B, width] of the best candidates that the index finds, and the number of candidates, int64 [B]."""
    assert block.index is not None
    fetch = min(len(block.vectors), width * refine + _SLACKS[0])
    _, positions = block.index.search(pad_vectors(queries, block.index.d, copy=False), fetch)
    return best(_keys(block, queries, positions), width), (positions >= 0).sum(axis=1)


def search_exactly(block: Block, queries: np.ndarray, width: int) -> np.ndarray:
    """Search exactly; ties are broken by label id. The result is the same as after sorting all labels.

    Raises ExtremisError if a query or a vector is not finite.
    """
    few = len(queries) < _FEW[block.vectors.dtype.itemsize]
    return _search_exactly(block, queries, width, _CODED_SLACKS + _SLACKS if few and block.codes else _SLACKS)


def _search_exactly(block: Block, queries: np.ndarray, width: int, slacks: Sequence[int]) -> np.ndarray:
    """Search with the `slacks` in turn until every row's result is proved; score all labels for rows still unproved."""
    rows = len(block.vectors)
    fetch, codes = min(rows, width + slacks[0]), block.codes if slacks[0] in _CODED_SLACKS else None
    # Two float32 computations of one inner product, with sums in any order, differ by at most 2·D·ε·‖x‖·‖w‖.
    bound = 2 * block.vectors.shape[1] * np.finfo(np.float32).eps
    noise = np.asarray(bound * norms(queries) * block.longest)
    if not np.isfinite(noise).all():
        raise DivergedError(NOT_A_NUMBER)
    if codes is not None:
        approximate, positions, error = codes.search(queries, fetch)
        noise += error
    elif block.device == CPU:
        approximate, positions = _nearest(queries, block.vectors, fetch)
    else:
        approximate, positions = block.on_device.nearest(queries, fetch)
    keys = best(_keys(block, queries, positions), width)
    if fetch == rows:
        return keys
    # A label that was not fetched scores at most approximate[:, -1], up to the rounding errors of both computations.
    unsure = np.flatnonzero(~(scores_of(keys[:, -1]) > approximate[:, -1] + noise))
    if not unsure.size:  # every row has a proof, so the vectors are not read again
        return keys
    if len(slacks) > 1:
        keys[unsure] = _search_exactly(block, queries[unsure], width, slacks[1:])
        return keys
    at_once = max(1, (_PAIRS if block.vectors.dtype == np.float32 else _WIDE_PAIRS) // rows)
    for some in np.split(unsure, range(at_once, len(unsure), at_once)):
        with _SCORE_ALL_LOCK:
            keys[some] = _search_all(block, queries[some], width, noise[some])
    return keys


def _search_all(block: Block, queries: np.ndarray, width: int, noise: np.ndarray) -> np.ndarray:
    """Score all labels and return exact keys [B, width], even if many labels tie or nearly tie for last place."""
    approximate = np.hstack([queries @ rows.T for _, rows in iterate_float32(block.vectors)])  # [B, n]
    last = approximate.shape[1] - width
    floor = np.partition(approximate, last, axis=1)[:, last] - 2 * noise
    rows, columns = np.nonzero(approximate >= floor[:, None])
    positions = Ragged.from_counts(columns, np.bincount(rows, minlength=len(queries))).padded()
    return best(_keys(block, queries, positions), width)


def _keys(block: Block, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
    label_ids = np.where(positions < 0, positions, positions + block.start) if block.start else positions
    return pack(label_ids, score(queries, block.vectors, positions))


def score(queries: np.ndarray, vectors: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return inner products float32 [B, C] of queries [B, D] with vectors[positions], positions int64 [B, C].

    The score of a pair depends only on the two vectors, not on the batch or block. A negative position scores -inf.
    """
    queries, positions = np.ascontiguousarray(queries, np.float32), np.ascontiguousarray(positions, np.int64)
    scores = np.empty(positions.shape, np.float32)
    if vectors.dtype != np.float16:
        _multiply(queries, np.ascontiguousarray(vectors, np.float32), positions, scores)
        return scores
    step = max(1, _GATHERED // max(1, positions.shape[1] * vectors.shape[1]))
    for start in range(0, len(queries), step):
        of_some = positions[start : start + step]
        rows = vectors.take(np.maximum(of_some, 0).reshape(-1), axis=0).astype(np.float32)
        places = np.where(of_some < 0, of_some, np.arange(of_some.size).reshape(of_some.shape))
        _multiply(queries[start : start + step], rows, places, scores[start : start + step])
    return scores


def _multiply(queries: np.ndarray, vectors: np.ndarray, positions: np.ndarray, scores: np.ndarray) -> None:
    import faiss

    arrays = (faiss.swig_ptr(array) for array in (scores, queries, vectors, positions))
    with one_thread() if positions.size < _FEW_PAIRS else contextlib.nullcontext():  # waking other threads takes longer
        faiss.fvec_inner_products_by_idx(*arrays, vectors.shape[1], *positions.shape)  # type: ignore[attr-defined]


def _nearest(queries: np.ndarray, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the best `count` <= n products of queries [B, D] with vectors [n, D], up to rounding, ties in any order.

    Returns scores float32 [B, count], best first, and positions int64 [B, count].
    """
    import faiss

    knn, metric = faiss.knn, faiss.METRIC_INNER_PRODUCT
    many = len(queries) >= (_MANY if faiss_threads() > 1 else _MANY_ALONE)
    if many and vectors.dtype == np.float32:
        return knn(queries, vectors, count, metric=metric)  # type: ignore[no-any-return]
    scores = np.empty((len(queries), 0), np.float32)
    positions = np.empty((len(queries), 0), np.int64)
    most = len(vectors) if vectors.dtype == np.float32 else _WIDENED // vectors.shape[1]
    step = max(4 * count, most if many else min(most, _SCORES // max(1, len(queries))))
    for start, rows in iterate_float32(vectors, step):
        if many:
            more, where = knn(queries, rows, min(count, len(rows)), metric=metric)
            where += start
        else:
            more = queries @ rows.T
            if scores.shape[1] < count:
                where = np.broadcast_to(np.arange(start, start + len(rows)), more.shape)
            else:
                more, where = _above(more, scores.min(axis=1), start)
        scores, positions = np.hstack([scores, more]), np.hstack([positions, where])
        if scores.shape[1] > count:
            picked = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, -count:]
            scores, positions = np.take_along_axis(scores, picked, 1), np.take_along_axis(positions, picked, 1)
    order = np.argsort(-scores, axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)


def _above(block: np.ndarray, bound: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of block [B, n] above each row's bound [B], padded, and their positions, counted from `start`."""
    row, column = np.divmod(np.flatnonzero(block > bound[:, None]), block.shape[1])
    counts = np.bincount(row, minlength=len(block))
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    scores = np.full((len(block), counts.max(initial=0)), -np.inf, np.float32)
    positions = np.zeros(scores.shape, np.int64)
    scores[row, place] = block[row, column]
    positions[row, place] = start + column
    return scores, positions


class Codes(NamedTuple):
    """Vectors that are rounded to codes of one byte per number; `scale` [D] is the unit of each column.

    `error`: largest distance between a vector and its code; `error_of_others`: without the column `widest`, which has
    the largest unit. `longest_code` and `longest_vector`: largest norms. `rounds`: Faiss rounds queries to whole
    numbers, which depends on the processor and the number of columns.
    """

    quantizer: "faiss.IndexScalarQuantizer"
    scale: np.ndarray
    error: float
    longest_code: float
    longest_vector: float
    rounds: bool
    widest: int
    error_of_others: float

    @classmethod
    def of(cls, vectors: np.ndarray) -> "Codes | None":
        """Round `vectors` [n, D] to codes; None if a value is not finite."""
        import faiss

        # The largest magnitude of each column, by its bits without the sign: NaN counts as largest.
        bits = vectors.view(f"u{vectors.itemsize}")
        most = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
        parts = [(bits[start : start + _ROUNDED] & most).max(0) for start in range(0, len(bits), _ROUNDED)]
        largest = np.max(parts, 0).view(vectors.dtype).astype(np.float32)
        if not np.isfinite(largest).all():
            return None
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        columns = -(-vectors.shape[1] // _LANES) * _LANES
        kind = faiss.ScalarQuantizer.QT_8bit_direct_signed
        index = faiss.IndexScalarQuantizer(columns, kind, faiss.METRIC_INNER_PRODUCT)
        codes = np.full((len(vectors), columns), _ZERO, np.uint8)
        widest, error, error_of_others, longest_code, longest_vector = int(scale.argmax()), 0.0, 0.0, 0.0, 0.0
        for start, rows in iterate_float32(vectors, _ROUNDED):
            longest_vector = max(longest_vector, _longest(rows))
            rounded = rows / scale
            np.rint(rounded, out=rounded)
            codes[start : start + len(rows), : rows.shape[1]] = rounded + _ZERO
            longest_code = max(longest_code, _longest(rounded))
            rounded *= scale
            rounded -= rows
            error = max(error, _longest(rounded))
            rounded[:, widest] = 0
            error_of_others = max(error_of_others, _longest(rounded))
        index.add_sa_codes(codes)  # all at once, because the memory of an index grows by doubling
        probe = np.linspace(-1, 1, columns, dtype=np.float32)[None]
        found, position = index.search(probe, 1)
        expected = float(index.reconstruct(int(position[0, 0])) @ probe[0])
        rounds = abs(expected - float(found[0, 0])) > 1e-3 * longest_code
        return cls(index, scale, error, longest_code, longest_vector, rounds, widest, error_of_others)

    @property
    def view(self) -> np.ndarray:
        """The codes uint8 [n, D], without a copy."""
        import faiss

        rows, columns = self.quantizer.ntotal, self.quantizer.d
        codes = faiss.rev_swig_ptr(self.quantizer.codes.data(), rows * columns)  # type: ignore[attr-defined]
        return np.asarray(codes).reshape(rows, columns)

    def search(self, queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the best scores [B, width] of queries [B, D], their positions, and bounds [B] on the score errors."""
        scaled, unit, error = queries * self.scale, np.ones((1, 1), np.float32), self.error * norms(queries)
        if self.rounds:
            scaled, unit, lost = self.round(queries)
            error += lost
        with one_thread() if len(queries) == 1 else contextlib.nullcontext():
            products, positions = self.quantizer.search(pad_vectors(scaled, self.quantizer.d, copy=False), width)
        return products * unit, positions, error

    def round(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return queries [B, D] rounded to whole numbers, units of products [B, 1], and bounds [B] on what is lost."""
        scaled = queries * self.scale
        unit = np.maximum(np.abs(scaled).max(1), np.finfo(np.float32).tiny)[:, None] / np.float32(127)
        rounded = np.rint(scaled / unit)
        return rounded, unit, self.longest_code * norms(scaled - rounded * unit)


def norms(rows: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("nd,nd->n", rows, rows))


def _longest(rows: np.ndarray) -> float:
    return float(norms(rows).max(initial=0))


def iterate_float32(vectors: np.ndarray, rows: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, float32 rows [n, D]) of vectors [N, D], `rows` rows at a time.

    With `rows` = 0, float32 vectors are yielded all at once, and float16 vectors in parts.
    """
    step = rows or (len(vectors) if vectors.dtype == np.float32 else _WIDENED // vectors.shape[1])
    for start in range(0, len(vectors), max(1, step)):
        yield start, vectors[start : start + step].astype(np.float32, copy=False)


def pad_vectors(rows: np.ndarray, dimension: int, copy: bool = True) -> np.ndarray:
    """Return `rows` [n, D] as float32 [n, dimension], padded with zeros. `copy`: always make a copy."""
    if rows.shape[1] == dimension:
        return rows.astype(np.float32, copy=copy)
    wide = np.zeros((len(rows), dimension), np.float32)
    wide[:, : rows.shape[1]] = rows
    return wide


def find_device(name: str) -> str:
    """Return `cpu` or `cuda:N` for auto, cpu, cuda or cuda:N. Raises InputError if the device does not exist."""
    if name == CPU or (name == "auto" and not _DRIVER.exists()):
        return CPU
    gpus = 0
    with contextlib.suppress(ImportError):
        from search.torch_topk import count_gpus

        gpus = count_gpus()
    if name == "auto" and not gpus:
        return CPU
    number = name.partition(":")[2]
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) % max(1, gpus)
    if index >= gpus:
        expected = f"auto, cpu, or one of the {gpus} GPUs that PyTorch can use on this machine"
        raise InputError(parameter="device", got=repr(name), expected=expected)
    return f"cuda:{index}"


def configure_faiss(threads: int | None) -> None:
    """Set the number of Faiss `threads` in the calling thread, and make Faiss use matrix products for small batches.

    By default, recent versions of Faiss score batches of fewer than a few thousand queries pair by pair, which takes
    eight times as long on two cores.
    """
    import faiss

    faiss.cvar.distance_compute_blas_threshold = 20
    if threads:
        _set_threads(threads)


@one_thread_in_children
def _set_threads(count: int) -> None:
    if faiss := sys.modules.get("faiss"):
        faiss.omp_set_num_threads(count)


def faiss_threads() -> int:
    """Return the number of threads that Faiss uses in the calling thread."""
    import faiss

    return int(faiss.omp_get_max_threads())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, make Faiss use one thread in the calling thread. More threads would break ties at random."""
    import faiss

    before = faiss_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
