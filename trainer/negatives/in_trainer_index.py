"""An index within the trainer: hard negatives of fresh query embeddings against stale classifier vectors.

It holds a copy of the vectors, made anew every `refresh.every_steps` steps and after every checkpoint: a resumed run
builds it of the checkpoint's vectors, and so did the run that was not stopped. With `refresh.rebuild_steps` the next
one is built in a thread meanwhile, and used from a step on that does not depend on how long that took. Sampling by MIPS
(MIPS-s, section 3).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from schemas.ragged import no_entries
from trainer.config import Recipe
from trainer.group import Group
from trainer.heads.classifier import Classifier
from trainer.stream import Batch

if TYPE_CHECKING:
    from search.block import Block
    from search.params import SearchParams

EXACT_LABELS = 1 << 15  # up to so many, 'auto' scores every label
TARGET_RECALL = 0.9
MIPS = "mips"  # K = sqrt(L) clusters of spherical k-means, of which tau = 64 are searched (MIPS-s, sections 4 and 5.1)
PROBED = 64


class OwnIndex:
    """The index of a rank's labels, built when it is first asked."""

    def __init__(self, recipe: Recipe) -> None:
        self._spec, self._every = recipe.refresh.index, recipe.refresh.every_steps
        self._width, self._seed = recipe.negatives.table_width, recipe.train.seed
        self._lag = recipe.refresh.rebuild_steps
        self._built: tuple[Block, SearchParams] | None = None
        self._next: Future[tuple[Block, SearchParams]] | None = None
        self._age = 0  # steps since the copy of the vectors that is in use was made

    @property
    def age(self) -> int | None:
        """Steps from the copy of the vectors that the last step searched to that step; None before the first."""
        return self._age - 1 if self._built else None

    def drop(self) -> None:
        """Have it built anew at the next step; what is being built is of no use then."""
        self._built = self._next = None

    def join(self, batch: Batch, x: torch.Tensor, classifier: Classifier, group: Group) -> Batch:
        """The global batch with `hard` [B, K]: of all ranks' labels the best for x [B, D] that are no positives."""
        from search.block import padded
        from search.candidates import best, unpack
        from search.exclusions import Exclusions, Ragged, search_negatives

        queries = x.cpu().numpy()
        block, effort = self._current(classifier, queries)
        nothing = Ragged(*no_entries(len(batch)))
        known = Exclusions(Ragged(batch.positives, batch.positive_offsets), nothing)
        queries = padded(queries, block.vectors.shape[1])
        own = search_negatives(block, queries, known, self._width, refine=effort.factor)
        (keys,) = group.gather_arrays(own)
        keys = np.concatenate(np.split(keys, group.ranks), axis=1)  # [B, G K]
        labels, _ = unpack(best(keys, self._width))
        return replace(batch, hard=labels)

    def _current(self, classifier: Classifier, queries: np.ndarray) -> "tuple[Block, SearchParams]":
        """The index of this step."""
        if self._built is None:
            self._built, self._age = self._build(_copied(classifier), classifier.start, queries), 0
        elif self._lag and self._age == self._every:
            # A thread of its own each: one whose index was dropped may still be at work.
            worker = ThreadPoolExecutor(1, thread_name_prefix="index")
            self._next = worker.submit(self._build, _copied(classifier), classifier.start, queries)
            worker.shutdown(wait=False)
        elif self._age == self._every + self._lag:
            made = self._next.result() if self._next else self._build(_copied(classifier), classifier.start, queries)
            self._built, self._next, self._age = made, None, self._lag
        self._age += 1
        return self._built

    def _build(self, vectors: np.ndarray, start: int, queries: np.ndarray) -> "tuple[Block, SearchParams]":
        """Of `vectors` [n, D] float32, which nobody else changes, of the labels from `start` on."""
        from search.block import Block, padded
        from search.factory import AUTO, EXACT, Factory
        from search.index import build, set_up
        from search.params import SearchParams, apply, tune

        set_up(None)
        rows = len(vectors)
        spec = self._spec
        if spec == MIPS:
            spec = f"IVF{max(1, int(rows**0.5))},Flat"
        elif spec == AUTO:
            spec = EXACT if rows <= EXACT_LABELS else f"IVF{int(4 * rows**0.5)},Flat"
        factory = Factory.parse(spec)
        vectors = padded(vectors, factory.dimension(vectors.shape[1]))
        block = Block(start, vectors, build(factory, vectors, self._seed))
        wide = padded(queries, vectors.shape[1])
        if self._spec == MIPS:
            effort = SearchParams(nprobe=min(PROBED, factory.lists))
        else:
            effort = tune(block, SearchParams(), factory.lossy, wide, self._width, TARGET_RECALL)
        # Vectors that are hardly trained lie in no clusters: most lists would be read, which is dearer than a product.
        if self._spec == AUTO and effort.nprobe and not factory.pays(rows, self._width, effort.nprobe):
            return Block(start, vectors, None), SearchParams()
        apply(block.index, effort)
        return block, effort


def _copied(classifier: Classifier) -> np.ndarray:
    """The vectors as they are now, float32 [n, D]."""
    return classifier.vectors.to("cpu", torch.float32, copy=True).numpy()
