"""Search parameters of an index: nprobe, efSearch and refine, set by the user or tuned to a recall on sampled queries.

Tuning counts what exact search finds and reads no clock, so that the same block gives the same parameters everywhere.
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
_ABOVE = 0.005  # added to the target: other queries may do a little worse than the sampled ones
_FIRST_NPROBE = 4
_FIRST_EF = 16
_GAIN = 0.002  # of recall: two doublings in a row that bring less do not pay


@dataclass(frozen=True)
class SearchParams:
    """Values of `nprobe` (inverted lists), `ef_search` (graphs) and `refine` (labels fetched, as a multiple of K)."""

    nprobe: int | None = None
    ef_search: int | None = None
    refine: int | None = None

    @property
    def factor(self) -> int:
        """Labels to fetch for each one that is asked for."""
        return self.refine or 1


def require_sense(factory: Factory, params: SearchParams) -> None:
    """Raise InputError for a parameter that has no effect on this index."""
    if params.nprobe is not None and not factory.lists:
        raise InputError(
            f"index {factory.spec!r} has no inverted lists, so nprobe={params.nprobe} means nothing. Leave nprobe out."
        )
    if params.ef_search is not None and (factory.lists or not factory.graph):
        raise InputError(
            f"index {factory.spec!r} is no graph, so ef_search={params.ef_search} means nothing. Leave ef_search out."
        )
    if params.refine not in (None, 1) and factory.exact:
        raise InputError(f"index 'exact' has nothing to refine; got refine={params.refine}. Leave refine out.")


def apply(index: faiss.Index | None, params: SearchParams) -> None:
    """Set the search parameters of an index."""
    if index is None:
        return
    lists, graph = lists_of(index), graph_of(index)
    if lists is not None and params.nprobe is not None:
        lists.nprobe = min(params.nprobe, lists.nlist)
    if graph is not None and params.ef_search is not None:
        graph.hnsw.efSearch = params.ef_search


def tune(
    block: Block, fixed: SearchParams, lossy: bool, queries: np.ndarray, width: int, target: float
) -> SearchParams:
    """Return `fixed` with its open parameters tuned: the best `width` labels of `queries` [S, D] have recall `target`.

    The smallest refine that reaches the target, and the smallest power of two for the others; where nothing reaches it,
    the closest. Queries [0, D] or an index without parameters give `fixed` itself.
    """
    if block.index is None:
        return fixed
    width = min(width, len(block.vectors))
    lists, graph = lists_of(block.index), graph_of(block.index)
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
    exact, _ = unpack(search_exactly(block, queries, width))
    best, highest = replace(steps[0], refine=refines[0]), -1.0
    for refine in refines:
        before: list[float] = []
        for step in steps:
            params = replace(step, refine=refine)
            recall = _recall(block, params, queries, exact, width)
            if recall > highest:
                best, highest = params, recall
            if recall >= min(1.0, target + _ABOVE):
                return params
            if len(before) >= 2 and recall - before[-2] < _GAIN:
                break  # more lists do not help: what is missing was lost in the codes
            before.append(recall)
    return best


def _recall(block: Block, params: SearchParams, queries: np.ndarray, exact: np.ndarray, width: int) -> float:
    apply(block.index, params)
    label_ids, _ = unpack(search(block, queries, width, params.factor))
    hits = Ragged.from_matrix(np.sort(label_ids, axis=1)).contains(exact)
    return float(hits.sum() / max(1, (exact >= 0).sum()))


def _powers(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, ... and `last`."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]
