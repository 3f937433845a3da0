"""Ragged rows of token ids as a padded matrix."""

from typing import NamedTuple

import numba
import numpy as np
import torch

from schemas.ragged import Ragged


class Padded(NamedTuple):
    """`input_ids` [B, T] padded behind each row to the longest, at least 1 wide; `lengths` [B] int64."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    @property
    def attention_mask(self) -> torch.Tensor:
        """[B, T] bool: true where a token is."""
        return torch.arange(self.input_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]


def pad_rows(tokens: Ragged, *, pad: int = 0, most: int | None = None, dtype: torch.dtype = torch.int64) -> Padded:
    """Pad B rows of token ids, cut after `most`: arrays, or tensors, whose device the result is on."""
    if isinstance(tokens.values, np.ndarray) and isinstance(tokens.offsets, np.ndarray):
        return _pad_arrays(tokens, pad, most, dtype)
    ids, bounds = as_tensor(tokens.values).to(dtype), as_tensor(tokens.offsets)
    lengths = bounds[1:] - bounds[:-1]
    if most is not None:
        starts = torch.repeat_interleave(bounds[:-1], lengths)
        ids = ids[torch.arange(len(ids), device=ids.device) - starts < most]
        lengths = lengths.clamp(max=most)
    width = max(1, int(lengths.max())) if len(lengths) else 1
    padded = Padded(ids.new_full((len(lengths), width), pad), lengths)
    padded.input_ids.masked_scatter_(padded.attention_mask, ids)
    return padded


def _pad_arrays(tokens: Ragged, pad: int, most: int | None, dtype: torch.dtype) -> Padded:
    lengths = np.empty(tokens.rows, np.int64)
    longest = _measure(tokens.offsets, np.iinfo(np.int64).max if most is None else most, lengths)
    ids = torch.empty((tokens.rows, longest), dtype=dtype)
    _copy_rows(*tokens, lengths, pad, ids.numpy())
    return Padded(ids, torch.from_numpy(lengths))


@numba.njit(cache=True)  # so short that letting other threads in would take longer
def _measure(offsets: np.ndarray, most: int, lengths: np.ndarray) -> int:
    """Write the lengths of rows, `most` at most; return the greatest, 1 at least."""
    longest = 1
    for row in range(len(lengths)):
        lengths[row] = min(offsets[row + 1] - offsets[row], most)
        longest = max(longest, lengths[row])
    return longest


@numba.njit(cache=True)
def _copy_rows(values: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, pad: int, out: np.ndarray) -> None:
    """Copy the first lengths[i] values of each row to the left of `out` [B, T], with pads behind."""
    for row in range(len(lengths)):
        target, source = out[row], values[offsets[row] : offsets[row] + lengths[row]]
        for i in range(len(source)):
            target[i] = source[i]
        target[len(source) :] = pad


def as_tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return a tensor on the array's memory, or on a copy where that is read-only, which torch does not know."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())
