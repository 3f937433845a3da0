"""A batch of the stream, stored by column. Token ids are padded only if a model needs a matrix."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from schemas.ragged import Ragged
from trainer.device import as_tensor, map_arrays, pack, unpack
from trainer.inputs import Inputs

Margins = tuple[float, float]  # of random and of hard negatives: added to their scores after the temperature
NO_MARGINS: Margins = (0.0, 0.0)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True)
class DrawnLabels:
    """Labels of queries that each have their own pool, for a device that merges the labels.

    The labels of query q are `label` [starts[q] : starts[q + 1]], draws last, int32 (int64 from 2**31 labels on);
    `starts` [B + 1] int32. A draw is ignored if the query already has the same label. `use` [n] int32 is 2 q, or 2 q +
    1 for a draw. The absolute value of `weight` [n] float32 is the weight of a label; it is negative for a positive.
    Hard negatives may already be on the device, as `hard` [B, H] padded with -1: then their places in `label`, from
    hard_starts[q] on, contain -1.
    """

    label: np.ndarray
    use: np.ndarray
    weight: np.ndarray
    starts: np.ndarray
    hard: torch.Tensor | None = None
    hard_starts: np.ndarray | None = None
    margins: Margins = NO_MARGINS


class Candidates(NamedTuple):
    """Labels to score, each listed once, and the queries that use each label.

    `ids` [C] int64: the rows of the classifier that the step touches. The first R ids and the other ids are each in
    ascending order, so that rows that are close in memory follow each other. The first R ids are the shared pool: every
    query is scored against the pool with `pool_weight` [R] float32, except for the query's own positives and hard
    negatives, (`masked_query`, `masked_pool`) [m]. A pair scores one query against one label: `pair_query` [n]
    ascending, `pair_label` [n] (index into ids), `pair_positive` [n] bool, `pair_weight` [n] float32. Queries and
    indices into ids are int32 with a shared pool, int64 otherwise. `pool_margin` [] and `pair_margin` [n] float32
    (empty: 0; 0 for positives) are added to scores after the temperature. If a device merges the labels, `drawn`
    contains the labels, and the other fields are empty.
    """

    ids: np.ndarray
    pair_query: np.ndarray
    pair_label: np.ndarray
    pair_positive: np.ndarray
    pair_weight: np.ndarray
    pool_weight: np.ndarray = np.empty(0, np.float32)
    masked_query: np.ndarray = np.empty(0, np.int64)
    masked_pool: np.ndarray = np.empty(0, np.int64)
    drawn: DrawnLabels | None = None
    pool_margin: np.ndarray = np.zeros((), np.float32)
    pair_margin: np.ndarray = np.empty(0, np.float32)

    @property
    def touched(self) -> np.ndarray:
        """Distinct labels that the step touches, int64 [C]; waits for hard negatives on a device."""
        if self.drawn is None:
            return self.ids
        hard = [] if self.drawn.hard is None else [self.drawn.hard.cpu().numpy().ravel()]
        ids = np.unique(np.concatenate([self.drawn.label, *hard])).astype(np.int64)
        return ids[ids >= 0]


class Padded(NamedTuple):
    """Token ids `input_ids` [B, T], each row padded at the end to the longest row (T >= 1); `lengths` [B] int64."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    @property
    def attention_mask(self) -> torch.Tensor:
        """[B, T] bool: True for tokens."""
        return torch.arange(self.input_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]


@dataclass(frozen=True)
class Batch:
    """B queries of one global step, or the part of the step that belongs to one rank.

    `rows` [B] int64: global row ids. `inputs`: the encoder's inputs. `positives` [sum P], with `positive_offsets` [B +
    1]. `hard` [B, K]: hard negatives joined from the table, padded with -1; None without a table. `candidates`: set if
    the stream plans the batch. `prepared`: set if the stream prepares the inputs for the encoder. `filtered`: labels
    that are never negatives of a row; None if no table has filter pairs. For a global batch, a rank may have only its
    own labels: positives, `drawn_positives` [sum P] bool (whether the step trains on each positive), and hard negatives
    as rows.
    """

    epoch: int
    step: int
    rows: np.ndarray
    inputs: Inputs
    positives: np.ndarray
    positive_offsets: np.ndarray
    hard: np.ndarray | Ragged | None = None
    candidates: Candidates | None = None
    drawn_positives: np.ndarray | None = None
    prepared: Any = None
    filtered: Ragged | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def padded(self, *, pad: int = 0, most: int | None = None, dtype: torch.dtype = torch.int64) -> Padded:
        """Return token ids [B, T], T at least 1, as `pad_rows` does. Raises ValueError for a batch without tokens."""
        if self.inputs.tokens is None:
            raise ValueError("this batch has no tokens: the stream was opened with other inputs")
        return pad_rows(self.inputs.tokens, pad=pad, most=most, dtype=dtype)

    def to(self, device: torch.device | str | int | None, non_blocking: bool = False) -> "Batch":
        """Return this batch with torch tensors on `device` in place of all arrays; unsigned token ids become int64."""

        def move(array: np.ndarray | torch.Tensor) -> torch.Tensor:
            moved = as_tensor(array).to(device, non_blocking=non_blocking)
            return moved.to(torch.int64) if moved.dtype in _UNSIGNED else moved

        return map_arrays(self, move)

    def pin_memory(self) -> "Batch":
        """Return this batch with tensors in pinned memory, so that a device can copy without waiting."""
        return map_arrays(self, lambda array: as_tensor(array).pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pack the batch into one block of memory (shared memory in a DataLoader worker), so that no row is pickled."""
        packed = pack(self)
        return (unpack, packed) if packed is not None else (Batch, tuple(getattr(self, f.name) for f in fields(self)))


def pad_rows(tokens: Ragged, *, pad: int = 0, most: int | None = None, dtype: torch.dtype = torch.int64) -> Padded:
    """Pad B rows of token ids, truncated to `most` tokens: arrays, or tensors on the same device."""
    if isinstance(tokens.values, np.ndarray) and isinstance(tokens.offsets, np.ndarray):
        sizes = np.empty(tokens.rows, np.int64)
        longest = _measure(tokens.offsets, np.iinfo(np.int64).max if most is None else most, sizes)
        matrix = torch.empty((tokens.rows, longest), dtype=dtype)
        _copy_rows(*tokens, sizes, pad, matrix.numpy())
        return Padded(matrix, torch.from_numpy(sizes))
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


@numba.njit(cache=True)  # so short that releasing the lock would take longer
def _measure(offsets: np.ndarray, most: int, lengths: np.ndarray) -> int:
    """Write the lengths of rows, at most `most`; return the largest, at least 1."""
    longest = 1
    for row in range(len(lengths)):
        lengths[row] = min(offsets[row + 1] - offsets[row], most)
        longest = max(longest, lengths[row])
    return longest


@numba.njit(cache=True)
def _copy_rows(values: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, pad: int, out: np.ndarray) -> None:
    """Copy the first lengths[i] values of row i to the start of row i of `out` [B, T], and pad the rest of the row."""
    for row in range(len(lengths)):
        target, source = out[row], values[offsets[row] : offsets[row] + lengths[row]]
        for i in range(len(source)):
            target[i] = source[i]
        target[len(source) :] = pad
