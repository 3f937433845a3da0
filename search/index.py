"""Build the Faiss index of one block, store the index in a file, and tune its search to a target recall."""

import contextlib
import math
import re
from dataclasses import asdict, dataclass, replace

import faiss
import numpy as np

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.manifest import Shard, describe_file, verify_shard
from schemas.randomness import sample_rows
from schemas.storage import join
from search.block import Block, one_thread, pad_vectors, search_exactly, search_index
from search.candidates import EMPTY, scores_of
from search.factory import Factory
from search.nearest import iterate_float32

_AT_ONCE = 1 << 20  # bytes of an index file that are read or written at a time
MOST_REFINE = 16
_RECALL_MARGIN = 0.005  # added to the target, because other queries may have a slightly lower recall than the sample
_FIRST_NPROBE = 4
_FIRST_EF = 16
_MIN_RECALL_GAIN = 0.002  # smallest gain in recall: tuning stops if two doublings in a row gain less in total


def build(factory: Factory, vectors: np.ndarray, seed: int) -> faiss.Index | None:
    """Build an inner-product index over `vectors` [n, D]; None for `exact`, which searches the matrix itself.

    Vectors are float32 with as many columns as the index, or float16 with at most as many columns. Float16 vectors are
    widened in parts.

    Raises InputError for an invalid factory string, or too few vectors for training.
    """
    if factory.exact:
        return None
    rows, dimension = vectors.shape
    index = create_index(factory, dimension)
    size = factory.training_rows()
    try:
        with one_thread() if factory.has_graph else contextlib.nullcontext():
            sample = vectors if size >= rows else vectors[sample_rows(rows, size, seed)]
            index.train(pad_vectors(sample, index.d, copy=False))
            add(index, vectors)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be built on a block of {rows} vectors: {_reason(error)}. "
            "Choose a smaller index, larger blocks, or auto."
        ) from None
    return index


def add(index: faiss.Index, vectors: np.ndarray) -> None:
    """Append `vectors` [n, D], in a form that `build` accepts, to the index."""
    for _, rows in iterate_float32(vectors):
        index.add(pad_vectors(rows, index.d, copy=False))


def truncate(index: faiss.Index, rows: int) -> None:
    """Remove all vectors except the first `rows` from an index with inverted lists."""
    index.remove_ids(faiss.IDSelectorRange(rows, index.ntotal))


def create_index(factory: Factory, dimension: int) -> faiss.Index:
    """Return an untrained index. Raises InputError for an invalid factory string."""
    try:
        return faiss.index_factory(dimension, factory.spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be built for {dimension} dimensions: {_reason(error)}. Give auto, exact, "
            "or a Faiss factory string such as IVF1024,Flat."
        ) from None


def find_graph(index: faiss.Index) -> faiss.IndexHNSW | None:
    """Return `index` as a graph; None if the index is not a graph, or uses a graph only to find inverted lists."""
    inner = faiss.downcast_index(index)
    while isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    return inner if isinstance(inner, faiss.IndexHNSW) else None


def replace_vectors(index: faiss.Index, positions: np.ndarray, rows: np.ndarray) -> bool:
    """Replace the vectors at `positions` int64 [n] with `rows` float32 [n, D]; False for an index without lists.

    The index is not trained again: centroids and codebooks do not change.
    """
    if faiss.try_extract_index_ivf(index) is None:
        return False
    positions = np.ascontiguousarray(positions, np.int64)
    index.remove_ids(faiss.IDSelectorBatch(positions))  # type: ignore[call-arg]
    index.add_with_ids(np.ascontiguousarray(rows, np.float32), positions)
    return True


def _reason(error: RuntimeError) -> str:
    """Return the reason for a Faiss error, without the C++ function and line number at the start."""
    return str(error).rsplit(": ", 1)[-1].strip()


def write_index(url: str, name: str, block: Block) -> Shard:
    """Write the block's index (a flat index if there is none) as the file `name` under `url`. Raises StorageError."""
    index = block.index
    if index is None:
        index = faiss.IndexFlatIP(block.vectors.shape[1])
        index.add(block.vectors)
    with storage.writing(join(url, name)) as path:
        with open(path, "wb") as file:  # Faiss's own writer may lose the end of a file on a full disk without an error
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, _AT_ONCE))  # type: ignore[attr-defined]
        return describe_file(path, name, len(block.vectors))


def read_index(url: str, shard: Shard) -> faiss.Index:
    """Verify the checksum of a file under `url`, and read the index in the file; only the index stays in memory.

    Raises TableError, StorageError.
    """
    with storage.open_read(verify_shard(url, shard)) as file:
        return faiss.read_index(faiss.PyCallbackIOReader(file.read, _AT_ONCE))  # type: ignore[attr-defined]


def load_index(path: str) -> faiss.Index:
    """Read the index in a local file, whose checksum has been verified already. Raises TableError."""
    try:
        return faiss.read_index(path)
    except RuntimeError as error:
        raise TableError(
            f"{path}: this version of Faiss cannot read the index: {error}. Export the run again."
        ) from None


@dataclass(frozen=True)
class SearchParams:
    """Values of `nprobe` (inverted lists), `ef_search` (graphs) and `refine` (labels fetched, as a multiple of K).

    `recall`: the fraction of the nearest vectors that these values find for sampled queries; None: not measured.
    """

    nprobe: int | None = None
    ef_search: int | None = None
    refine: int | None = None
    recall: float | None = None

    @property
    def factor(self) -> int:
        """Number of labels to fetch per requested label."""
        return self.refine or 1


_TUNED = SearchParams()
_COARSE = "Its codes are too coarse: give "
_ADVICE = {  # by the first pattern that a factory string matches
    "PQ": f"{_COARSE}more PQ codes, OPQ before PQ, SQ8, or Flat, which stores whole vectors",
    "SQ|LSH|LSQ|RQ|AQ|PCA|ITQ|RaBitQ|RR": f"{_COARSE}SQ8, SQfp16, or Flat, which stores whole vectors",
    "IVF|IMI": "More nprobe does not help: give fewer lists, or lists without a graph, as in IVF256,Flat",
    "": "The links of HNSW do not lead to every label by inner product, with any efSearch: double the links, or give "
    "lists, as in IVF256,Flat",
}


def require_applicable(factory: Factory, params: SearchParams) -> None:
    """Raise InputError for a parameter that has no effect on this index."""
    if params.nprobe is not None and not factory.lists:
        raise InputError(
            f"index {factory.spec!r} has no inverted lists, so nprobe={params.nprobe} has no effect. Leave nprobe out."
        )
    if params.ef_search is not None and (factory.lists or not factory.has_graph):
        raise InputError(
            f"index {factory.spec!r} is not a graph, so ef_search={params.ef_search} has no effect. Leave ef_search "
            "out."
        )
    if params.refine not in (None, 1) and factory.exact:
        raise InputError(f"index 'exact' is exact already, so refine={params.refine} has no effect. Leave refine out.")


def set_params(index: faiss.Index | None, params: SearchParams) -> None:
    """Set the search parameters of an index."""
    if index is None:
        return
    lists, graph = faiss.try_extract_index_ivf(index), find_graph(index)
    if lists is not None and params.nprobe is not None:
        lists.nprobe = min(params.nprobe, lists.nlist)
    if graph is not None and params.ef_search is not None:
        graph.hnsw.efSearch = params.ef_search


def tune(
    block: Block, fixed: SearchParams, lossy: bool, queries: np.ndarray, width: int, target: float
) -> SearchParams:
    """Return `fixed` with unset parameters tuned to a recall `target` for the `width` best labels of `queries` [S, D].

    Chooses the smallest refine that reaches the target, and the smallest power of two for other parameters. If no
    values reach the target, the values with the highest recall are chosen. For a block without an index, `fixed` is
    returned unchanged. Without queries, nothing is measured: the middle nprobe or ef_search and the smallest refine are
    chosen.
    """
    if block.index is None:
        return fixed
    width = min(width, len(block.vectors))
    lists, graph = faiss.try_extract_index_ivf(block.index), find_graph(block.index)
    refines = [fixed.refine] if fixed.refine else ([2, 4, 8, MOST_REFINE] if lossy else [1])
    if lists is not None:
        levels = [fixed.nprobe] if fixed.nprobe else _powers(_FIRST_NPROBE, lists.nlist)
        steps = [SearchParams(nprobe=level) for level in levels]
    elif graph is not None:
        levels = [fixed.ef_search] if fixed.ef_search else _powers(_FIRST_EF, max(_FIRST_EF, len(block.vectors)))
        steps = [SearchParams(ef_search=level) for level in levels]
    else:
        steps = [SearchParams()]
    if len(queries) == 0:
        return replace(steps[len(steps) // 2], refine=refines[0])
    exact = search_exactly(block, queries, width)
    best, highest = replace(steps[0], refine=refines[0]), -1.0
    for refine in refines:
        before: list[float] = []
        for step in steps:
            params = replace(step, refine=refine)
            share = measure_recall(block, params, queries, exact)
            params = replace(params, recall=share)
            if share > highest:
                best, highest = params, share
            if share >= min(1.0, target + _RECALL_MARGIN):
                return params
            if (lossy or graph) and len(before) >= 2 and share - before[-2] < _MIN_RECALL_GAIN:
                break  # larger values do not help: codes have lost the missing labels, or no link leads to them
            before.append(share)
    return best


def measure_recall(block: Block, params: SearchParams, queries: np.ndarray, exact: np.ndarray) -> float:
    """Return the fraction of the best labels (keys `exact` [S, width]) that a search with `params` finds.

    A label that ties with the last of the best labels counts as found. Only the index is measured; `search` would also
    search rows with too few candidates exactly, which costs more.
    """
    set_params(block.index, params)
    keys, _ = search_index(block, queries, exact.shape[1], params.factor)
    hits = (keys != EMPTY) & (scores_of(keys) >= scores_of(exact[:, -1:]))
    return float(hits.sum() / max(1, exact.size))


def require_recall(
    factory: Factory,
    params: SearchParams,
    target: float,
    option: str | None = "--target-recall",
    fixed: SearchParams = _TUNED,
) -> None:
    """Raise InputError, with advice for this kind of index, if `params.recall` is known and less than `target`.

    `option` sets the target, None if nothing does; `fixed`: parameters that the user has set with options.
    """
    if params.recall is None or params.recall >= target:
        return
    fixed_by = [f"--{name.replace('_', '-')}" for name, value in asdict(fixed).items() if value is not None]
    advice = next(text for pattern, text in _ADVICE.items() if re.search(pattern, factory.spec))
    if fixed_by:
        advice = f"Raise {' and '.join(fixed_by)}, or leave the option out, so that it is tuned"
    accept = f"; or accept this recall with {option} {math.floor(100 * params.recall) / 100:g}" if option else ""
    raise InputError(
        f"index {factory.spec!r}: finds {params.recall:.4f} of the nearest labels of sampled queries, expected "
        f"{option or 'a recall of'} {target:g}. {advice}{accept}."
    )


def _powers(first: int, last: int) -> list[int]:
    """Return `first`, 2 `first`, 4 `first`, ... and `last`."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]
