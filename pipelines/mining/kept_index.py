"""Indexes that outlive the run, for serving: one Faiss file a block and a manifest of kind `index`.

A position p in the file of block b is label start_b + p; the manifest's parameter `blocks` holds [start_b, stop_b).
"""

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from pipelines.common.vector_blocks import read_block
from pipelines.mining.plan import Plan
from schemas.errors import InputError
from schemas.layout import shard_name
from schemas.manifest import Manifest, Shard, is_published, open_manifest, publish
from search.block import Block, padded, search
from search.candidates import best, merge, pack, unpack
from search.effort import Effort, apply
from search.factory import Factory
from search.index_files import read_index, write_index

KIND = "index"


@dataclass(frozen=True)
class Kept:
    """What a worker reports about one block's file."""

    entry: Shard
    effort: dict[str, Any]


def keep(url: str, number: int, count: int, block: Block) -> Shard:
    """Write the block's index, or a flat one for `exact`. Raises StorageError."""
    return write_index(url, shard_name(number, count, "faiss"), block)


def index_parameters(plan: Plan) -> dict[str, Any]:
    """What decides a kept index, besides the vectors."""
    inputs = plan.inputs
    return {
        "factory": "Flat" if plan.factory.exact else plan.factory.spec,
        "metric": "inner product",
        "dimension": inputs.dimension,
        "columns": plan.dimension,
        "by": inputs.by,
        "drop_bias": inputs.drop_bias,
        "blocks": [list(bounds) for bounds in plan.bounds],
        "seed": plan.options.seed,
        "nprobe": plan.options.nprobe,
        "ef_search": plan.options.ef_search,
        "refine": plan.options.refine,
        "target_recall": plan.options.target_recall,
        "width": plan.fetch,
    }


def existing_index(plan: Plan, url: str, overwrite: bool) -> Manifest | None:
    """The index at `url` if it is this very one. Raises InputError where something else is there."""
    if not is_published(url):
        return None
    found = open_manifest(url)
    parameters = {name: value for name, value in found.parameters.items() if name != "efforts"}
    same = found.kind == KIND and found.parents == _parents(plan) and parameters == index_parameters(plan)
    if same:
        return found
    if not overwrite or found.kind != KIND:
        raise InputError(
            f"--keep-index {url}: holds a finished {found.kind} table made from something else, or with other options. "
            "Give another place, or --overwrite."
        )
    return None


def publish_index(plan: Plan, url: str, kept: list[Kept]) -> Manifest:
    """Make the files of all blocks, in order, visible as one index."""
    return publish(
        url,
        Manifest(
            kind=KIND,
            shards=tuple(one.entry for one in kept),
            rows=plan.inputs.labels,
            id_range=(0, plan.inputs.labels),
            parents=_parents(plan),
            parameters={**index_parameters(plan), "efforts": [one.effort for one in kept]},
        ),
    )


class KeptIndex:
    """A kept index, searched block after block: memory is bounded by the largest.

    With `vectors_url`, the table that it was made of, candidates are scored exactly and refined as mining does it.
    """

    def __init__(self, url: str, vectors_url: str | None = None) -> None:
        self._url = url
        self.manifest = open_manifest(url, KIND)
        self._vectors = None if vectors_url is None else (vectors_url, open_manifest(vectors_url))
        if self._vectors is not None and self._vectors[1].digest != self.manifest.parents["vectors"]:
            raise InputError(f"{vectors_url}: not the vectors that {url} was made of.")

    def load(self, number: int) -> faiss.Index:
        """The Faiss index of one block, its checksum compared, set up to search as hard as it was tuned for.

        Raises TableError.
        """
        index = read_index(self._url, self.manifest.shards[number])
        apply(index, Effort(**self.manifest.parameters["efforts"][number]))
        return index

    def search(self, queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """(label ids int64 [B, width] best first, scores float32) for queries [B, D]; -1 and -inf beyond the labels."""
        facts = self.manifest.parameters
        wide = padded(queries, facts["columns"])
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
        url, manifest = self._vectors
        vectors = read_block(url, manifest, start, stop, facts["columns"], facts["drop_bias"])
        flat = Factory(facts["factory"]).spec == "Flat"
        block = Block(start, vectors, None if flat else index)
        return search(block, queries, width, Effort(**facts["efforts"][number]).factor)


def _parents(plan: Plan) -> dict[str, str]:
    return {"vectors": plan.inputs.vectors.digest}
