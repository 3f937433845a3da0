"""Hard negatives of fresh query embeddings against fresh classifier vectors: every label is scored in every step.

Scores are bfloat16 where the processor multiplies those, so that a search costs a fraction of one-vs-all's forward
pass. The best K are looked for in the K groups of labels with the greatest maxima: no others can hold one of them.
"""

from collections.abc import Iterator

import numpy as np
import torch

from schemas import PAD
from schemas.ragged import Ragged
from trainer.negatives.base import NegativeSource, Sampled, SourceContext, best_of_ranks, within
from trainer.rows.memory import zeros
from trainer.stream.batch import Batch
from trainer.stream.transfer import send

_GROUP = 16  # labels
_CHUNK = 1 << 14  # labels scored at a time: their vectors stay in a cache
_QUERIES = 512  # whose scores are held at a time


class FreshIndex(NegativeSource):
    """The best `width` labels of each query, of the vectors as they are."""

    name = "in-trainer"

    def __init__(self, width: int, first_epoch: int, context: SourceContext) -> None:
        self._vectors, self._group, self._on_device = context.vectors, context.group, context.on_device
        self._width, self.first_epoch = width, first_epoch
        self._products = Products()

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        """Return of all ranks' labels the best for x [B, D] that are no positives, [B, K]."""
        assert x is not None
        rows, scores = map(torch.cat, zip(*self._best(batch, x), strict=True))
        if self._on_device:
            return Sampled(rank_by_score(rows, scores, self._width), ranked=True)
        from search.candidates import pack

        labels, values = (rows + self._vectors.start).cpu().numpy(), scores.cpu().numpy()
        return best_of_ranks(pack(np.where(values == -np.inf, PAD, labels), values), self._width, self._group)

    def _best(self, batch: Batch, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the best rows of some queries after the other, and their scores."""
        vectors, start = self._vectors.vectors, self._vectors.start
        own = within(batch, start, start + len(vectors))
        positives = Ragged(own.positives, own.positive_offsets)
        for first, block in zip(range(0, len(x), _QUERIES), x.split(_QUERIES), strict=True):
            some = positives.slice(first, first + len(block))
            masked = send((some.row_of(), some.entries), x.device)
            yield self._products.best(block, vectors, min(self._width, len(vectors)), masked)


class Products:
    """Inner products with every vector, in memory that is kept from one search to the next."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @torch.no_grad()
    def best(
        self, x: torch.Tensor, vectors: torch.Tensor, width: int, masked: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows int64 and scores float32 [B, width] of the greatest x.w, x [B, D], vectors [n, D], width <= n.

        In any order; scores have the precision of `product_dtype`, and are -inf for the pairs `masked`: queries and
        rows.
        """
        queries, rows = len(x), len(vectors)
        chunks = -(-rows // _CHUNK)
        groups = -(-rows // (_GROUP * chunks))  # of a chunk
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
        # Column j of a chunk is in group j modulo `groups`: maxima are then taken over contiguous columns.
        maxima = torch.cat([part.view(queries, _GROUP, groups).amax(1) for part in scores], 1)
        group = maxima.topk(min(width, maxima.shape[1]), dim=1, sorted=False).indices
        chunk, column = group // groups, group % groups
        columns = column[:, :, None] + torch.arange(0, size, groups, device=x.device)  # [B, groups, 16]
        place = (chunk * queries + torch.arange(queries, device=x.device)[:, None])[:, :, None] * size + columns
        best = scores.view(-1)[place].flatten(1).topk(width, dim=1, sorted=False)
        labels = (chunk[:, :, None] * size + columns).flatten(1).gather(1, best.indices)
        return labels, best.values.float()

    def _room(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return [count] numbers of any values, of the kind of `x`."""
        if self._memory is None or len(self._memory) < count:
            # Large memory that is asked for in every step has to be cleared by the system in every step.
            self._memory = zeros((count,), x.dtype) if x.device.type == "cpu" else x.new_empty(count)
        return self._memory[:count]


def rank_by_score(rows: torch.Tensor, scores: torch.Tensor, width: int) -> torch.Tensor:
    """Return `rows` [B, k] by falling `scores`, equal ones ascending, as [B, width]; -1 pads, and stands for -inf."""
    rows, order = rows.sort(dim=1)
    scores, order = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    rows = rows.gather(1, order).masked_fill(scores == -torch.inf, PAD)
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=PAD)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device multiplies it faster than float32."""
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16
