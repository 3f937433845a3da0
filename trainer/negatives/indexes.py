"""Hard negatives for fresh query embeddings, from the trainer's own index of a rank's labels.

`CopiedIndex` searches a stale copy of the vectors (MIPS-s, section 3). The copy is renewed every `refresh.every_steps`
steps and after every checkpoint, so that a resumed run and a run that was not stopped build the same index from the
checkpoint's vectors. With `refresh.rebuild_steps`, a thread builds the next index in the background; the step that
first uses the index does not depend on how long the build takes.

`FreshIndex` scores every label with its current vector in every step, in bfloat16 if the processor supports it, so that
a search costs a fraction of one-vs-all's forward pass. The search looks for the best K labels only in the K groups of
labels with the largest maximum scores, because no other group can contain one of the best K labels.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from schemas import PAD
from schemas.ragged import Ragged
from search.exclusions import Exclusions, start_search
from search.topk import Block, best, configure_faiss, merge, pack, pad_vectors, unpack
from trainer.device import send
from trainer.group import Group
from trainer.negatives.base import MIPS, NegativeSource, Sampled, SourceContext
from trainer.negatives.planner import restrict_to_labels
from trainer.rows.matrix import zeros
from trainer.stream.batch import Batch

if TYPE_CHECKING:
    from search.index import Factory, SearchParams

TARGET_RECALL = 0.9
PROBED = 64
_GROUP = 16  # labels per group
_CHUNK = 1 << 14  # labels scored at a time: their vectors stay in a cache
_QUERIES = 512  # queries whose scores are in memory at a time


class CopiedIndex(NegativeSource):
    """Index of a rank's labels, built when first used; a search finds the best `width` labels over all ranks.

    `kind`: a recipe's `refresh.index`, tuned to TARGET_RECALL, which the run's first index must reach. The index is
    rebuilt every `every` steps, and a new index is used `lag` steps after its vectors were copied.
    """

    name = "in-trainer"

    def __init__(self, width: int, first_epoch: int, context: SourceContext, kind: str, every: int, lag: int) -> None:
        self._vectors, self._group, self._seed = context.vectors, context.group, context.seed
        self._width, self.first_epoch = width, first_epoch
        self._kind, self._every, self._lag = kind, every, lag
        self._current: tuple[Block, SearchParams] | None = None
        self._next: Future[tuple[Block, SearchParams]] | None = None
        self._age = 0  # age of the copy of the vectors that is in use, in steps

    def before_checkpoint(self) -> None:
        """Rebuild the index at the next step, because a resumed run builds its index from the same vectors."""
        self._current = self._next = None

    def figures(self) -> dict[str, float]:
        """Return the age, in steps, of the copy of the vectors that the last step searched, and the index's recall."""
        recall = self._current[1].recall if self._current else None
        figures = {"index_age": float(self._age - 1)} if self._current else {}
        return figures | ({} if recall is None else {"index_recall": recall})

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        from search.index import require_recall

        assert x is not None
        queries = x.cpu().numpy()
        block, params = self._index(queries)
        if (batch.epoch, batch.step) == (self.first_epoch, 0):  # a run that goes on keeps going
            require_recall(self._factory(len(block.vectors)), params, TARGET_RECALL, None)
        positives = Ragged(batch.positives, batch.positive_offsets)
        exclusions = Exclusions(positives, Ragged.empty(len(batch)), Ragged.empty(len(batch)))
        queries = pad_vectors(queries, block.vectors.shape[1])
        keys = start_search(block, queries, exclusions, self._width, refine=params.factor)()
        return best_of_ranks(keys, self._width, self._group)

    def _index(self, queries: np.ndarray) -> "tuple[Block, SearchParams]":
        if self._current is None:
            self._current, self._age = self._build(self._copy(), queries), 0
        elif self._lag and self._age == self._every:
            # One thread per index: the thread of a dropped index may still be running.
            worker = ThreadPoolExecutor(1, thread_name_prefix="index")
            self._next = worker.submit(self._build, self._copy(), queries)
            worker.shutdown(wait=False)
        elif self._age == self._every + self._lag:
            index = self._next.result() if self._next else self._build(self._copy(), queries)
            self._current, self._next, self._age = index, None, self._lag
        self._age += 1
        return self._current

    def _factory(self, rows: int) -> "Factory":
        from search.index import choose

        return choose(f"IVF{max(1, int(rows**0.5))},Flat" if self._kind == MIPS else self._kind, rows)

    def _copy(self) -> np.ndarray:
        """Return a float32 copy [n, D] of the current vectors."""
        return self._vectors.vectors.to("cpu", torch.float32, copy=True).numpy()

    def _build(self, vectors: np.ndarray, queries: np.ndarray) -> "tuple[Block, SearchParams]":
        """Index the `vectors` [n, D] float32 of the rank's labels; no other code may change the array."""
        from search.index import AUTO, SearchParams, build, set_params, tune

        configure_faiss(None)
        rows, start, factory = len(vectors), self._vectors.start, self._factory(len(vectors))
        vectors = pad_vectors(vectors, factory.dimension(vectors.shape[1]))
        block = Block(start, vectors, build(factory, vectors, self._seed), str(self._vectors.vectors.device))
        wide = pad_vectors(queries, vectors.shape[1])
        fixed = [SearchParams(nprobe=min(PROBED, factory.lists))] if self._kind == MIPS else []
        for each in (*fixed, SearchParams()):  # more lists than the paper's only where its lists find too little
            params = tune(block, each, factory.lossy, wide, self._width, TARGET_RECALL)
            if params.recall is None or params.recall >= TARGET_RECALL:
                break
        if self._kind == AUTO and not factory.saves_time(rows, self._width, params.nprobe, vectors.shape[1]):
            return replace(block, index=None), SearchParams()
        set_params(block.index, params)
        return block, params


class FreshIndex(NegativeSource):
    """Searches the current vectors for the best `width` labels of each query over all ranks."""

    name = "in-trainer"

    def __init__(self, width: int, first_epoch: int, context: SourceContext) -> None:
        self._vectors, self._group, self._on_device = context.vectors, context.group, context.on_device
        self._width, self.first_epoch = width, first_epoch
        self._products = Products()

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        assert x is not None
        rows, scores = map(torch.cat, zip(*self._best(batch, x), strict=True))
        if self._on_device:
            return Sampled(rank_by_score(rows, scores, self._width), ranked=True)
        labels, values = (rows + self._vectors.start).cpu().numpy(), scores.cpu().numpy()
        return best_of_ranks(pack(np.where(values == -np.inf, PAD, labels), values), self._width, self._group)

    def _best(self, batch: Batch, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        vectors, start = self._vectors.vectors, self._vectors.start
        own = restrict_to_labels(batch, start, start + len(vectors))
        positives = Ragged(own.positives, own.positive_offsets)
        for first, block in zip(range(0, len(x), _QUERIES), x.split(_QUERIES), strict=True):
            some = positives.slice(first, first + len(block))
            masked = send((some.row_of(), some.entries), x.device)
            yield self._products.best(block, vectors, min(self._width, len(vectors)), masked)


def best_of_ranks(keys: np.ndarray, width: int, group: Group) -> Sampled:
    """Return the best labels over all ranks, [B, width], from each rank's `keys` [B, width] (search/topk.py)."""
    (keys,) = group.all_gather_arrays(best(keys, width))  # a rank may have fewer than `width` labels
    labels, _ = unpack(merge(np.split(keys, group.ranks), width))
    return Sampled(labels, ranked=True)


class Products:
    """Inner products with every vector, in memory that is reused from one search to the next."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @torch.no_grad()
    def best(
        self, x: torch.Tensor, vectors: torch.Tensor, width: int, masked: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows int64 and scores float32 [B, width], in any order, with the largest x.w; x [B, D], vectors [n,
        D].

        Scores have the precision of `product_dtype`, and are -inf for the `masked` pairs of queries and rows.
        """
        queries, rows = len(x), len(vectors)
        chunks = -(-rows // _CHUNK)
        groups = -(-rows // (_GROUP * chunks))  # groups per chunk
        size = _GROUP * groups
        dtype = product_dtype(x.device)
        x = x.to(dtype)
        scores = self._room(x, chunks * queries * size).view(chunks, queries, size)
        for number, block in enumerate(vectors.split(size)):
            if len(block) == size:
                torch.mm(x, block.to(x).T, out=scores[number])
            else:
                scores[number].fill_(-torch.inf)[:, : len(block)] = x @ block.to(x).T
        query, row = masked
        scores[row // size, query, row % size] = -torch.inf
        # Column j of a chunk is in group j modulo `groups`, so that maxima are taken over contiguous columns.
        maxima = torch.cat([part.view(queries, _GROUP, groups).amax(1) for part in scores], 1)
        group = maxima.topk(min(width, maxima.shape[1]), dim=1, sorted=False).indices
        chunk, column = group // groups, group % groups
        columns = column[:, :, None] + torch.arange(0, size, groups, device=x.device)  # [B, groups, 16]
        place = (chunk * queries + torch.arange(queries, device=x.device)[:, None])[:, :, None] * size + columns
        best = scores.view(-1)[place].flatten(1).topk(width, dim=1, sorted=False)
        labels = (chunk[:, :, None] * size + columns).flatten(1).gather(1, best.indices)
        return labels, best.values.float()

    def _room(self, x: torch.Tensor, count: int) -> torch.Tensor:
        if self._memory is None or len(self._memory) < count:
            # If every step allocated this memory, the system would have to clear it every time.
            self._memory = zeros((count,), x.dtype) if x.device.type == "cpu" else x.new_empty(count)
        return self._memory[:count]


def rank_by_score(rows: torch.Tensor, scores: torch.Tensor, width: int) -> torch.Tensor:
    """Sort `rows` [B, k] by descending score, then by row; return [B, width], padded with -1, also for score -inf."""
    rows, order = rows.sort(dim=1)
    scores, order = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    rows = rows.gather(1, order).masked_fill(scores == -torch.inf, PAD)
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=PAD)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device multiplies it faster than float32, else float32."""
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16
