"""Candidates of a row: in storage from the search of a block until the merge of all, then filtered.

A file holds those of one block for one shard, written and read in chunks of one query batch, laid end to end; a chunk
of n rows is n · F keys, then n float32: the lowest score among the row's positives in this block, infinity without any.
Little-endian, as every machine that Faiss runs on.

Filters of false negatives (NV-Retriever, arXiv:2407.15831: Top-k shifted by N, TopK-MarginPos and TopK-PercPos): ranks
[skip_top, window) are counted over all labels that are neither positive nor filtered, best first. With a margin a
negative is kept where its score < p - margin - relative_margin · |p|, p the lowest score among the row's positives.
Rows without positives keep theirs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.options import MineOptions
from schemas import storage
from schemas.checksums import crc32
from schemas.errors import StorageError
from search.candidates import EMPTY, best, unpack


@dataclass(frozen=True)
class Chunks:
    """Rows of a file, and the CRC-32 of each chunk."""

    rows: int
    checksums: tuple[int, ...]


def write_chunks(url: str, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Chunks:
    """Write chunks (keys uint64 [n, F], weakest float32 [n]) to `url`, whole or not at all. Raises StorageError."""
    rows, checksums = 0, []
    with storage.writing(url, durable=False) as path, open(path, "wb") as file:
        for chunk in chunks:
            checksum = 0
            for part in chunk:
                data = np.ascontiguousarray(part).data.cast("B")
                file.write(data)
                checksum = crc32(data, checksum)
            rows += len(chunk[0])
            checksums.append(checksum)
    return Chunks(rows, tuple(checksums))


def read_chunk(url: str, chunks: Chunks, number: int, batch: int, fetch: int) -> tuple[np.ndarray, np.ndarray]:
    """Read chunk `number` of a file with `batch` rows a chunk: keys uint64 [n, fetch], weakest float32 [n].

    Damaged bytes are read again. Raises StorageError: gone, or damaged for good.
    """
    row_bytes = 8 * fetch + 4
    first = number * batch
    rows = min(batch, chunks.rows - first)
    try:
        bounds = first * row_bytes, (first + rows) * row_bytes
        data = storage.read_range(url, *bounds, checksum=chunks.checksums[number])
    except FileNotFoundError:
        raise StorageError(f"{url}: these candidates are gone. Run the same command again.") from None
    keys = np.frombuffer(data, np.uint64, rows * fetch).reshape(rows, fetch)
    return keys, np.frombuffer(data, np.float32, rows, 8 * rows * fetch)


def has_margin(options: MineOptions) -> bool:
    """Tell whether the scores of positives matter."""
    return options.margin is not None or options.relative_margin is not None


def fetched(options: MineOptions, width: int) -> int:
    """Return how many candidates of each label range let a row keep `width`, unless a margin drops more."""
    return options.window or options.skip_top + width * (2 if has_margin(options) else 1)


def limits(options: MineOptions, weakest: np.ndarray) -> np.ndarray:
    """Bound scores float32 [B] by the weakest positive's score [B], which is infinity where there is none."""
    some = np.isfinite(weakest)
    positive = np.where(some, weakest, np.float32(0)).astype(np.float64)
    highest = positive - (options.margin or 0.0) - (options.relative_margin or 0.0) * np.abs(positive)
    return np.where(some, highest, np.inf).astype(np.float32)


def select(
    ranges: Sequence[np.ndarray],
    weakest: np.ndarray,
    options: MineOptions,
    width: int,
    counts: Counter[str] | None = None,
) -> np.ndarray:
    """Return the best `width` keys of each label range that pass: G times [B, F] sorted, weakest [B] -> [B, G · width].

    Each range's columns are best first, with EMPTY behind. `counts` gets each candidate under the first rule that drops
    it, and those that are kept.
    """
    counts = Counter() if counts is None else counts
    ranges = list(ranges)
    ranked = ranges[0] if len(ranges) == 1 else np.sort(np.concatenate(ranges, axis=1), axis=1)
    if options.skip_top:
        last = _key_at(ranked, options.skip_top - 1)
        ranges = [_drop(keys, keys <= last[:, None], counts, "skipped_top") for keys in ranges]
    if options.window is not None:
        last = _key_at(ranked, options.window - 1)
        ranges = [_drop(keys, keys > last[:, None], counts, "beyond_window") for keys in ranges]
    if has_margin(options):
        highest = limits(options, weakest)
        ranges = [_drop(keys, unpack(keys)[1] >= highest[:, None], counts, "above_margin") for keys in ranges]
    kept = np.concatenate([best(keys, width) for keys in ranges], axis=1)
    counts["kept"] += int((kept != EMPTY).sum())
    return kept


def _key_at(ranked: np.ndarray, rank: int) -> np.ndarray:
    """Return the key of that rank [B], or the last one below EMPTY where a row has fewer."""
    if rank >= ranked.shape[1]:
        return np.full(len(ranked), EMPTY - np.uint64(1))
    return np.minimum(ranked[:, rank], EMPTY - np.uint64(1))


def _drop(keys: np.ndarray, gone: np.ndarray, counts: Counter[str], rule: str) -> np.ndarray:
    gone &= keys != EMPTY
    counts[rule] += int(gone.sum())
    return np.where(gone, EMPTY, keys)
