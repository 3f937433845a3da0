"""How hard an index is searched: nprobe, efSearch and refine, given or tuned to a recall on sampled queries.

Tuned by counting what exact search finds, never by a clock, so that the same block gives the same effort everywhere.
"""

from dataclasses import dataclass, replace

import faiss
import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged
from search.block import Block, search, search_exactly
from search.candidates import unpack
from search.factory import Factory
from search.index import graph_of, lists_of

MOST_REFINE = 16
_ABOVE = 0.005  # aimed at beyond the target: other queries may do a little worse than the sampled ones
_FIRST_NPROBE = 4
_FIRST_EF = 16
_GAIN = 0.002  # of recall: two doublings in a row that bring less do not pay


@dataclass(frozen=True)
class Effort:
    """What is set of `nprobe` (inverted lists), `ef_search` (graphs) and `refine` (fetched, as a multiple of K)."""

    nprobe: int | None = None
    ef_search: int | None = None
    refine: int | None = None

    @property
    def factor(self) -> int:
        return self.refine or 1


def require_sense(factory: Factory, effort: Effort) -> None:
    """Raises InputError for an option that means nothing to this index."""
    if effort.nprobe is not None and not factory.lists:
        raise InputError(
            f"index {factory.spec!r} has no inverted lists, so nprobe={effort.nprobe} means nothing. Leave nprobe out."
        )
    if effort.ef_search is not None and (factory.lists or not factory.graph):
        raise InputError(
            f"index {factory.spec!r} is no graph, so ef_search={effort.ef_search} means nothing. Leave ef_search out."
        )
    if effort.refine not in (None, 1) and factory.exact:
        raise InputError(f"index 'exact' has nothing to refine; got refine={effort.refine}. Leave refine out.")


def apply(index: faiss.Index | None, effort: Effort) -> None:
    """Set an index up to search that hard."""
    if index is None:
        return
    lists, graph = lists_of(index), graph_of(index)
    if lists is not None and effort.nprobe is not None:
        lists.nprobe = min(effort.nprobe, lists.nlist)
    if graph is not None and effort.ef_search is not None:
        graph.hnsw.efSearch = effort.ef_search


def tune(block: Block, wanted: Effort, lossy: bool, queries: np.ndarray, width: int, target: float) -> Effort:
    """What is left open in `wanted`, so that the best `width` labels of `queries` [S, D] have recall `target`.

    The smallest refine with which it is reached, and the smallest of the powers of two for the rest; where nothing
    reaches it, what came closest. Queries [0, D] or an index without anything to set give `wanted` itself.
    """
    if block.index is None:
        return wanted
    width = min(width, len(block.vectors))
    lists, graph = lists_of(block.index), graph_of(block.index)
    refines = [wanted.refine] if wanted.refine else ([2, 4, 8, MOST_REFINE] if lossy else [1])
    if lists is not None:
        levels = [wanted.nprobe] if wanted.nprobe else _powers(_FIRST_NPROBE, lists.nlist)
        steps = [Effort(nprobe=level) for level in levels]
    elif graph is not None:
        levels = [wanted.ef_search] if wanted.ef_search else _powers(_FIRST_EF, max(_FIRST_EF, len(block.vectors)))
        steps = [Effort(ef_search=level) for level in levels]
    else:
        steps = [Effort()]
    if len(queries) == 0:
        return replace(steps[len(steps) // 2], refine=refines[0])
    exact, _ = unpack(search_exactly(block, queries, width))
    best, highest = replace(steps[0], refine=refines[0]), -1.0
    for refine in refines:
        before: list[float] = []
        for step in steps:
            effort = replace(step, refine=refine)
            recall = _recall(block, effort, queries, exact, width)
            if recall > highest:
                best, highest = effort, recall
            if recall >= min(1.0, target + _ABOVE):
                return effort
            if len(before) >= 2 and recall - before[-2] < _GAIN:
                break  # more lists do not help: what is missing was lost in the codes
            before.append(recall)
    return best


def _recall(block: Block, effort: Effort, queries: np.ndarray, exact: np.ndarray, width: int) -> float:
    apply(block.index, effort)
    found, _ = unpack(search(block, queries, width, effort.factor))
    hits = Ragged.from_matrix(np.sort(found, axis=1)).contains(exact)
    return float(hits.sum() / max(1, (exact >= 0).sum()))


def _powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... and `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]
