"""Pooling of a model's last hidden states, as sentence-transformers names it, to a vector a row."""

from collections.abc import Sequence

import torch

# As sentence-transformers of any version writes them, in the order in which it joins several.
MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pool(states: torch.Tensor, mask: torch.Tensor, modes: Sequence[str], skip: int = 0) -> torch.Tensor:
    """Return the pooled `states` [B, T, D] of rows padded on the right, `mask` [B, T] bool: [B, D × modes].

    `skip`: first tokens, those of a prompt, that no mode but the last token looks at.
    """
    first = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    lengths = mask.sum(1)
    if skip:
        first = torch.where(lengths > skip, skip, first)
        mask = mask & (torch.arange(mask.shape[1], device=mask.device) >= skip)
    rows = torch.arange(len(mask), device=mask.device)
    present = mask.unsqueeze(2).to(states.dtype)
    pooled = []
    for mode in modes:
        if mode == "cls":
            x = states[rows, first] if skip else states[:, 0]
        elif mode == "lasttoken":
            x = states[rows, lengths - 1]
        elif mode == "max":
            x = states.masked_fill(present == 0, -torch.inf).max(1).values
        else:
            weight = present
            if mode == "weightedmean":
                weight = present * torch.arange(1, mask.shape[1] + 1, device=mask.device)[:, None]
            total = weight.sum(1)
            total = total.clamp(min=1e-9) if skip else total  # a row may be no longer than its prompt
            x = (states * weight).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)
        pooled.append(x)
    return torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]
