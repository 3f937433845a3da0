"""Faiss indexes of an export, one over each range of the vectors: built, tuned, opened, searched.

Faiss is loaded at the first call. Candidates from an index are scored exactly, as in mining.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from schemas.layout import shard_name
from schemas.manifest import Shard
from search.factory import Factory, choose
from trainer.export.vectors import Vectors

if TYPE_CHECKING:
    from search.block import Block

EXACT_LABELS = 1 << 17  # up to so many, exact search answers in milliseconds
_SEED = 0


class Indexed(NamedTuple):
    """A range of vectors with its index; it offers `refine` times as many candidates as are asked for."""

    block: "Block"
    refine: int


def choose_index(spec: str, labels: int) -> str | None:
    """Return the factory string that `none`, `auto` or a factory string means; None for exact search."""
    if spec == "none" or not labels:
        return None
    factory = choose(spec, labels, EXACT_LABELS)
    return None if factory.exact else factory.spec


def write_indexes(
    spec: str, vectors: Vectors, queries: torch.Tensor, width: int, target: float, url: str
) -> tuple[list[Shard], dict[str, Any]]:
    """Write files under `url`, tuned on `queries` [S, D] to the recall `target` at `width`; return facts to open them.

    Raises InputError: not a factory string, or one that cannot be built on so few vectors.
    """
    from search.block import Block, padded
    from search.index import build, set_up
    from search.index_files import write_index
    from search.params import SearchParams, tune

    set_up(None)
    factory = Factory.parse(spec)
    columns = factory.dimension(vectors.shape[1])
    sampled = padded(queries.cpu().numpy(), columns)
    shards, efforts = [], []
    for number, (start, rows) in enumerate(vectors.parts()):
        wide = padded(rows, columns)
        block = Block(start, wide, build(factory, wide, _SEED))
        efforts.append(asdict(tune(block, SearchParams(), factory.lossy, sampled, width, target)))
        shards.append(write_index(url, shard_name(number, len(vectors.ranges), "faiss"), block))
    facts = {"factory": factory.spec, "metric": "inner product", "columns": columns, "efforts": efforts}
    return shards, facts


def open_indexes(paths: Sequence[str], facts: Mapping[str, Any], vectors: Vectors) -> tuple[Indexed, ...]:
    """Open the indexes in local files, by the facts of `write_indexes`, over the vectors that they were made of."""
    from search.block import Block, padded
    from search.index_files import load_index
    from search.params import SearchParams, apply

    columns = facts["columns"]
    opened = []
    for path, (start, rows), effort in zip(paths, vectors.parts(), facts["efforts"], strict=True):
        index = load_index(path)
        apply(index, SearchParams(**effort))
        # Scored pair by pair in float32, where they lie: half-precision vectors are widened once.
        wide = rows if (rows.dtype, rows.shape[1]) == (np.float32, columns) else padded(rows, columns)
        opened.append(Indexed(Block(start, wide, index), SearchParams(**effort).factor))
    return tuple(opened)


def search_indexes(indexed: Sequence[Indexed], queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Find (ids int64 [B, width], scores float32) for queries [B, D] in all ranges; -1 and -inf beyond the labels."""
    from search.block import padded, search
    from search.candidates import merge, unpack

    wide = padded(queries, indexed[0].block.vectors.shape[1])
    return unpack(merge([search(block, wide, width, refine) for block, refine in indexed], width))
