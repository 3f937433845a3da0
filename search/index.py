"""One Faiss index a block: which one pays, and how it is built.

PyTorch and Faiss each bring an OpenMP runtime, and some builds crash when both are loaded in one process, in one order
or the other (tests/test_import_order.py shows which orders work with the pinned builds). Mining never imports torch.
"""

import contextlib
from collections.abc import Iterator

import faiss
import numpy as np

from schemas.errors import InputError
from search.factory import EXACT, Factory
from search.sample import sample_rows

# Costs in products of two vectors as a blocked matrix product computes them, measured at D = 64 on two cores.
_SCAN = 4.0  # a vector of an inverted list, read one by one
_SCAN_CODES = 0.25  # its 4-bit code, 32 at a time
_FETCHED = 6.0  # a candidate that is kept, ranked and scored again
_QUERY = 500.0  # a query, whatever it finds
_PROBED = 16.0  # of n vectors in 4 √n lists, 16 √n are probed for a recall of 0.95; in finer lists fewer
_MOMENT = 5e9  # some ten seconds: where exact search takes no longer, nothing is gained by missing labels
_REFINE = 4
_KMEANS_ROUNDS = 10
_FEWEST_FOR_PRODUCTS = 20
_LEAST_LISTS = 16


def set_up(threads: int | None) -> None:
    """Set Faiss up in the calling thread: `threads`, and matrix products for small batches, too.

    Recent Faiss compares pair by pair below some thousand queries, which costs eight times as much on two cores.
    """
    faiss.cvar.distance_compute_blas_threshold = _FEWEST_FOR_PRODUCTS
    if threads:
        faiss.omp_set_num_threads(threads)


def candidates(dimension: int, rows: int) -> list[Factory]:
    """What `auto` chooses from for blocks of about `rows` vectors: exact; lists of several sizes, plain or as codes."""
    found = [Factory(EXACT)]
    for share in (1, 2, 4, 8):
        lists = int(share * rows**0.5)
        if lists >= _LEAST_LISTS:
            found += [Factory(f"IVF{lists},Flat"), Factory(f"IVF{lists},PQ{-(-dimension // 2)}x4fs")]
    return found


def cost(factory: Factory, rows: int, blocks: int, queries: int, width: int, nprobe: int | None) -> float:
    """About what building and searching `blocks` blocks of `rows` vectors costs, in products of two vectors."""
    if factory.exact:
        return float(blocks * queries * rows)
    lists = factory.lists
    train = _KMEANS_ROUNDS * min(rows, factory.training_rows()) * lists
    search = _a_query(factory, rows, width, nprobe)
    # Half of exact search at most: below that it is not worth what is missed.
    return _MOMENT + 2 * blocks * (train + rows * lists + queries * search)


def pays(factory: Factory, rows: int, width: int, nprobe: int) -> bool:
    """Whether a query of `nprobe` of an index's lists over `rows` vectors costs less than scoring every vector."""
    return _a_query(factory, rows, width, nprobe) < rows


def _a_query(factory: Factory, rows: int, width: int, nprobe: int | None) -> float:
    lists = factory.lists
    scanned = min(rows, nprobe * rows / lists if nprobe else _PROBED * rows**0.5 * (4 * rows**0.5 / lists) ** 0.5)
    scan, fetched = (_SCAN_CODES, _REFINE * width) if factory.lossy else (_SCAN, width)
    return _QUERY + lists + scan * scanned + _FETCHED * fetched


def build(factory: Factory, vectors: np.ndarray, seed: int) -> faiss.Index | None:
    """An inner-product index over `vectors` float32 [n, D]; None for `exact`, which searches the matrix itself.

    Raises InputError: not a factory string, or too few vectors to train it.
    """
    if factory.exact:
        return None
    rows, dimension = vectors.shape
    index = empty(factory, dimension)
    try:
        with _one_thread() if factory.graph else contextlib.nullcontext():
            index.train(_sample(vectors, factory, seed))
            index.add(vectors)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be built on a block of {rows} vectors: {_reason(error)}. "
            "Give a smaller index, larger blocks, or auto."
        ) from None
    return index


def empty(factory: Factory, dimension: int) -> faiss.Index:
    """The index before training. Raises InputError: not a factory string that makes one."""
    try:
        return faiss.index_factory(dimension, factory.spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be made for {dimension} dimensions: {_reason(error)}. "
            "Give auto, exact, or a Faiss factory string such as IVF1024,Flat."
        ) from None


def lists_of(index: faiss.Index) -> faiss.IndexIVF | None:
    """The inverted file within `index`, whatever transforms vectors before it."""
    return faiss.try_extract_index_ivf(index)


def graph_of(index: faiss.Index) -> faiss.IndexHNSW | None:
    """The graph that `index` is; None for one that only routes to inverted lists."""
    inner = faiss.downcast_index(index)
    while isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    return inner if isinstance(inner, faiss.IndexHNSW) else None


def _sample(vectors: np.ndarray, factory: Factory, seed: int) -> np.ndarray:
    """Rows to train on, drawn without replacement and kept in order: the same for the same block and seed."""
    size = factory.training_rows()
    if size >= len(vectors):
        return vectors
    return vectors[sample_rows(len(vectors), size, seed)]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def _reason(error: RuntimeError) -> str:
    """Faiss puts the C++ function and line before the reason."""
    return str(error).rsplit(": ", 1)[-1].strip()
