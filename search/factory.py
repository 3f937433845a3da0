"""Faiss factory strings: what the parts of one mean for memory, for search, and for the vectors that it takes."""

import re
from dataclasses import dataclass

AUTO = "auto"  # whatever is cheapest
EXACT = "exact"  # searches the matrix itself

# Inverted lists grow by doubling, so up to half of what they hold is room; measured: 1.3 to 1.6 times their content.
_ROOM_IN_LISTS = 1.6
_LINK_BYTES = 4


@dataclass(frozen=True)
class Factory:
    """A factory string read as far as mining needs. `spec` goes to Faiss; `exact` searches the matrix itself."""

    spec: str

    @classmethod
    def parse(cls, spec: str) -> "Factory":
        """`,RFlat` is taken off: mining scores what an index finds with the block's own vectors anyway."""
        return cls(re.sub(r",\s*(RFlat|Refine\(Flat\))$", "", spec.strip()))

    @property
    def exact(self) -> bool:
        return self.spec == EXACT

    @property
    def lists(self) -> int:
        """Inverted lists; 0 without."""
        match = re.search(r"\bI(?:VF|MI)(\d+)", self.spec)
        return int(match[1]) if match else 0

    @property
    def graph(self) -> bool:
        """Whether a graph is built. Faiss builds one with several threads in an order that no seed fixes."""
        return re.search(r"HNSW|NSG|NNDescent", self.spec) is not None

    @property
    def lossy(self) -> bool:
        """Whether what it stores is less than the vectors, so that a second look at more candidates pays."""
        return not self.exact and re.search(r"PQ|SQ|LSH|LSQ|RQ|AQ|PCA|ITQ|RaBitQ|RR", self.spec) is not None

    @property
    def subquantizers(self) -> int:
        """M of a product quantizer, which D has to be a multiple of; 1 without."""
        match = re.search(r"PQ(\d+)", self.spec)
        return int(match[1]) if match else 1

    def dimension(self, dimension: int) -> int:
        """Columns that the index takes: D, or the next multiple of M. Columns of zeros change no inner product."""
        return -(-dimension // self.subquantizers) * self.subquantizers

    def bytes_per_vector(self, dimension: int) -> float:
        """About what the index holds for each vector [D], its room to grow included."""
        if self.exact:
            return 0.0
        code = float(self._code_bytes(dimension))
        links = re.search(r"(?<!_)HNSW(\d+)", self.spec)
        if links and not self.lists:
            code += _LINK_BYTES * int(links[1]) * 2.2 + 24
        return (code + 8) * _ROOM_IN_LISTS if self.lists else code

    def fixed_bytes(self, dimension: int) -> int:
        """Centroids and their graph."""
        return self.lists * (4 * dimension + 200) + (1 << 20)

    def training_rows(self) -> int:
        """Rows to train on: enough for every list, whatever the block's size."""
        return max(_TRAINING_ROWS, self.lists * _TRAINING_ROWS_A_LIST)

    def _code_bytes(self, dimension: int) -> float:
        bits = re.search(r"PQ(\d+)(?:x(\d+))?", self.spec)
        if bits:
            return int(bits[1]) * int(bits[2] or 8) / 8
        scalar = re.search(r"SQ(\d+|fp16|bf16)", self.spec)
        if scalar:
            return (
                dimension * {"fp16": 16, "bf16": 16}.get(scalar[1], int(scalar[1]) if scalar[1].isdigit() else 16) / 8
            )
        return 4 * dimension


_TRAINING_ROWS = 1 << 16
_TRAINING_ROWS_A_LIST = 64
