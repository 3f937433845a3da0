"""Hard negatives of fresh query embeddings against stale classifier vectors.

The index holds a copy of the vectors, made anew every `refresh.every_steps` steps and after every checkpoint: a
resumed run builds it of the checkpoint's vectors, and so did the run that was not stopped. With `refresh.rebuild_steps`
the next one is built in a thread meanwhile, and used from a step on that does not depend on how long that took.
Sampling by MIPS (MIPS-s, section 3).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from schemas.ragged import Ragged
from search.factory import AUTO, EXACT
from trainer.negatives.base import MIPS, NegativeSource, Sampled, SourceContext, best_of_ranks
from trainer.stream.batch import Batch

if TYPE_CHECKING:
    from search.block import Block
    from search.params import SearchParams

TARGET_RECALL = 0.9
PROBED = 64


@dataclass(frozen=True)
class IndexOptions:
    """`kind`: a recipe's `refresh.index`. Made anew every `every` steps, used `lag` steps after; K = `width`."""

    kind: str = EXACT
    every: int = 1000
    lag: int = 0
    width: int = 1
    first_epoch: int = 0


class CopiedIndex(NegativeSource):
    """The index of a rank's labels, built when it is first asked."""

    name = "in-trainer"

    def __init__(self, options: IndexOptions, context: SourceContext) -> None:
        self._options, self._vectors, self._group = options, context.vectors, context.group
        self._seed, self.first_epoch = context.seed, options.first_epoch
        self._current: tuple[Block, SearchParams] | None = None
        self._next: Future[tuple[Block, SearchParams]] | None = None
        self._age = 0  # steps since the copy of the vectors that is in use was made

    def before_checkpoint(self) -> None:
        """Have it built anew at the next step: a run that is resumed has none, and builds it of these very vectors."""
        self._current = self._next = None

    def facts(self) -> dict[str, float]:
        """Return the steps from the copy of the vectors that the last step searched to that step."""
        return {"index_age": self._age - 1} if self._current else {}

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        """Return of all ranks' labels the best for x [B, D] that are no positives, [B, K]."""
        from search.block import padded
        from search.exclusions import Exclusions, start_search

        assert x is not None
        queries = x.cpu().numpy()
        block, params = self._index(queries)
        positives = Ragged(batch.positives, batch.positive_offsets)
        exclusions = Exclusions(positives, Ragged.empty(len(batch)))
        queries = padded(queries, block.vectors.shape[1])
        keys = start_search(block, queries, exclusions, self._options.width, refine=params.factor)()
        return best_of_ranks(keys, self._options.width, self._group)

    def _index(self, queries: np.ndarray) -> "tuple[Block, SearchParams]":
        """Return the index of this step."""
        every, lag = self._options.every, self._options.lag
        if self._current is None:
            self._current, self._age = self._build(self._copy(), queries), 0
        elif lag and self._age == every:
            # A thread for each: one whose index was dropped may still be at work.
            worker = ThreadPoolExecutor(1, thread_name_prefix="index")
            self._next = worker.submit(self._build, self._copy(), queries)
            worker.shutdown(wait=False)
        elif self._age == every + lag:
            index = self._next.result() if self._next else self._build(self._copy(), queries)
            self._current, self._next, self._age = index, None, lag
        self._age += 1
        return self._current

    def _copy(self) -> np.ndarray:
        """Copy the vectors as they are now, float32 [n, D]."""
        return self._vectors.vectors.to("cpu", torch.float32, copy=True).numpy()

    def _build(self, vectors: np.ndarray, queries: np.ndarray) -> "tuple[Block, SearchParams]":
        """Index `vectors` [n, D] float32, which nobody else changes, of the rank's labels."""
        from search.block import Block, padded
        from search.factory import choose
        from search.index import build, set_up
        from search.params import SearchParams, apply, tune

        set_up(None)
        rows, start, kind = len(vectors), self._vectors.start, self._options.kind
        spec = f"IVF{max(1, int(rows**0.5))},Flat" if kind == MIPS else kind
        factory = choose(spec, rows)
        vectors = padded(vectors, factory.dimension(vectors.shape[1]))
        block = Block(start, vectors, build(factory, vectors, self._seed), str(self._vectors.vectors.device))
        wide = padded(queries, vectors.shape[1])
        if kind == MIPS:
            params = SearchParams(nprobe=min(PROBED, factory.lists))
        else:
            params = tune(block, SearchParams(), factory.lossy, wide, self._options.width, TARGET_RECALL)
        # Vectors that are hardly trained lie in no clusters: most lists would be read, which is dearer than a product.
        if kind == AUTO and params.nprobe and not factory.pays(rows, self._options.width, params.nprobe):
            return replace(block, index=None), SearchParams()
        apply(block.index, params)
        return block, params
