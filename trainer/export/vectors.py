"""Classifier vectors in safetensors files by label range: written a range at a time, read into memory or mapped."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load

from schemas.mapped import Mapped
from trainer.checkpoints.checkpoint import save_tensors

NAME, POSITIONS = "weight", "rows"
_COMPARED = 1 << 16  # rows at a time
DTYPES = {"float32": torch.float32, "float16": torch.float16}
_DTYPES: dict[str, np.dtype] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}  # by their names in files


def write_vectors(path: Path, rows: torch.Tensor, start: int, dtype: str) -> None:
    """Write `rows` [n, D], the vectors of labels [start, start + n), to a file. `dtype`: a name of DTYPES."""
    save_tensors(str(path), {NAME: rows.detach().to(DTYPES[dtype]).contiguous()}, {"start": str(start)})


def read_vectors(content: bytes) -> np.ndarray:
    """Return the rows [n, D] of a file of `write_vectors`, which has this content."""
    return load(content)[NAME].numpy()  # type: ignore[no-any-return]


def map_vectors(file: Mapped) -> np.ndarray:
    """Return the same of a mapped file, as they lie there. Raises ValueError, SafetensorError where it is another."""
    with safe_open(file.path, "np") as header:
        rows = header.get_slice(NAME)
        shape, dtype, names = rows.get_shape(), _DTYPES[rows.get_dtype()], header.keys()
    data = np.frombuffer(file.whole, np.uint8)
    start = len(data) - math.prod(shape) * dtype.itemsize
    if [*names] != [NAME] or start < 0:
        raise ValueError(f"tensors {', '.join(names)} in {len(data)} bytes, expected {NAME} alone")
    return data[start:].view(dtype).reshape(shape)


def write_patch(path: Path, positions: np.ndarray, rows: np.ndarray) -> None:
    """Write `rows` [n, D], which lie over those at `positions` int64 [n] of a file of vectors."""
    tensors = {POSITIONS: torch.from_numpy(positions), NAME: torch.from_numpy(rows)}
    save_tensors(str(path), tensors)


def patch_vectors(rows: np.ndarray, patch: bytes) -> None:
    """Put the rows of a patch in place of those that were mapped. Raises ValueError where it does not fit."""
    tensors = load(patch)
    positions, changed = tensors[POSITIONS].numpy(), tensors[NAME].numpy()
    if changed.shape != (len(positions), rows.shape[1]) or changed.dtype != rows.dtype or positions.min(initial=0) < 0:
        raise ValueError(f"changed vectors of shape {changed.shape}, {changed.dtype}, over {rows.shape}, {rows.dtype}")
    rows[positions] = changed


def changed_rows(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the positions of rows that differ in a bit between two arrays [n, D] of one type, ascending."""
    bits = np.dtype(f"u{before.dtype.itemsize}")
    changed = [np.zeros(0, np.int64)]
    for start in range(0, len(before), _COMPARED):
        pair = (np.ascontiguousarray(rows[start : start + _COMPARED]).view(bits) for rows in (before, after))
        changed.append(start + np.flatnonzero(np.not_equal(*pair).any(axis=1)))
    return np.concatenate(changed)


class Vectors:
    """[L, D] as arrays of label ranges laid end to end.

    A slice is a tensor, a view of one range where possible; so are rows by their ids, int64 [n].
    """

    def __init__(self, ranges: Sequence[np.ndarray]) -> None:
        self.ranges = tuple(ranges)
        self.starts = np.cumsum([0, *map(len, ranges)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.ranges[0].shape[1]

    def to(self, device: torch.device) -> torch.Tensor:
        """Copy all of them to `device`, a range at a time: [L, D]."""
        rows = torch.empty(self.shape, dtype=torch.from_numpy(self.ranges[0][:0]).dtype, device=device)
        for first, array in self.parts():
            rows[first : first + len(array)] = torch.from_numpy(array).to(device)
        return rows

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            return self._take(rows.numpy())
        start, stop, _ = rows.indices(len(self))
        parts = [torch.from_numpy(part) for part in self._parts(start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first label, rows [n, D]) of every range."""
        return zip(self.starts.tolist(), self.ranges, strict=False)

    def _take(self, ids: np.ndarray) -> torch.Tensor:
        rows = np.empty((len(ids), self.shape[1]), self.ranges[0].dtype)
        for first, array in self.parts():
            inside = (ids >= first) & (ids < first + len(array))
            rows[inside] = array[ids[inside] - first]
        return torch.from_numpy(rows)

    def _parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        for first, array in self.parts():
            low, high = max(start - first, 0), min(stop - first, len(array))
            if low < high:
                yield array[low:high]
        if start >= stop:
            yield self.ranges[0][:0]
