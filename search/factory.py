"""Faiss factory strings: the memory and cost of each index, and the index that `auto` chooses."""

import re
from collections.abc import Callable
from dataclasses import dataclass

AUTO = "auto"  # the cheapest index
EXACT = "exact"  # searches the matrix without an index

# Inverted lists grow by doubling, so up to half of the memory is unused. Lists measured 1.3 to 1.6 times the content.
_LIST_OVERHEAD = 1.6
_LINK_BYTES = 4
_TRAINING_ROWS = 1 << 16
_TRAINING_ROWS_A_LIST = 64
# Costs in units of one multiplication of a blocked matrix product, measured on two cores.
_SCAN_COST = 4.0  # per column of a vector in an inverted list; vectors are read one by one
_SCAN_CODES_COST = 0.5  # per column of a 4-bit code; 32 codes are read at a time
_PROBE_COST = 48.0  # per column of a list of codes, for the table of products
_CANDIDATE_COST = 320.0  # per candidate that is kept and ranked, without the cost of computing the score again
_QUERY_COST = 32_000.0  # per query, independent of its results
_PROBED = 64.0  # vectors to scan, in units of √n, for n vectors in 4 √n lists; fewer with more lists
_MULTIPLICATIONS_PER_SECOND = 7.7e10  # multiplications per second on two cores
_NEGLIGIBLE_COST = 3.2e11  # about five seconds; below this cost, exact search is fast enough
_REFINE = 4
_KMEANS_ROUNDS = 10
_LEAST_LISTS = 16


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
        code = float(self._code_bytes(dimension))
        links = re.search(r"(?<!_)HNSW(\d+)", self.spec)
        if links and not self.lists:
            code += _LINK_BYTES * int(links[1]) * 2.2 + 24
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

        Two cores compute `_MULTIPLICATIONS_PER_SECOND` multiplications per second.
        """
        each = self.building_cost(rows, dimension) + queries * self.query_cost(rows, width, nprobe, dimension)
        # An index must at least halve the cost of exact search: a smaller gain is not worth the missed labels.
        return blocks * each if self.exact else _NEGLIGIBLE_COST + 2 * blocks * each

    def saves_time(self, rows: int, width: int, nprobe: int | None, dimension: int) -> bool:
        """Return whether searching `nprobe` lists costs less than scoring all vectors [rows, dimension].

        Untrained vectors have no clusters, so a search reads most lists, at a higher cost than a matrix product.
        """
        return not nprobe or self.query_cost(rows, width, nprobe, dimension) < rows * dimension

    def building_cost(self, rows: int, dimension: int) -> float:
        """Estimate the multiplications for building the index over vectors [rows, dimension]; 0 without lists."""
        return float((_KMEANS_ROUNDS * min(rows, self.training_rows()) + rows) * self.lists * dimension)

    def query_cost(self, rows: int, width: int, nprobe: int | None, dimension: int) -> float:
        """Estimate the multiplications for a query. Without lists, a query is multiplied by all vectors."""
        if not (lists := self.lists):
            return float(rows * dimension)
        scanned = min(rows, nprobe * rows / lists if nprobe else _PROBED * rows**0.5 * (4 * rows**0.5 / lists) ** 0.5)
        scan, fetched = (_SCAN_CODES_COST, _REFINE * width) if self.lossy else (_SCAN_COST, width)
        probes = _PROBE_COST * scanned * lists / rows if self.lossy else 0.0
        return _QUERY_COST + (lists + probes + scan * scanned) * dimension + (_CANDIDATE_COST + dimension) * fetched

    def milliseconds(self, rows: int, width: int, dimension: int) -> float:
        """Estimate the milliseconds per query, for many queries on two cores."""
        return 1000 * self.query_cost(rows, width, None, dimension) / _MULTIPLICATIONS_PER_SECOND

    def _code_bytes(self, dimension: int) -> float:
        bits = re.search(r"PQ(\d+)(?:x(\d+))?", self.spec)
        if bits:
            return int(bits[1]) * int(bits[2] or 8) / 8
        scalar = re.search(r"SQ(\d+|fp16|bf16)", self.spec)
        if scalar:
            return dimension * (int(scalar[1]) if scalar[1].isdigit() else 16) / 8
        return 4 * dimension


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
        if lists >= _LEAST_LISTS:
            factories += [Factory(f"IVF{lists},Flat"), Factory(f"IVF{lists},PQ{-(-dimension // 2)}x4fs")]
    return factories
