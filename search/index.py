"""Faiss indexes: factory strings and their costs, then building, files, tuning and measured recall."""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import faiss
import numpy as np

from schemas import storage
from schemas.errors import InputError, TableError, option
from schemas.manifest import Shard, describe_file, verify_shard
from schemas.randomness import sample_rows
from schemas.storage import join
from search.topk import EMPTY, Block, iterate_float32, one_thread, pad_vectors, scores_of, search_exactly, search_index

AUTO = "auto"  # the cheapest index
EXACT = "exact"  # searches the matrix without an index

# Inverted lists grow by doubling, so up to half of the memory is unused. Lists measured 1.3 to 1.6 times the content.
_LIST_OVERHEAD = 1.6
_TRAINING_ROWS = 1 << 16
_TRAINING_ROWS_A_LIST = 64
# Costs in units of one multiplication of a blocked matrix product, measured on two cores.
_SCAN_COST = 4.0  # per column of a vector in an inverted list; vectors are read one by one
_SCAN_CODES_COST = 0.5  # per column of a 4-bit code; 32 codes are read at a time
_PROBE_COST = 48.0  # per column of a list of codes, for the table of products
_CANDIDATE_COST = 320.0  # per candidate that is kept and ranked, without the cost of computing the score again
_QUERY_COST = 32_000.0  # per query, independent of its results
_PROBED = 64.0  # vectors to scan, in units of √n, for n vectors in 4 √n lists; fewer with more lists
MULTIPLICATIONS_PER_SECOND = 7.7e10  # multiplications per second on two cores
_NEGLIGIBLE_COST = 3.2e11  # about five seconds; below this cost, exact search is fast enough
_REFINE = 4
MOST_REFINE = 16
_RECALL_MARGIN = 0.005  # added to the target, because other queries may have a slightly lower recall than the sample
_MIN_RECALL_GAIN = 0.002  # smallest gain in recall: tuning stops if two doublings in a row gain less in total
_FILE_BYTES = 1 << 20  # bytes of an index file that are read or written at a time


@dataclass(frozen=True)
class Factory:
    """A factory string `spec`, which is passed to Faiss; `exact` means a search of the matrix without an index."""

    spec: str

    @classmethod
    def parse(cls, spec: str) -> "Factory":
        """Read a factory string and drop `,RFlat`, because the block's own vectors score the candidates anyway."""
        return cls(re.sub(r",\s*(RFlat|Refine\(Flat\))$", "", spec.strip()))

    @property
    def exact(self) -> bool:
        return self.spec == EXACT

    @property
    def lists(self) -> int:
        """Number of inverted lists; 0 if the index has no lists."""
        match = re.search(r"\bI(?:VF|MI)(\d+)", self.spec)
        return int(match[1]) if match else 0

    @property
    def has_graph(self) -> bool:
        """Return whether the index has a graph. With several threads, no seed makes the graph reproducible."""
        return re.search(r"HNSW|NSG|NNDescent", self.spec) is not None

    @property
    def lossy(self) -> bool:
        """Return whether the index compresses the vectors, so that scoring more candidates exactly is worthwhile."""
        return not self.exact and re.search(r"PQ|SQ|LSH|LSQ|RQ|AQ|PCA|ITQ|RaBitQ|RR", self.spec) is not None

    @property
    def subquantizers(self) -> int:
        """Number M of subquantizers of a product quantizer, a divisor of the index's D; 1 without a quantizer."""
        match = re.search(r"PQ(\d+)", self.spec)
        return int(match[1]) if match else 1

    def dimension(self, dimension: int) -> int:
        """Return the number of columns of the index: D, padded with zeros to the next multiple of M."""
        return -(-dimension // self.subquantizers) * self.subquantizers

    def bytes_per_vector(self, dimension: int) -> float:
        """Estimate the bytes of the index per vector [D], including room to grow."""
        if self.exact:
            return 0.0
        code = 4.0 * dimension
        if bits := re.search(r"PQ(\d+)(?:x(\d+))?", self.spec):
            code = int(bits[1]) * int(bits[2] or 8) / 8
        elif scalar := re.search(r"SQ(\d+|fp16|bf16)", self.spec):
            code = dimension * (int(scalar[1]) if scalar[1].isdigit() else 16) / 8
        links = re.search(r"(?<!_)HNSW(\d+)", self.spec)
        if links and not self.lists:
            code += 4 * int(links[1]) * 2.2 + 24
        return (code + 8) * _LIST_OVERHEAD if self.lists else code

    def fixed_bytes(self, dimension: int) -> int:
        """Return the bytes of the centroids and their graph."""
        return self.lists * (4 * dimension + 200) + (1 << 20)

    def stored_bytes(self, rows: int, dimension: int) -> int:
        """Estimate the size in bytes of the index file for `rows` vectors [dimension], without room to grow."""
        room = _LIST_OVERHEAD if self.lists else 1.0
        return int(self.bytes_per_vector(dimension) / room * rows) + self.lists * (4 * dimension + 8)

    def training_rows(self) -> int:
        """Return the number of training rows: enough for every list, for blocks of any size."""
        return max(_TRAINING_ROWS, self.lists * _TRAINING_ROWS_A_LIST)

    def cost(self, rows: int, blocks: int, queries: int, width: int, nprobe: int | None, dimension: int) -> float:
        """Estimate the multiplications for building and searching `blocks` blocks of vectors [rows, dimension].

        An index must at least halve the cost of exact search: a smaller gain is not worth the missed labels.
        """
        each = self.building_cost(rows, dimension) + queries * self.query_cost(rows, width, nprobe, dimension)
        return blocks * each if self.exact else _NEGLIGIBLE_COST + 2 * blocks * each

    def saves_time(self, rows: int, width: int, nprobe: int | None, dimension: int) -> bool:
        """Return whether searching `nprobe` lists costs less than scoring all vectors [rows, dimension].

        Untrained vectors have no clusters, so a search reads most lists, at a higher cost than a matrix product.
        """
        return not nprobe or self.query_cost(rows, width, nprobe, dimension) < rows * dimension

    def building_cost(self, rows: int, dimension: int) -> float:
        """Estimate the multiplications for building the index over vectors [rows, dimension]; 0 without lists."""
        # k-means takes ten rounds
        return float((10 * min(rows, self.training_rows()) + rows) * self.lists * dimension)

    def query_cost(self, rows: int, width: int, nprobe: int | None, dimension: int) -> float:
        """Estimate the multiplications for a query. Without lists, a query is multiplied by all vectors or codes."""
        if not (lists := self.lists):
            return float(rows * (self.subquantizers if self.lossy else dimension))
        scanned = min(rows, nprobe * rows / lists if nprobe else _PROBED * rows**0.5 * (4 * rows**0.5 / lists) ** 0.5)
        scan, fetched = (_SCAN_CODES_COST, _REFINE * width) if self.lossy else (_SCAN_COST, width)
        probes = _PROBE_COST * scanned * lists / rows if self.lossy else 0.0
        return _QUERY_COST + (lists + probes + scan * scanned) * dimension + (_CANDIDATE_COST + dimension) * fetched

    def milliseconds(self, rows: int, width: int, dimension: int) -> float:
        """Estimate the milliseconds per query, for many queries on two cores."""
        return 1000 * self.query_cost(rows, width, None, dimension) / MULTIPLICATIONS_PER_SECOND


def choose(
    spec: str,
    rows: int,
    exact_rows: int = 0,
    price: Callable[[Factory], float | None] | None = None,
    dimension: int = 0,
) -> Factory:
    """Return the index that `spec` names for `rows` vectors; `auto` stands for the cheapest index.

    Without `price`, `auto` is exact search up to `exact_rows` vectors, and 4 √rows inverted lists for more vectors.
    With `price`, `auto` is the cheapest of several indexes for vectors [dimension]. `price` returns the cost of an
    index, or None if the index is impossible.
    """
    if spec != AUTO:
        return Factory.parse(spec)
    if price is None:
        return Factory(EXACT if rows <= exact_rows else f"IVF{int(4 * rows**0.5)},Flat")
    priced = [(price(factory), factory.spec) for factory in list_factories(dimension, rows)]
    return Factory(min((cost, spec) for cost, spec in priced if cost is not None)[1])


def list_factories(dimension: int, rows: int) -> list[Factory]:
    """List indexes for blocks of about `rows` vectors: exact, and different numbers of lists with and without codes."""
    factories = [Factory(EXACT)]
    for share in (1, 2, 4, 8):
        lists = int(share * rows**0.5)
        if lists >= 16:
            factories += [Factory(f"IVF{lists},Flat"), Factory(f"IVF{lists},PQ{-(-dimension // 2)}x4fs")]
    return factories


class Lift(NamedTuple):
    """Subtracts `centre` [D] from vectors [n, D], times `scale`, and appends a number: then all have length `radius`.

    A query with a 0 appended has the same order of distances to the results as of inner products with the vectors
    (Bachrach et al. 2014, doi:10.1145/2645710.2645741). So vectors of any lengths and biases have clusters. Fewest
    lists must be read if the vectors are as long as the queries.
    """

    centre: np.ndarray
    scale: float
    radius: float

    @classmethod
    def of(cls, vectors: np.ndarray, queries: np.ndarray) -> "Lift":
        centre = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
        parts = iterate_float32(vectors, _TRAINING_ROWS)
        longest = max(float(np.linalg.norm(rows - centre, axis=1).max()) for _, rows in parts) or 1.0
        radius = float(np.median(np.linalg.norm(queries, axis=1))) if len(queries) else longest
        return cls(centre, radius / longest, radius)

    def apply(self, vectors: np.ndarray, columns: int) -> np.ndarray:
        """Return float32 [n, columns]."""
        lifted, last = pad_vectors(vectors, columns), len(self.centre)
        lifted[:, :last] = (lifted[:, :last] - self.centre) * np.float32(self.scale)
        lifted[:, last] = np.sqrt(np.maximum(self.radius**2 - np.einsum("nd,nd->n", lifted, lifted), 0))
        return lifted


def build(factory: Factory, vectors: np.ndarray, seed: int, lift: Lift | None = None) -> faiss.Index | None:
    """Build an index over `vectors` [n, D]; None for `exact`, which searches the matrix itself.

    Vectors are float32 or float16; they are widened, and padded with zeros to the columns of the index. The index is by
    inner product, or with `lift` by distance of the lifted vectors.

    Raises InputError for an invalid factory string, or too few vectors for training.
    """
    if factory.exact:
        return None
    rows, dimension = vectors.shape
    metric = faiss.METRIC_INNER_PRODUCT if lift is None else faiss.METRIC_L2
    index = create_index(factory, factory.dimension(dimension + (lift is not None)), metric)
    size = factory.training_rows()
    try:
        with one_thread() if factory.has_graph else contextlib.nullcontext():
            sample = vectors if size >= rows else vectors[sample_rows(rows, size, seed)]
            index.train(pad_vectors(sample, index.d, copy=False) if lift is None else lift.apply(sample, index.d))
            add(index, vectors, lift)
    except RuntimeError as error:
        raise InputError(
            f"index {factory.spec!r} cannot be built on a block of {rows} vectors: {_reason(error)}. "
            "Choose a smaller index, larger blocks, or auto."
        ) from None
    return index


def add(index: faiss.Index, vectors: np.ndarray, lift: Lift | None = None) -> None:
    """Append `vectors` [n, D], in a form that `build` accepts, to the index."""
    for _, rows in iterate_float32(vectors, 0 if lift is None else _TRAINING_ROWS):
        index.add(pad_vectors(rows, index.d, copy=False) if lift is None else lift.apply(rows, index.d))


def truncate(index: faiss.Index, rows: int) -> None:
    """Remove all vectors except the first `rows` from an index with inverted lists."""
    index.remove_ids(faiss.IDSelectorRange(rows, index.ntotal))


def create_index(factory: Factory, dimension: int, metric: int = faiss.METRIC_INNER_PRODUCT) -> faiss.Index:
    """Return an untrained index. Raises InputError for an invalid factory string."""
    try:
        return faiss.index_factory(dimension, factory.spec, metric)
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
    """Return a Faiss error without the C++ function and line number at its start."""
    return str(error).rsplit(": ", 1)[-1].strip()


def write_index(url: str, name: str, block: Block) -> Shard:
    """Write the block's index (a flat index if there is none) as the file `name` under `url`. Raises StorageError."""
    index = block.index
    if index is None:
        index = faiss.IndexFlatIP(block.vectors.shape[1])
        index.add(block.vectors)
    with storage.writing(join(url, name)) as path:
        with open(path, "wb") as file:  # Faiss's own writer may lose the end of a file on a full disk without an error
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, _FILE_BYTES))  # type: ignore[attr-defined]
        return describe_file(path, name, len(block.vectors))


def read_index(url: str, shard: Shard) -> faiss.Index:
    """Verify the checksum of a file under `url`, and read the index in the file; only the index stays in memory.

    Raises TableError, StorageError.
    """
    with storage.open_read(verify_shard(url, shard)) as file:
        return faiss.read_index(faiss.PyCallbackIOReader(file.read, _FILE_BYTES))  # type: ignore[attr-defined]


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
    steps = [SearchParams()]
    if lists is not None:
        steps = [SearchParams(nprobe=level) for level in _levels(fixed.nprobe, 4, lists.nlist)]
    elif graph is not None:
        levels = _levels(fixed.ef_search, 16, max(16, len(block.vectors)))
        steps = [SearchParams(ef_search=level) for level in levels]
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
    settable: str | None = "target_recall",
    fixed: SearchParams = _TUNED,
) -> None:
    """Raise InputError, with advice for this kind of index, if `params.recall` is known and less than `target`.

    the option `settable` sets the target, None if nothing does; `fixed`: parameters that the user has set with options.
    """
    if params.recall is None or params.recall >= target:
        return
    fixed_by = [option(name) for name, value in asdict(fixed).items() if value is not None]
    advice = next(text for pattern, text in _ADVICE.items() if re.search(pattern, factory.spec))
    if fixed_by:
        advice = f"Raise {' and '.join(fixed_by)}, or leave the option out, so that it is tuned"
    reached = math.floor(100 * params.recall) / 100
    accept = f"; or accept this recall with {option(settable, reached)}" if settable else ""
    raise InputError(
        f"index {factory.spec!r}: finds {params.recall:.4f} of the nearest labels of sampled queries, expected "
        f"{option(settable, target) if settable else f'a recall of {target:g}'}. {advice}{accept}."
    )


def _levels(fixed: int | None, first: int, last: int) -> list[int]:
    """Return `fixed` alone, if given, else `first`, 2 `first`, 4 `first`, ... and `last`."""
    powers = [first << doublings for doublings in range(last.bit_length()) if first << doublings < last]
    return [fixed] if fixed else [*powers, last]
