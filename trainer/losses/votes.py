"""Loss on the votes that nearby training points cast for their labels (RAE-XMC: the sum of the top keys' values)."""

import numpy as np
import torch
from torch.nn.functional import normalize

from schemas.ragged import Ragged
from trainer.stream.transfer import send


def vote_loss(
    x: torch.Tensor, keys: torch.Tensor, found: np.ndarray, own: Ragged, theirs: Ragged, temperature: float
) -> torch.Tensor:
    """Return the sum over queries x [B, D] of -mean(log(votes)), where the mean is over `own` labels that have votes.

    Neighbours vote with the softmax of cos(x, keys [B, K, D]) / `temperature` over the neighbours that were `found`
    [B, K] (bool). A label's votes are the sum over the neighbours with this label; `theirs` are the labels of the B * K
    neighbours.
    """
    s = torch.einsum("bd,bkd->bk", normalize(x, dim=1), keys.to(x.dtype)) / temperature
    log_share = s.masked_fill(send(~found, x.device), torch.finfo(s.dtype).min).log_softmax(1).flatten()
    theirs = theirs.keep(np.repeat(found.ravel(), theirs.counts))
    neighbour, stride = theirs.row_of(), 1 + max(int(ids.entries.max(initial=0)) for ids in (own, theirs))
    pairs = own.row_of() * stride + own.entries, neighbour // found.shape[1] * stride + theirs.entries
    number = np.unique(np.concatenate(pairs), return_inverse=True)[1]  # number of each pair of query and label
    label, vote, weight = number[: len(pairs[0])], number[len(pairs[0]) :], 1 / np.repeat(own.counts, own.counts)
    label, vote, weight, neighbour = send((label, vote, weight, neighbour), x.device)
    each = log_share[neighbour]
    # In logarithms: a far neighbour's share may be too small for a float.
    greatest = each.new_full((len(number),), -torch.inf).scatter_reduce(0, vote, each.detach(), "amax")
    total = torch.zeros_like(greatest).index_add(0, vote, (each - greatest[vote]).exp())
    voted = total[label] > 0
    label = label[voted]
    return -(weight[voted].to(x.dtype) @ (greatest[label] + total[label].log()))
