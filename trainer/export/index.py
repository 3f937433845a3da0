"""Faiss indexes of an export, one over each range of the vectors: built or updated, tuned, opened, searched.

Faiss is loaded at the first call. Candidates from an index are scored exactly, as in mining.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from schemas.layout import shard_name
from schemas.manifest import Shard
from search.factory import Factory, choose
from trainer.export.vectors import Vectors, changed_rows

if TYPE_CHECKING:
    from search.block import Block

EXACT_LABELS = 1 << 17  # up to so many, exact search answers in milliseconds
_SEED = 0
_MOST_MOVED = 2  # an index of which more than a half has moved is built anew: its lists no longer fit


class Indexed(NamedTuple):
    """A range of vectors with its index; it offers `refine` times as many candidates as are asked for."""

    block: "Block"
    refine: int


@dataclass(frozen=True)
class EarlierIndex:
    """Indexes of the export that a version goes on from: `facts` as in its manifest.

    `files`: the local file of each range of its vectors, None where it has none; `entries`: these files as the new
    manifest names them. `rows(number)`: its vectors [n, D] of a range.
    """

    facts: Mapping[str, Any]
    files: Sequence[Path | None]
    entries: Sequence[Shard | None]
    rows: Callable[[int], np.ndarray]


def choose_index(spec: str, labels: int) -> str | None:
    """Return the factory string that `none`, `auto` or a factory string means; None for exact search."""
    if spec == "none" or not labels:
        return None
    factory = choose(spec, labels, EXACT_LABELS)
    return None if factory.exact else factory.spec


def write_indexes(
    spec: str,
    vectors: Vectors,
    queries: torch.Tensor,
    width: int,
    target: float,
    url: str,
    earlier: EarlierIndex | None = None,
) -> tuple[list[Shard], dict[str, Any]]:
    """Write files under `url`, tuned on `queries` [S, D] to the recall `target` at `width`; return facts to open them.

    A range of vectors behind the first that exact search is quick enough for has none. Those of `earlier` are updated
    where rows have changed. Raises InputError: not a factory string, or one that cannot be built on so few vectors.
    """
    from search.block import Block, padded
    from search.index import build, set_up
    from search.index_files import write_index
    from search.params import SearchParams, tune

    set_up(None)
    factory = Factory.parse(spec)
    columns = factory.dimension(vectors.shape[1])
    sampled = padded(queries.cpu().numpy(), columns)
    if earlier is not None and (earlier.facts["factory"], earlier.facts["columns"]) != (factory.spec, columns):
        earlier = None
    shards: list[Shard] = []
    efforts: list[dict[str, Any] | None] = []
    moved: list[int] = []
    for number, (start, rows) in enumerate(vectors.parts()):
        wide = padded(rows, columns)
        updated = None if earlier is None else _update(earlier, number, rows, wide)
        if updated is None and number and len(rows) <= EXACT_LABELS:
            efforts.append(None)
            moved.append(0)
            continue
        index, count, entry = updated or (build(factory, wide, _SEED), 0, None)
        block = Block(start, wide, index)
        efforts.append(asdict(tune(block, SearchParams(), factory.lossy, sampled, width, target)))
        moved.append(count)
        shards.append(entry or write_index(url, shard_name(number, len(vectors.ranges), "faiss"), block))
    facts = {"factory": factory.spec, "metric": "inner product", "columns": columns, "efforts": efforts}
    return shards, {**facts, "moved": moved}


def _update(
    earlier: EarlierIndex, number: int, rows: np.ndarray, wide: np.ndarray
) -> tuple[Any, int, Shard | None] | None:
    """Return the earlier index of range `number` with those of `rows` [n, D] that differ put in place of its own.

    And how many rows have moved since it was built, and its entry where none does now. None: it has to be built anew.
    `wide`: the rows as the index takes them.
    """
    from search.index import update
    from search.index_files import load_index

    path = earlier.files[number] if number < len(earlier.files) else None
    if path is None:
        return None
    before = earlier.rows(number)
    if (before.shape, before.dtype) != (rows.shape, rows.dtype):
        return None
    changed = changed_rows(before, rows)
    moved = earlier.facts.get("moved", [0] * len(earlier.files))[number] + len(changed)
    if _MOST_MOVED * moved > len(rows):
        return None
    index = load_index(str(path))
    if not len(changed):
        return index, moved, earlier.entries[number]
    return (index, moved, None) if update(index, changed, wide[changed]) else None


def open_indexes(paths: Sequence[str], facts: Mapping[str, Any], vectors: Vectors) -> tuple[Indexed, ...]:
    """Open the indexes in local files, by the facts of `write_indexes`, over the vectors that they were made of."""
    from search.block import Block, padded
    from search.index_files import load_index
    from search.params import SearchParams, apply

    columns, files = facts["columns"], iter(paths)
    opened = []
    for (start, rows), effort in zip(vectors.parts(), facts["efforts"], strict=True):
        # Scored pair by pair in float32, where they lie: half-precision vectors are widened once.
        wide = rows if (rows.dtype, rows.shape[1]) == (np.float32, columns) else padded(rows, columns)
        index = None if effort is None else load_index(next(files))
        params = SearchParams(**(effort or {}))
        apply(index, params)
        opened.append(Indexed(Block(start, wide, index), params.factor))
    if next(files, None) is not None:
        raise ValueError(f"{len(paths)} indexes over {len(opened)} ranges of vectors")
    return tuple(opened)


def search_indexes(indexed: Sequence[Indexed], queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Find (ids int64 [B, width], scores float32) for queries [B, D] in all ranges; -1 and -inf beyond the labels."""
    from search.block import padded, search
    from search.candidates import merge, unpack

    wide = padded(queries, indexed[0].block.vectors.shape[1])
    return unpack(merge([search(block, wide, width, refine) for block, refine in indexed], width))
