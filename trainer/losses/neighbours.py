"""Loss of the votes that near training points give for their labels (RAE-XMC: values of the top keys, added up)."""

import numpy as np
import torch
from torch.nn.functional import normalize

from schemas.ragged import Ragged
from trainer.stream.transfer import send


def vote_loss(
    x: torch.Tensor, keys: torch.Tensor, found: np.ndarray, own: Ragged, theirs: Ragged, temperature: float
) -> torch.Tensor:
    """Return the sum over queries x [B, D] of -mean over `own` labels of log(votes), of labels that have any.

    A label's votes are the softmax of cos(x, keys [B, K, D]) / `temperature` over the neighbours that are `found`
    [B, K] bool, summed over those that have the label; `theirs` are the labels of the B * K neighbours.
    """
    s = torch.einsum("bd,bkd->bk", normalize(x, dim=1), keys.to(x.dtype)) / temperature
    absent = send(~found, x.device)
    log_share = s.masked_fill(absent, torch.finfo(s.dtype).min).log_softmax(1).flatten()
    label, neighbour = _shared(own, theirs.keep(np.repeat(found.ravel(), theirs.counts)), found.shape[1])
    weight = np.repeat(1 / np.maximum(own.counts, 1), own.counts)
    label, neighbour, weight = send((label, neighbour, weight), x.device)
    each = log_share[neighbour]
    greatest = each.new_full((len(weight),), -torch.inf).scatter_reduce(0, label, each.detach(), "amax")
    total = torch.zeros_like(greatest).index_add(0, label, (each - greatest[label]).exp())
    voted = total > 0
    return -(weight.to(x.dtype)[voted] @ (greatest[voted] + total[voted].log()))


def _shared(own: Ragged, theirs: Ragged, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places in `own` and the neighbours, of B * `width`, of all pairs that share a label."""
    neighbour = theirs.row_of()
    if not len(own.entries) or not len(neighbour):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # Query and label make one number, so that one binary search finds all.
    stride = 1 + max(int(own.entries.max()), int(theirs.entries.max()))
    sought = neighbour // width * stride + theirs.entries.astype(np.int64)
    known = own.row_of() * stride + own.entries.astype(np.int64)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], sought), len(known) - 1)
    hit = known[order[place]] == sought
    return order[place[hit]], neighbour[hit]
