"""Vectors of an export in mapped safetensors files, one per label range, and a Faiss index for each range.

This module builds, updates, tunes, opens and searches indexes. Candidates from an index are scored exactly, as in
mining.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load

from schemas import PAD
from schemas.layout import shard_name
from schemas.manifest import Shard
from schemas.mapped import MappedFile, map_tensors
from schemas.process import free_memory
from scoring.plans import Plan, code_factories, weigh
from search.index import (
    AUTO,
    EXACT,
    Factory,
    Lift,
    SearchParams,
    build,
    choose,
    load_index,
    replace_vectors,
    require_recall,
    set_params,
    tune,
    write_index,
)
from search.topk import Block, configure_faiss, merge, pad_vectors, score, search, unpack

NAME, POSITIONS = "weight", "rows"
_COMPARED = 1 << 16  # number of rows compared at a time
DTYPES = {name: np.dtype(name) for name in ("float32", "float16")}
EXACT_LABELS = 1 << 17  # up to this number, exact search answers in milliseconds
BATCHES = {"serving": 1, "batch": 512}  # queries at a time, by the purpose of an export
_SEED = 0
_MOST_MOVED = 2  # an index is rebuilt if more than 1 / _MOST_MOVED of its rows have moved: the lists no longer fit


def map_vectors(file: MappedFile) -> np.ndarray:
    """Return the rows [n, D] of a mapped file of vectors, without a copy. Raises ValueError for any other file."""
    tensors = map_tensors(file)
    if [*tensors] != [NAME] or tensors[NAME].dtype not in DTYPES.values():
        raise ValueError(f"tensors {', '.join(tensors)}, expected only {NAME}")
    return tensors[NAME]


def patch_vectors(rows: np.ndarray, patch: bytes) -> None:
    """Replace mapped rows with the rows of a patch. Raises ValueError if the patch does not match the rows."""
    tensors = load(patch)
    positions, changed = tensors[POSITIONS], tensors[NAME]
    if changed.shape != (len(positions), rows.shape[1]) or changed.dtype != rows.dtype or positions.min(initial=0) < 0:
        raise ValueError(f"changed vectors of shape {changed.shape}, {changed.dtype}, over {rows.shape}, {rows.dtype}")
    rows[positions] = changed


def changed_rows(before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
    """Return positions of rows that differ in any bit, ascending; None if the arrays differ in shape or type."""
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return None
    bits = np.dtype(f"u{before.dtype.itemsize}")
    changed = [np.zeros(0, np.int64)]
    for start in range(0, len(before), _COMPARED):
        pair = (np.ascontiguousarray(rows[start : start + _COMPARED]).view(bits) for rows in (before, after))
        changed.append(start + np.flatnonzero(np.not_equal(*pair).any(axis=1)))
    return np.concatenate(changed)


class Vectors:
    """Vectors [L, D], stored as one array per label range, for exact search and for scores of pairs.

    A slice is an array; a slice within one range is a view. `device`: for exact search, cpu or a PyTorch device.
    """

    def __init__(self, ranges: Sequence[np.ndarray], device: str = "cpu") -> None:
        self.ranges, self.device = tuple(ranges), device
        self.starts = np.cumsum([0, *map(len, ranges)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.ranges[0].shape[1]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        parts = [array[max(start - first, 0) : max(stop - first, 0)] for first, array in self.parts()]
        some = [part for part in parts if len(part)] or parts[:1]
        return some[0] if len(some) == 1 else np.concatenate(some)

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first label, rows [n, D]) of every range."""
        return zip(self.starts.tolist(), self.ranges, strict=False)

    @cached_property
    def indexed(self) -> "tuple[IndexedRange, ...]":
        """The ranges as `IndexedRange` objects without indexes."""
        blocks = (Block(first, rows, device=self.device, coded=True) for first, rows in self.parts() if len(rows))
        return tuple(IndexedRange(block, 1) for block in blocks)

    def of(self, rows: "Vectors") -> "Vectors":
        """Return the same labels with other `rows`."""
        return rows

    def score(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Multiply the rows of labels `ids` [B, S] by x [B, D or more]: float32 [B, S], 0 for padding."""
        x, scores = x[:, : self.shape[1]], np.zeros(ids.shape, np.float32)
        for first, rows in self.parts():
            inside = (ids >= first) & (ids < first + len(rows))
            if inside.any():
                np.copyto(scores, score(x, rows, np.where(inside, ids - first, PAD)), where=inside)
        return scores


class IndexedRange(NamedTuple):
    """A range of vectors with its index; the index returns `refine` times as many candidates as requested."""

    block: Block
    refine: int


@dataclass(frozen=True)
class EarlierIndex:
    """Indexes of the earlier export; `facts`: from the earlier manifest.

    `files`: for each range of vectors, the local index file and the file's entry in the new manifest, or None if the
    range has no index. `rows(number)`: the earlier vectors [n, D] of a range.
    """

    facts: Mapping[str, Any]
    files: Sequence[tuple[Path, Shard] | None]
    rows: Callable[[int], np.ndarray]


def choose_index(
    spec: str, vectors: Vectors, queries: np.ndarray, width: int, target: float, batch: int
) -> tuple[str | None, Any, list[Plan]]:
    """Return the factory string for `none`, `auto` or a factory string; None for exact search.

    For many labels, `auto` weighs ways to search the first range for `batch` queries at a time. Then also returns the
    index that was made for this range, and what was weighed.
    """
    (labels, dimension), index, plans = vectors.shape, None, list[Plan]()
    factory: Factory | None = None
    if spec == AUTO and labels > EXACT_LABELS and len(queries):
        configure_faiss(None)
        rows, free = vectors.ranges[0], free_memory()
        ways = [choose(AUTO, len(rows)), *code_factories(dimension)]
        ways = [Factory(EXACT), *(way for way in ways if len(rows) * way.bytes_per_vector(dimension) <= free)]
        found = weigh(Block(0, rows), ways, lambda way: _make(way, rows, queries)[0], queries, width, target, batch)
        (factory, index, _), plans = found
    elif spec != "none" and labels:
        factory = choose(spec, labels, EXACT_LABELS)
    return None if factory is None or factory.exact else factory.spec, index, plans


def _make(factory: Factory, rows: np.ndarray, queries: np.ndarray, index: Any = None) -> tuple[Any, Lift | None]:
    """Return an index over `rows`, `index` if it is made already, and its lift; codes would be coarser by a number."""
    lift = Lift.of(rows, queries) if factory.lists and not factory.lossy else None
    return index or build(factory, rows, _SEED, lift), lift


def write_indexes(
    spec: str,
    vectors: Vectors,
    queries: np.ndarray,
    width: int,
    target: float,
    url: str,
    earlier: EarlierIndex | None = None,
    first: Any = None,
) -> tuple[list[Shard], dict[str, Any]]:
    """Write indexes under `url`, tuned on `queries` [S, D] to recall `target` at `width`; return what opening needs.

    A range after the first gets no index if the range is small enough for exact search. Indexes of `earlier` are
    updated if rows have changed, and built anew if their recall is too low now. `first`: the index of the first range,
    if it is made already. Raises InputError if `spec` is not a factory string, if there are too few vectors for the
    index, or if its recall is below the target.
    """
    configure_faiss(None)
    factory = Factory.parse(spec)
    if earlier is not None and earlier.facts["factory"] != factory.spec:
        earlier = None
    shards: list[Shard] = []
    efforts: list[dict[str, Any] | None] = []
    lifts: list[list[Any] | None] = []
    moved: list[int] = []
    for number, (start, rows) in enumerate(vectors.parts()):
        updated = None if earlier is None else _update(earlier, number, rows)
        if updated is None and number and len(rows) <= EXACT_LABELS:
            efforts.append(None)
            lifts.append(None)
            moved.append(0)
            continue
        index, lift, count, entry = updated or (*_make(factory, rows, queries, None if number else first), 0, None)
        block = Block(start, rows, index)
        params = tune(block, SearchParams(), factory.lossy, queries, width, target)
        if updated is not None and params.recall is not None and params.recall < target:
            index, lift = _make(factory, rows, queries)
            count, entry, block = 0, None, Block(start, rows, index)
            params = tune(block, SearchParams(), factory.lossy, queries, width, target)
        require_recall(factory, params, target)
        efforts.append(asdict(params))
        lifts.append(lift and [lift.centre.tolist(), lift.scale, lift.radius])
        moved.append(count)
        shards.append(entry or write_index(url, shard_name(number, len(vectors.ranges), "faiss"), block))
    return shards, {"factory": factory.spec, "efforts": efforts, "lifts": lifts, "moved": moved}


def _update(earlier: EarlierIndex, number: int, rows: np.ndarray) -> tuple[Any, Lift | None, int, Shard | None] | None:
    """Return the earlier index and its lift, how many `rows` changed since it was built, and its file if unchanged.

    Returns None if the index must be rebuilt.
    """
    file = earlier.files[number] if number < len(earlier.files) else None
    if file is None:
        return None
    path, entry = file
    changed = changed_rows(earlier.rows(number), rows)
    if changed is None:
        return None
    moved = earlier.facts.get("moved", [0] * len(earlier.files))[number] + len(changed)
    if _MOST_MOVED * moved > len(rows):
        return None
    index, stored = load_index(str(path)), earlier.facts["lifts"][number]
    lift = stored and Lift(np.array(stored[0], np.float32), *stored[1:])
    if not len(changed):
        return index, lift, moved, entry
    wide = pad_vectors(rows[changed], index.d) if lift is None else lift.apply(rows[changed], index.d)
    return (index, lift, moved, None) if replace_vectors(index, changed, wide) else None


def open_indexes(paths: Sequence[str], facts: Mapping[str, Any], vectors: Vectors) -> tuple[IndexedRange, ...]:
    """Open the indexes of `vectors` from local files, with the facts that `write_indexes` returned."""
    files, opened = iter(paths), []
    for (start, rows), effort in zip(vectors.parts(), facts["efforts"], strict=True):
        # Pairs are scored in place in float32, so half-precision vectors are widened once.
        wide = rows.astype(np.float32, copy=False)
        index = None if effort is None else load_index(next(files))
        params = SearchParams(**(effort or {}))
        set_params(index, params)
        opened.append(IndexedRange(Block(start, wide, index), params.factor))
    if next(files, None) is not None:
        raise ValueError(f"{len(paths)} indexes over {len(opened)} ranges of vectors")
    return tuple(opened)


def search_indexes(indexed: Sequence[IndexedRange], queries: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Find (ids int64 [B, width], scores float32) for queries [B, D] in all ranges; padded with -1 and -inf.

    Raises ExtremisError if a query, or a vector that is searched exactly, is not finite.
    """
    found = [search(block, queries, width, refine) for block, refine in indexed]
    return unpack(found[0] if len(found) == 1 else merge(found, width))
