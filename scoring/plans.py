"""Ways to search vectors, weighed by their recall and cost for the queries that come at a time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from search.index import MULTIPLICATIONS_PER_SECOND, Factory, SearchParams, set_params, tune
from search.topk import Block, one_thread, search_exactly, search_index

_CODED_COST = 2.0  # per column of a code of one byte, for one query; vectors are not shared by queries
_TIMED = 50  # batches whose time is measured


def code_factories(dimension: int) -> list[Factory]:
    """List indexes of 4-bit codes without lists, for vectors [dimension] that have no clusters."""
    return [Factory(f"PQ{-(-dimension // 2)}x4fs"), Factory(f"PQ{dimension}x4fs")]


class Plan(NamedTuple):
    """A way to search, its bytes in memory, and microseconds per query on one core; without a recall, estimates."""

    factory: str
    bytes: int
    microseconds: float
    recall: float | None = None


def weigh(
    block: Block,
    ways: Sequence[Factory],
    make: Callable[[Factory], Any],
    queries: np.ndarray,
    width: int,
    target: float,
    batch: int,
) -> tuple[tuple[Factory | None, Any, SearchParams], list[Plan]]:
    """Choose the cheapest of `ways` to search a block for `batch` queries at a time; None if none reaches `target`.

    An index is made, and tuned on `queries` [S, D], if its estimated cost is lower than the cost of any that reaches
    the recall. Costs are work that is counted, so that the choice is the same on every machine; time is only measured.
    """
    rows, dimension = block.vectors.shape
    chosen: tuple[Factory | None, Any, SearchParams] = None, None, SearchParams()
    plans, least = list[Plan](), math.inf

    def price(factory: Factory, nprobe: int | None = None) -> float:
        alone = _CODED_COST if factory.exact and batch == 1 else 1.0
        return alone * factory.query_cost(rows, width, nprobe, dimension)

    for factory in sorted(ways, key=price):
        size = int(factory.fixed_bytes(dimension) + rows * factory.bytes_per_vector(dimension))
        size = block.vectors.nbytes + block.vectors.size if factory.exact else size  # with codes
        cost, recall = price(factory), None
        microseconds = 2e6 * cost / MULTIPLICATIONS_PER_SECOND
        if cost < least:
            tried = replace(block, index=make(factory), coded=factory.exact)
            params = tune(tried, SearchParams(), factory.lossy, queries, width, target)
            recall, cost = 1.0 if factory.exact else params.recall or 0.0, price(factory, params.nprobe)
            microseconds = _microseconds(tried, params, queries, width, batch)
            if recall >= target and cost < least:
                chosen, least = (factory, tried.index, params), cost
        plans.append(Plan(factory.spec, size, microseconds, recall))
    return chosen, plans


def _microseconds(block: Block, params: SearchParams, queries: np.ndarray, width: int, batch: int) -> float:
    set_params(block.index, params)
    block.prepare()
    timed, began = queries[: _TIMED * batch], time.thread_time()
    with one_thread():
        for start in range(0, len(timed), batch):
            some = timed[start : start + batch]
            _ = search_index(block, some, width, params.factor) if block.index else search_exactly(block, some, width)
    return 1e6 * (time.thread_time() - began) / len(timed)
