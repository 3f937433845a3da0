"""One Faiss index a block: which one pays, and how it is built.

PyTorch and Faiss each bring an OpenMP runtime, and some builds crash when both are loaded in one process, in one order
or the other (tests/test_import_order.py shows which orders work with the pinned builds). Mining never imports torch.
"""

import faiss
import numpy as np

from pipelines.mining.options import AUTO, EXACT
from schemas.errors import InputError

NPROBE = 64
# Measured: reading a list's vectors one by one costs about this much more a vector than a blocked matrix product.
_SCAN = 8.0
_FEWEST_FOR_PRODUCTS = 20
_KMEANS_ROUNDS = 10
_TRAINING_ROWS_A_LIST = 64
_TRAINING_ROWS = 1 << 16


def tune(threads: int | None) -> None:
    """Set Faiss up in a worker process: `threads`, and matrix products for small batches, too.

    Recent Faiss compares pair by pair below some thousand queries, which costs eight times as much on two cores.
    """
    faiss.cvar.distance_compute_blas_threshold = _FEWEST_FOR_PRODUCTS
    if threads:
        faiss.omp_set_num_threads(threads)


def choose(spec: str, rows: int, queries: int, nprobe: int | None) -> str:
    """The index for a block of `rows` vectors that `queries` queries search: `exact` or a Faiss factory string.

    `auto` takes an inverted file with 4·√rows lists where it costs less than half of exact search, counted in products
    of two vectors: training and adding included, so few queries or few labels are searched exactly.
    """
    if spec != AUTO:
        return spec
    lists = max(1, int(4 * rows**0.5))
    probed = min(nprobe or NPROBE, lists) / lists
    train = _KMEANS_ROUNDS * min(rows, lists * _TRAINING_ROWS_A_LIST) * lists
    inverted = train + rows * lists + queries * (lists + _SCAN * probed * rows)
    return f"IVF{lists},Flat" if 2 * inverted < queries * rows else EXACT


def build(spec: str, vectors: np.ndarray, nprobe: int | None, seed: int) -> faiss.Index | None:
    """An inner-product index over `vectors` float32 [n, D]; None for `exact`, which searches the matrix itself.

    Raises InputError: not a factory string, too few vectors to train it, or `nprobe` for an index without lists.
    """
    if spec == EXACT:
        return None
    rows, dimension = vectors.shape
    try:
        index = faiss.index_factory(dimension, spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(
            f"index {spec!r} cannot be made for {dimension} dimensions: {_reason(error)}. "
            "Give auto, exact, or a Faiss factory string such as IVF1024,Flat."
        ) from None
    inverted = faiss.try_extract_index_ivf(index)
    if inverted is None and nprobe is not None:
        raise InputError(f"index {spec!r} has no inverted lists, so nprobe={nprobe} means nothing. Leave nprobe out.")
    try:
        index.train(_sample(vectors, inverted.nlist if inverted is not None else 0, seed))
        index.add(vectors)
    except RuntimeError as error:
        raise InputError(
            f"index {spec!r} cannot be built on a block of {rows} vectors: {_reason(error)}. "
            "Give a smaller index, larger blocks, or auto."
        ) from None
    if inverted is not None:
        inverted.nprobe = min(nprobe or NPROBE, inverted.nlist)
    return index


def _sample(vectors: np.ndarray, lists: int, seed: int) -> np.ndarray:
    """Rows to train on, drawn without replacement and kept in order: the same for the same block and seed."""
    size = max(_TRAINING_ROWS, lists * _TRAINING_ROWS_A_LIST)
    if size >= len(vectors):
        return vectors
    generator = np.random.Generator(np.random.Philox(key=seed))
    return vectors[np.sort(generator.choice(len(vectors), size, replace=False, shuffle=False))]


def _reason(error: RuntimeError) -> str:
    """Faiss puts the C++ function and line before the reason."""
    return str(error).rsplit(": ", 1)[-1].strip()
