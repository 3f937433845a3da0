"""Votes of training points: each point votes for each of its labels; the nearer a point, the larger its vote."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import PAD, storage
from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout
from schemas.manifest import Shard, describe_file, find_shard, verify_shard
from schemas.mapped import MappedFile, ScratchFile
from schemas.ragged import Ragged, SparseRows, is_first_key, offsets_of
from schemas.shard_files.parquet import list_array, list_column, write_shard
from schemas.sizes import say_bytes
from schemas.storage import join
from schemas.table import Table
from scoring.plans import code_factories, weigh
from search.index import (
    AUTO,
    EXACT,
    Factory,
    add,
    build,
    choose,
    list_factories,
    read_index,
    truncate,
    write_index,
)
from search.topk import Block, configure_faiss, one_thread, search, search_exactly, unpack
from trainer.encoders.bag import unit
from trainer.inputs import open_queries
from trainer.threads import map_ranges

if TYPE_CHECKING:
    import torch

    from trainer.methods.sections import Data
    from trainer.model import Model

NEIGHBOURS = 30
TEMPERATURE = 0.05


def count_votes(
    similarity: np.ndarray, rows: np.ndarray, labels: Ragged, temperature: float = TEMPERATURE
) -> SparseRows:
    """Count votes for labels: `rows` [B, K] int64 are the nearest training points, padded with -1, `similarity` [B, K].

    A point's vote is softmax(similarity / temperature) over a query's K points. Each of the point's labels gets the
    whole vote, so a label of all K points gets 1. `labels`: the labels of all points. Returns each query's labels,
    ascending, with votes.
    """
    listed, weight = rows != PAD, shares_of(similarity, rows, temperature)
    voted = labels.take(rows[listed])
    query, share = listed.nonzero()[0].repeat(voted.counts), weight[listed].repeat(voted.counts)
    stride = 1 + int(voted.values.max(initial=0))
    key = query * stride + voted.values
    order = key.argsort(kind="stable")
    key = key[order]
    first = is_first_key(key)
    votes = np.bincount(first.cumsum() - 1, share[order]).astype(np.float32)
    row, label = np.divmod(key[first], stride)
    return SparseRows(label, votes, offsets_of(np.bincount(row, minlength=len(rows))))


def shares_of(similarity: np.ndarray, rows: np.ndarray, temperature: float = TEMPERATURE) -> np.ndarray:
    """Return the votes of points, float64 [B, K]; arguments as in `count_votes`."""
    listed = rows != PAD
    scaled = np.where(listed, similarity.astype(np.float64) / temperature, -np.inf)
    weight = np.exp(scaled - np.where(listed.any(1), scaled.max(1, initial=-np.inf), 0)[:, None])
    return weight / np.maximum(weight.sum(1, keepdims=True), 1e-300)


def votes_of(votes: SparseRows, ids: np.ndarray) -> np.ndarray:
    """Return the votes for labels `ids` [B, K], float32; 0 for labels without votes and for padding (-1)."""
    stride = 2 + max(int(votes.ids.max(initial=0)), int(ids.max(initial=0)))
    keys = votes.row_of() * stride + votes.ids
    sought = np.arange(votes.rows)[:, None] * stride + ids
    if not len(keys):
        return np.zeros(ids.shape, np.float32)
    place = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
    return np.where((keys[place] == sought) & (ids != PAD), votes.values[place], np.float32(0))


FOLDER = "memory"
VECTORS, INDEX = f"{FOLDER}/vectors.float16", f"{FOLDER}/index.faiss"
FACTS = "memory"  # parameter of the manifest that lists the files
BUDGET = 4 << 30  # bytes in memory
ROWS_A_FILE = 1 << 20
TARGET_RECALL = 0.95
TUNED = 512  # an index is tuned, and its recall measured, on up to 3 * TUNED queries
_GROUP_ROWS = 1 << 14
_LABEL_BYTES, _OFFSET_BYTES = 4, 8
_SEED = 0
_EXACT = Factory(EXACT)
_HASHED = 256 << 20  # only the length of a larger file is checked; `extremis inspect --verify` reads everything
_WHAT = "the embeddings of a memory"


class MemoryPlan(NamedTuple):
    """Index of a memory, number of points that fit into the budget, and bytes in memory and on disk."""

    factory: Factory
    points: int
    bytes: int
    stored: int
    milliseconds: float  # estimate per query, for many queries


def plan_index(points: int, dimension: int, labels: float, budget: int = BUDGET) -> MemoryPlan:
    """Choose the index for `points` vectors [dimension] with `labels` labels each on average, within `budget` bytes.

    The index that holds the most points is chosen; ties are broken by the cost of as many searches as there are points.
    """

    def fitting(factory: Factory) -> int:
        left = budget - _fixed_bytes(factory, dimension)
        return max(0, min(points, int(left / (_point_bytes(factory, dimension) + _LABEL_BYTES * labels))))

    most = max(fitting(factory) for factory in list_factories(dimension, points))

    def price(factory: Factory) -> float | None:
        return factory.cost(most, 1, most, NEIGHBOURS, None, dimension) if fitting(factory) >= most else None

    chosen = choose(AUTO, most, price=price, dimension=dimension)
    size = _fixed_bytes(chosen, dimension) + most * (_point_bytes(chosen, dimension) + _LABEL_BYTES * labels)
    stored = 2 * dimension * most + (0 if chosen.exact else chosen.stored_bytes(most, dimension))
    return MemoryPlan(chosen, most, int(size), int(stored), chosen.milliseconds(most, NEIGHBOURS, dimension))


def _point_bytes(factory: Factory, dimension: int) -> float:
    """Bytes in memory per point, without labels; embeddings count only for exact search, which reads all embeddings."""
    return _OFFSET_BYTES + (2 * dimension if factory.exact else factory.bytes_per_vector(dimension))


def _fixed_bytes(factory: Factory, dimension: int) -> int:
    return _OFFSET_BYTES + (0 if factory.exact else factory.fixed_bytes(dimension))


@dataclass(frozen=True, eq=False)
class Memory:
    """N training points: `vectors` float16 [N, D] of length 1, and the `labels` of each point.

    The first `trained` points are training rows of the run, the other points are held-out rows. `factory`: the chosen
    kind of index; `index`: the index, once built, which returns `refine` times as many candidates as there are voters.
    `measured`: how the index was chosen and tuned, and its recall; empty without an index. `on_device`: a copy of the
    vectors on the queries' device, for exact search.
    """

    vectors: np.ndarray
    labels: Ragged
    trained: int
    factory: Factory = _EXACT
    index: Any = None
    refine: int = 1
    measured: Mapping[str, Any] = field(default_factory=dict)
    on_device: "torch.Tensor | None" = None
    file: MappedFile | None = None
    coded: bool = False

    @classmethod
    def build(cls, model: "Model", data: DataLayout, training_data: "Data", budget: int = BUDGET) -> "Memory":
        """Embed the training rows of the run, followed by the held-out rows, without an index.

        The memory contains as many points as fit into `budget` bytes, from all parts of a version; a part's rows are in
        random order. Embeddings are in a scratch file. Raises InputError if the run mixes splits. Raises TableError,
        StorageError.
        """
        if training_data.mix:
            raise InputError(
                "data.mix: a memory contains the training points of a single split, but this run mixes splits."
            )
        table, dimension = open_queries(data, training_data.split), model.encoder.dimension
        shares = (training_data.training_rows, training_data.held_out_rows)
        counts = []
        for share in shares:
            of_rows = (list_column(rows, "label_ids").counts for rows in share.batches(table, ["label_ids"]))
            counts.append(np.concatenate([np.zeros(0, np.int64), *of_rows]))
        both = np.concatenate(counts)
        factory = plan_index(len(both), dimension, both.mean() if len(both) else 0.0, budget).factory
        left, points = float(budget - _fixed_bytes(factory, dimension)), list[int]()
        for share, lengths in zip(shares, counts, strict=True):
            costs = _point_bytes(factory, dimension) + _LABEL_BYTES * lengths
            points.append(share.fitting(table, costs, left))
            left = left - float(costs.sum()) if points[-1] == len(costs) else 0.0
        labels, file = list[Ragged](), ScratchFile(_WHAT)
        for share, limit in zip(shares, points, strict=True):
            for rows in share.batches(table, [*model.columns, "label_ids"], limit):
                labels.append(list_column(rows, "label_ids"))
                embedded = unit(model.embed_table(rows)[:, :dimension].float().cpu().numpy()).astype(np.float16)
                file.write(np.ascontiguousarray(embedded).view(np.uint8).data)
        vectors = np.frombuffer(file.map(), np.float16).reshape(-1, dimension)
        return cls(vectors, _join(labels), points[0], factory)

    def first(self, points: int) -> "Memory":
        """Return a memory of only the first `points` points, without an index."""
        labels, trained = self.labels.slice(0, points), min(points, self.trained)
        return replace(self, vectors=self.vectors[:points], labels=labels, trained=trained, index=None)

    def indexed(self, queries: Any, budget: int = BUDGET) -> "Memory":
        """Return this memory with the cheapest index for `queries` [S, D or more], which are not points of the memory.

        That is so for one query as for many: only exact search costs one query more, and it is the dearest. Returns a
        memory without an index for few points, or if no index finds enough and exact search fits into `budget`. Raises
        InputError if the indexes find too little, and exact search does not fit.
        """
        rows, exact = self.unit(queries), replace(self, factory=_EXACT)
        if self.factory.exact or not len(rows):
            return exact
        configure_faiss(None)
        others = *code_factories(self._wide), _EXACT
        ways = [self.factory, *(way for way in others if replace(self, factory=way).bytes <= budget)]
        block, make = Block(0, self.vectors), partial(build, vectors=self.vectors, seed=_SEED)
        found, plans = weigh(block, ways, make, rows[: 3 * TUNED], NEIGHBOURS, TARGET_RECALL, batch=1)
        factory, index, params = found
        if factory is None:
            recall = max(plan.recall or 0.0 for plan in plans)
            raise InputError(
                f"memory: index {self.factory.spec} finds {recall:.4f} of the nearest points of sampled queries, "
                f"expected {TARGET_RECALL}: its PQ codes are too coarse. Give "
                f"{option('memory', say_bytes(1.05 * exact.bytes).replace(' ', ''))} for exact search of these points, "
                f"or a smaller {option('memory')} for fewer points."
            )
        weighed = {"recall": round(params.recall or 1.0, 4), "plans": [plan._asdict() for plan in plans]}
        chosen = replace(self, factory=factory, index=index, refine=params.factor)
        return replace(chosen, measured={"nprobe": params.nprobe, **weighed})

    def extended(self, whole: "Memory") -> "Memory":
        """Return the memory `whole`, which starts with this memory's points, with this memory's index."""
        if self.index is not None:
            add(self.index, whole.vectors[len(self.vectors) :])
        return replace(self, vectors=whole.vectors, labels=whole.labels, trained=whole.trained)

    @classmethod
    def read(cls, table: Table, trained_only: bool = False, coded: bool = False) -> "Memory | None":
        """Read the files in `table` that `write` wrote; None if the table contains no memory.

        `trained_only`: read only the training points of the run. `coded`: as in a `Block`. Raises TableError,
        StorageError.
        """
        files = {shard.path: shard for shard in table.shards}
        tables = [n for n, p in enumerate(files) if p.startswith(f"{FOLDER}/") and p not in (VECTORS, INDEX)]
        if not tables:
            return None
        facts: dict[str, Any] = table.parameters.get(FACTS) or {}
        vectors, file = _open(table.url, files[VECTORS])
        labels = _join(list_column(rows, "label_ids") for number in tables for rows in table.batches_of(number))
        factory, index = Factory(facts.get("index", EXACT)), None
        if INDEX in files:
            configure_faiss(None)
            index = read_index(table.url, files[INDEX])
        rows, wide = vectors.shape
        if labels.rows != rows or (index is not None and (index.ntotal, index.d) != (rows, factory.dimension(wide))):
            raise TableError(
                f"{table.url}: the labels, vectors and index of this memory are inconsistent. Fit the fusion again."
            )
        count, refine, measured = int(facts["trained"]), facts.get("refine", 1), facts.get("measured", {})
        memory = cls(vectors, labels, count, factory, index, refine, measured, file=file, coded=coded)
        if coded and index is None:
            memory.block.prepare()
        if not trained_only:
            return memory
        if index is not None:
            truncate(index, count)
        return replace(memory.first(count), index=index)

    def write(self, url: str) -> Iterator[Shard]:
        """Write files under `url`, and yield the files' manifest entries."""
        rows = len(self.vectors)
        starts = range(0, max(rows, 1), ROWS_A_FILE)
        for number, start in enumerate(starts):
            labels = self.labels.slice(start, min(start + ROWS_A_FILE, rows))
            table = pa.table({"label_ids": list_array(labels.entries, labels.offsets, pa.int32())})
            shard = write_shard(f"{url}/{FOLDER}", number, len(starts), table, _GROUP_ROWS)
            yield shard.model_copy(update={"path": f"{FOLDER}/{shard.path}"})
        with storage.writing(join(url, VECTORS)) as path:
            with open(path, "wb") as file:
                for start in range(0, rows, _GROUP_ROWS):
                    file.write(np.ascontiguousarray(self.vectors[start : start + _GROUP_ROWS]).view(np.uint8).data)
            shard = describe_file(path, VECTORS, rows)
        yield shard
        if self.index is not None:
            yield write_index(url, INDEX, self.block)

    def to(self, device: "torch.device") -> "Memory":
        """Return this memory with its vectors on `device`, for exact search, if the vectors fit."""
        import torch

        if device.type == "cpu" or 2 * self.vectors.nbytes > torch.cuda.mem_get_info(device)[0]:
            return self
        return replace(self, on_device=torch.tensor(self.vectors, device=device))

    @property
    def bytes(self) -> int:
        """Bytes of main memory that the points take."""
        points = len(self.vectors) * _point_bytes(self.factory, self._wide)
        return int(_fixed_bytes(self.factory, self._wide) + points + _LABEL_BYTES * len(self.labels.entries))

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "points": len(self.vectors),
            "trained": self.trained,
            "index": self.factory.spec,
            "refine": self.refine,
            "measured": dict(self.measured),
            "bytes": self.bytes,
            "stored": self.vectors.nbytes,
        }

    def votes(self, x: Any) -> SparseRows:
        """Return the labels of the training points nearest to x [B, D or more], with votes in (0, 1]."""
        similarity, rows = self.nearest(x)
        return count_votes(similarity, rows, self.labels)

    def nearest(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines [B, K] of the points nearest to x [B, D or more], best first, and the point ids int64.

        The result does not depend on the number of threads.
        """
        queries, count = self.unit(x), min(NEIGHBOURS, len(self.vectors))
        if self.on_device is not None:
            import torch

            from search.torch_topk import top_k

            best, points = top_k(torch.from_numpy(queries).to(self.on_device.device), self.on_device, count)
            return best.cpu().numpy(), points.cpu().numpy()

        if self.index is None or not count:
            keys = search_exactly(self.block, queries, count)
        else:
            keys = np.empty((len(queries), count), np.uint64)

            def look_up(_: int, start: int, stop: int) -> None:
                if start < stop:
                    with one_thread():
                        keys[start:stop] = search(self.block, queries[start:stop], count, self.refine)

            map_ranges(look_up, len(queries), min_rows=16)
        rows, similarity = unpack(keys)
        return similarity, rows

    @cached_property
    def block(self) -> Block:
        return Block(0, self.vectors, self.index, coded=self.coded)

    @property
    def _wide(self) -> int:
        return int(self.vectors.shape[1])

    def unit(self, x: Any) -> np.ndarray:
        rows = x[:, : self._wide]
        return unit(rows if isinstance(rows, np.ndarray) else rows.float().cpu().numpy())


def describe_memory(facts: Mapping[str, Any]) -> str:
    found = "" if facts["index"] == EXACT else f" with recall {100 * facts['measured']['recall']:.1f} %"
    return (
        f"{facts['points']:,} points, index {facts['index']}{found}, "
        f"{say_bytes(facts['bytes'])} in memory, {say_bytes(facts['stored'])} of vectors in files"
    )


def _open(url: str, shard: Shard) -> tuple[np.ndarray, MappedFile | None]:
    """Map the vectors of the table at `url` from the local file, or from a scratch copy of a remote file."""
    if not shard.rows or shard.bytes % (2 * shard.rows):
        raise TableError(
            f"{url}/{VECTORS}: {shard.bytes:,} bytes are not {shard.rows:,} vectors. Fit the fusion again."
        )
    if storage.is_local(url):
        place = (verify_shard if shard.bytes <= _HASHED else find_shard)(url, shard)
        file = MappedFile(storage.filesystem(place)[1], shard.bytes)
        return np.frombuffer(file.buffer, np.float16).reshape(shard.rows, -1), file
    scratch = ScratchFile(_WHAT)
    with storage.open_read(verify_shard(url, shard)) as source:
        while piece := source.read(storage.READ_BYTES):
            scratch.write(memoryview(piece))
    return np.frombuffer(scratch.map(), np.float16).reshape(shard.rows, -1), None


def _join(labels: Iterable[Ragged]) -> Ragged:
    joined = Ragged.join([Ragged.empty(0), *labels])
    return joined._replace(values=joined.values.astype(np.int32, copy=False))
