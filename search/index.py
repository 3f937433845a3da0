"""The Faiss index of one block: how it is built, and what it is made of.

PyTorch and Faiss each bring an OpenMP runtime, and some builds crash when both are loaded in one process, in one order
or the other (tests/test_import_order.py shows which orders work with the pinned builds). Mining never imports torch.
"""

import contextlib
from collections.abc import Iterator

import faiss
import numpy as np

from schemas.errors import InputError
from schemas.randomness import sample_rows
from search.block import set_threads
from search.factory import Factory

_FEWEST_FOR_PRODUCTS = 20


def set_up(threads: int | None) -> None:
    """Set Faiss up in the calling thread: `threads`, and matrix products for small batches, too.

    Recent Faiss compares pair by pair below some thousand queries, which costs eight times as much on two cores.
    """
    faiss.cvar.distance_compute_blas_threshold = _FEWEST_FOR_PRODUCTS
    if threads:
        set_threads(threads)


def build(factory: Factory, vectors: np.ndarray, seed: int) -> faiss.Index | None:
    """Build an inner-product index over `vectors` float32 [n, D]; None for `exact`, which searches the matrix itself.

    Raises InputError: not a factory string, or too few vectors to train it.
    """
    if factory.exact:
        return None
    rows, dimension = vectors.shape
    index = empty(factory, dimension)
    size = factory.training_rows()
    try:
        with _one_thread() if factory.graph else contextlib.nullcontext():
            index.train(vectors if size >= rows else vectors[sample_rows(rows, size, seed)])
            index.add(vectors)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be built on a block of {rows} vectors: {_reason(error)}. "
            "Give a smaller index, larger blocks, or auto."
        ) from None
    return index


def empty(factory: Factory, dimension: int) -> faiss.Index:
    """Return the index before training. Raises InputError: not a factory string that makes one."""
    try:
        return faiss.index_factory(dimension, factory.spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be made for {dimension} dimensions: {_reason(error)}. "
            "Give auto, exact, or a Faiss factory string such as IVF1024,Flat."
        ) from None


def lists_of(index: faiss.Index) -> faiss.IndexIVF | None:
    """Return the inverted file within `index`, whatever transforms vectors before it."""
    return faiss.try_extract_index_ivf(index)


def graph_of(index: faiss.Index) -> faiss.IndexHNSW | None:
    """Return the graph that `index` is; None for one that only routes to inverted lists."""
    inner = faiss.downcast_index(index)
    while isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    return inner if isinstance(inner, faiss.IndexHNSW) else None


def update(index: faiss.Index, positions: np.ndarray, rows: np.ndarray) -> bool:
    """Put `rows` float32 [n, D] in place of those at `positions` int64 [n]; False for an index that has no lists.

    Centres and codes stay those that the index was trained with.
    """
    if lists_of(index) is None:
        return False
    positions = np.ascontiguousarray(positions, np.int64)
    index.remove_ids(faiss.IDSelectorBatch(positions))  # type: ignore[call-arg]
    index.add_with_ids(np.ascontiguousarray(rows, np.float32), positions)
    return True


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def _reason(error: RuntimeError) -> str:
    """Return the reason alone: Faiss puts the C++ function and line before it."""
    return str(error).rsplit(": ", 1)[-1].strip()
