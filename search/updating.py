"""Inverted lists whose rows change: those rows are taken out and put in anew, and the lists stay."""

import faiss
import numpy as np

from search.index import lists_of


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
