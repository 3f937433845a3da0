"""Ragged rows of token ids as a padded matrix."""

from typing import NamedTuple

import numpy as np
import torch


class Padded(NamedTuple):
    """`input_ids` [B, T] padded behind each row to the longest, at least 1 wide; `lengths` [B] int64."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    @property
    def attention_mask(self) -> torch.Tensor:
        """[B, T] bool: true where a token is."""
        return torch.arange(self.input_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]


def pad_rows(
    values: np.ndarray | torch.Tensor,
    offsets: np.ndarray | torch.Tensor,
    *,
    pad: int = 0,
    most: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> Padded:
    """Rows `values[offsets[i]:offsets[i + 1]]` of `offsets` [B + 1], cut after `most` tokens; where the tensors are."""
    ids, bounds = as_tensor(values).to(dtype), as_tensor(offsets)
    lengths = bounds[1:] - bounds[:-1]
    if most is not None:
        starts = torch.repeat_interleave(bounds[:-1], lengths)
        ids = ids[torch.arange(len(ids), device=ids.device) - starts < most]
        lengths = lengths.clamp(max=most)
    width = max(1, int(lengths.max())) if len(lengths) else 1
    padded = Padded(ids.new_full((len(lengths), width), pad), lengths)
    padded.input_ids.masked_scatter_(padded.attention_mask, ids)
    return padded


def as_tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A tensor on the array's memory, or on a copy where that may not be written to: torch knows no such memory."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())
