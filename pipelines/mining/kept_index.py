"""Indexes that are stored for serving after the run: one Faiss file per block and a manifest of kind `index`.

Vector p in the file of block b is label start_b + p; the manifest's parameter `blocks` lists all [start_b, stop_b).
"""

import faiss
import numpy as np

from pipelines.common.vectors import read_block
from pipelines.mining.plan import SEARCH_OPTIONS, MinePlan
from pipelines.mining.records import read_record
from schemas.errors import InputError
from schemas.manifest import Manifest
from schemas.reuse import Request, find_reusable
from schemas.table import Table
from search.block import Block, pad_vectors, search
from search.candidates import best, merge, pack, unpack
from search.factory import Factory
from search.index import SearchParams, read_index, set_params

KIND = "index"


def _request(plan: MinePlan) -> Request:
    """Return the parents and parameters that identify a stored index."""
    inputs = plan.inputs
    parameters = {
        **plan.options.model_dump(include={*SEARCH_OPTIONS}),
        "factory": "Flat" if plan.factory.exact else plan.factory.spec,
        "metric": "inner product",
        "dimension": inputs.dimension,
        "columns": plan.dimension,
        "by": inputs.by,
        "drop_bias": inputs.drop_bias,
        "blocks": [list(bounds) for bounds in plan.bounds],
        "width": plan.fetch,
    }
    return Request(KIND, {"vectors": inputs.vectors.digest}, parameters)


def find_index(plan: MinePlan, url: str) -> Manifest | None:
    """Return the index at `url` if it matches the plan, or None. Raises InputError if another table is at `url`."""
    return find_reusable(
        url, _request(plan), "Give another --keep-index, or --overwrite.", overwrite=plan.options.overwrite
    )


def describe_index(plan: MinePlan) -> Manifest:
    """Return a manifest that describes the files of all blocks as one index, based on the workers' records."""
    request = _request(plan)
    notes = [read_record(plan.index_record_url(block)) for block in range(len(plan.bounds))]
    return Manifest(
        kind=KIND,
        shards=tuple(note.entry for note in notes if note.entry),
        rows=plan.inputs.labels,
        id_range=(0, plan.inputs.labels),
        parents=dict(request.parents or {}),
        parameters={**request.parameters, "efforts": [note.facts["params"] for note in notes]},
    )


class KeptIndex:
    """Stored index that is searched block by block, so that only one block is in memory at a time.

    If `vectors_url` gives the table of the indexed vectors, candidates are scored exactly and refined as in mining.
    """

    def __init__(self, url: str, vectors_url: str | None = None) -> None:
        self._url = url
        self.manifest = Table.open(url, KIND).manifest
        self._vectors = None if vectors_url is None else Table.open(vectors_url)
        if self._vectors is not None and self._vectors.digest != self.manifest.parents["vectors"]:
            raise InputError(f"{vectors_url}: the index {url} was built from different vectors.")

    def load(self, number: int) -> faiss.Index:
        """Read the Faiss index of one block, with its tuned search parameters. Raises TableError."""
        index = read_index(self._url, self.manifest.shards[number])
        set_params(index, SearchParams(**self.manifest.parameters["efforts"][number]))
        return index

    def search(self, queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (label ids int64 [B, width], scores float32) for queries [B, D]; -1 and -inf fill missing labels."""
        facts = self.manifest.parameters
        wide = pad_vectors(queries, facts["columns"])
        keys = [
            self._search_block(number, start, stop, wide, width) for number, (start, stop) in enumerate(facts["blocks"])
        ]
        return unpack(merge(keys, width))

    def _search_block(self, number: int, start: int, stop: int, queries: np.ndarray, width: int) -> np.ndarray:
        facts = self.manifest.parameters
        index = self.load(number)
        if self._vectors is None:
            scores, positions = index.search(queries, min(width, stop - start))
            return best(pack(np.where(positions < 0, positions, positions + start), scores), width)
        vectors = read_block(self._vectors, start, stop, facts["columns"], facts["drop_bias"])
        flat = Factory(facts["factory"]).spec == "Flat"
        block = Block(start, vectors, None if flat else index)
        return search(block, queries, width, SearchParams(**facts["efforts"][number]).factor)
