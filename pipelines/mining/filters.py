"""What becomes a negative: rules about scores and ranks, labels with equal texts; and the files of candidates."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.options import MarginOptions, MineOptions
from schemas import PAD, storage
from schemas.errors import InputError, StorageError
from schemas.hashing import combine, hash_strings, hash_texts
from schemas.ragged import Ragged, offsets_of
from schemas.randomness import Purpose
from schemas.shard_files.parquet import matrix_array
from schemas.storage import crc32
from schemas.table import Table
from search.exclusions import Exclusions, ScoreRule
from search.topk import EMPTY, best, unpack

_PLANES = 8
_CODEC = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True)
class Chunks:
    """Chunks of a file: `shapes` [R, n, F] of the keys, `edges` (byte offsets and the end), and CRC-32 `checksums`."""

    shapes: tuple[tuple[int, int, int], ...]
    edges: tuple[int, ...]
    checksums: tuple[int, ...]


def pack_chunk(keys: np.ndarray, start: int) -> bytes:
    """Compress keys uint64 [R, n, F] for `unpack_chunk`; `start`: the group's first label."""
    labels = (keys & np.uint64(0xFFFFFFFF)).astype("<u4") - np.uint32(start)  # modulo 2^32, like all that follows
    scores = (keys >> np.uint64(32)).astype("<u4")
    scores[..., 1:] -= scores[..., :-1].copy()
    planes = [np.ascontiguousarray(half.reshape(-1, 1).view(np.uint8).T) for half in (labels, scores)]
    parts = [_CODEC.compress(plane, asbytes=True) for half in planes for plane in half]
    sizes = np.array([len(part) for part in parts], "<u4").tobytes()
    return b"".join([sizes, *parts])


def unpack_chunk(data: bytes, shape: tuple[int, int, int], start: int) -> np.ndarray:
    """Return the input of `pack_chunk`: keys uint64 of shape `shape`."""
    sizes = np.frombuffer(data, "<u4", _PLANES)
    edges = np.cumsum([sizes.nbytes, *sizes])
    count, view = int(np.prod(shape)), memoryview(data)
    planes = np.empty((2, count, 4), np.uint8)
    for number in range(_PLANES):
        part = view[edges[number] : edges[number + 1]]
        planes[number // 4, :, number % 4] = np.frombuffer(_CODEC.decompress(part, count), np.uint8)
    labels, scores = planes.view("<u4").reshape(2, *shape)
    keys = np.cumsum(scores, axis=-1, dtype="<u4").astype(np.uint64) << np.uint64(32)
    keys |= labels + np.uint32(start)
    return keys


def write_chunks(url: str, start: int, chunks: Iterable[np.ndarray]) -> Chunks:
    """Write chunks (keys uint64 [R, n, F]) to `url` atomically. Raises StorageError."""
    shapes, edges, checksums = [], [0], []
    with storage.writing(url, durable=False) as path, open(path, "wb") as file:
        for keys in chunks:
            data = pack_chunk(keys, start)
            file.write(data)
            shapes.append(keys.shape)
            edges.append(edges[-1] + len(data))
            checksums.append(crc32(data))
    return Chunks(tuple(shapes), tuple(edges), tuple(checksums))


def read_chunk(url: str, chunks: Chunks, number: int, start: int) -> np.ndarray:
    """Read chunk `number` of a file. Damaged bytes are read again.

    Raises StorageError if the file is missing or permanently damaged.
    """
    try:
        start_byte, stop_byte = chunks.edges[number : number + 2]
        data = storage.read_range(url, start_byte, stop_byte, checksum=chunks.checksums[number])
    except FileNotFoundError:
        raise StorageError(f"{url}: this file of candidates is missing. Run the same command again.") from None
    return unpack_chunk(data, chunks.shapes[number], start)


def has_margin(options: MarginOptions) -> bool:
    """Return whether the options compare negatives with the scores of positives."""
    return options.margin is not None or options.relative_margin is not None


def is_bounded(options: MineOptions) -> bool:
    """Return whether the options leave out high-scoring labels, so that a row may need labels of any rank."""
    return has_margin(options) or options.max_score is not None


def weakest_positives(rows: int, of: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the lowest score among each row's positives, float32 [rows]; infinity without positives.

    `scores` [V] are the scores of positives, and `of` [V] their rows.
    """
    weakest = np.full(rows, np.inf, np.float32)
    np.minimum.at(weakest, of, scores)
    return weakest


def above_margin(options: MarginOptions, scores: np.ndarray, weakest: np.ndarray) -> np.ndarray:
    """Return which `scores` [B, F] are too close to a row's lowest positive score in `weakest` [B]: bool [B, F]."""
    some = np.isfinite(weakest)
    positive = np.where(some, weakest, np.float32(0)).astype(np.float64)
    highest = positive - (options.margin or 0.0) - (options.relative_margin or 0.0) * np.abs(positive)
    return scores >= np.where(some, highest, np.inf).astype(np.float32)[:, None]  # type: ignore[no-any-return]


def make_rule(options: MineOptions, weakest: np.ndarray, width: int) -> ScoreRule | None:
    """Return the rule for a search that drops labels above the upper score limits of rows, after the top-ranked labels.

    None if any rank may be a negative, or `window` limits the ranks. `weakest` [B] as in `select_negatives`.
    """
    if options.window is not None or not is_bounded(options):
        return None
    top = options.skip_top

    def drop(keys: np.ndarray, rows: np.ndarray, counts: Counter[str]) -> np.ndarray:
        return np.hstack([keys[:, :top], _drop_above(keys[:, top:], options, weakest[rows], counts)])

    return ScoreRule(drop, top + width)


def select_negatives(
    ids: np.ndarray,
    ranges: Sequence[np.ndarray],
    weakest: np.ndarray,
    options: MineOptions,
    width: int,
    counts: Counter[str] | None = None,
) -> np.ndarray:
    """Select `width` keys that pass the filters from each of G label ranges: G arrays [B, F] become one [B, G · width].

    The columns of each range are sorted best first, with EMPTY at the end. `weakest` [B] is the lowest score among each
    row's positives. The query ids `ids` int64 [B] seed the random choice. `counts` counts the selected candidates, and
    counts each rejected candidate under the first rule that rejects it.
    """
    counts = Counter() if counts is None else counts
    ranked = ranges[0] if len(ranges) == 1 else np.sort(np.concatenate(ranges, axis=1), axis=1)
    if options.skip_top:
        last = _key_at(ranked, options.skip_top - 1)
        ranges = [_drop(keys, keys <= last[:, None], counts, "skipped_top") for keys in ranges]
    if options.window is not None:
        last = _key_at(ranked, options.window - 1)
        ranges = [_drop(keys, keys > last[:, None], counts, "beyond_window") for keys in ranges]
    ranges = [_drop_above(keys, options, weakest, counts) for keys in ranges]
    if (least := options.min_score) is not None:
        ranges = [_drop(keys, unpack(keys)[1] < np.float64(least), counts, "below_min_score") for keys in ranges]
    if options.sample != "top":
        ranges = [_drop(keys, ~_draw(keys, ids, options, width), counts, "not_drawn") for keys in ranges]
    kept = np.concatenate([best(keys, width) for keys in ranges], axis=1)
    counts["kept"] += int((kept != EMPTY).sum())
    return kept


def _drop_above(keys: np.ndarray, options: MineOptions, weakest: np.ndarray, counts: Counter[str]) -> np.ndarray:
    if has_margin(options):
        keys = _drop(keys, above_margin(options, unpack(keys)[1], weakest), counts, "above_margin")
    if options.max_score is not None:
        keys = _drop(keys, unpack(keys)[1] > np.float64(options.max_score), counts, "above_max_score")
    return keys


def _draw(keys: np.ndarray, ids: np.ndarray, options: MineOptions, width: int) -> np.ndarray:
    """Sample `width` keys per row, and return them as a mask bool [B, F] that depends only on seed, query and label."""
    label_ids, scores = unpack(keys)
    key = combine(np.array([options.seed % (1 << 64)], np.uint64), np.array([Purpose.MINED_RANKS], np.uint64))
    hashes = combine(combine(key, ids.astype(np.uint64))[:, None], label_ids.astype(np.uint64))
    uniform = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # within (0, 1)
    places = -np.log(-np.log(uniform))
    if options.sample == "softmax":
        places += scores / np.float64(options.temperature or 1.0)
    places[keys == EMPTY] = -np.inf
    order = np.argsort(-places, axis=1, kind="stable")[:, :width]
    marks = np.zeros(keys.shape, bool)
    np.put_along_axis(marks, order, True, axis=1)
    return marks


def rows_of_table(query_ids: pa.Array, keys: np.ndarray, schema: pa.Schema, *more: np.ndarray) -> pa.Table:
    """Build rows of a negatives table from query ids [B], their keys [B, K], and additional scores `more` [B, K].

    Raises InputError for a score that is not finite.
    """
    label_ids, scores = unpack(keys)
    columns = [query_ids, matrix_array(label_ids, schema.field("label_ids").type.value_type)]
    for each in (scores, *more):
        for row, column in np.argwhere((label_ids != PAD) & ~np.isfinite(each))[:1]:
            raise InputError(
                f"query_id {query_ids[row]}, label {label_ids[row, column]}: the score is {each[row, column]}, not a "
                "finite float32. The model is damaged, or its vectors are too large: use another checkpoint, or scale "
                "the vectors to length 1."
            )
        columns.append(matrix_array(np.where(label_ids == PAD, -np.inf, each), pa.float32()))
    return pa.Table.from_arrays(columns, schema=schema)


def _key_at(ranked: np.ndarray, rank: int) -> np.ndarray:
    """Return the key at rank `rank` [B], or the last key if a row has fewer keys."""
    if rank >= ranked.shape[1]:
        return np.full(len(ranked), EMPTY - np.uint64(1))
    return np.minimum(ranked[:, rank], EMPTY - np.uint64(1))


def _drop(keys: np.ndarray, gone: np.ndarray, counts: Counter[str], rule: str) -> np.ndarray:
    gone &= keys != EMPTY
    counts[rule] += int(gone.sum())
    return np.where(gone, EMPTY, keys)


class Aliases(NamedTuple):
    """M labels that share their text with another label, and their G texts; all arrays are uint32.

    `labels` [M] are in ascending order, and `texts` [M] are the numbers of the labels' texts, in [0, G). `members` [M]
    are the same labels ordered by (text, label): the labels of text g are members[edges[g] : edges[g + 1]].
    """

    labels: np.ndarray
    texts: np.ndarray
    members: np.ndarray
    edges: np.ndarray

    def add_to(self, exclusions: Exclusions) -> Exclusions:
        """Add every label with the same text as a positive, including the positive itself, to the exclusions."""
        positives, ids = exclusions.positives, exclusions.positives.entries
        at = np.minimum(np.searchsorted(self.labels, ids.astype(np.uint32)), len(self.labels) - 1)
        hits = self.labels[at] == ids
        groups = len(self.edges) - 1
        rows, texts = np.divmod(np.unique(positives.row_of()[hits] * groups + self.texts[at[hits]]), groups)
        same = Ragged(self.members, self.edges).take(texts)
        counts = np.bincount(rows, same.counts, positives.rows).astype(np.int64)
        return exclusions._replace(same_text=Ragged.from_counts(same.values.astype(np.int64), counts))

    def write(self, url: str) -> None:
        """Write the aliases for `read_aliases`. Raises StorageError."""
        sizes = np.array([len(self.labels), len(self.edges)], "<u4")
        storage.write_sealed(url, np.concatenate([sizes, *self]).astype("<u4").tobytes())


@functools.lru_cache(maxsize=1)
def read_aliases(url: str) -> Aliases:
    """Read a file written by `Aliases.write`, once per process. Raises StorageError."""
    try:
        content = np.frombuffer(storage.read_sealed(url), "<u4")
    except FileNotFoundError:
        raise StorageError(
            f"{url}: the file of labels with equal texts is missing. Run the same command again."
        ) from None
    return Aliases(*np.split(content[2:], np.arange(1, 4) * int(content[0])))


def find_aliases(labels: Table | None, rule: str) -> Aliases | None:
    """Return the labels with equal texts according to `rule` (equal, near or off), or None if there are none.

    Raises TableError, StorageError.
    """
    return None if labels is None or rule == "off" else _find(labels.url, labels.digest, rule)


@functools.lru_cache(maxsize=1)
def _find(url: str, digest: str, rule: str) -> Aliases | None:
    """Find the aliases once per process: a miner that runs alongside a trainer needs the aliases for each dump."""
    table = Table.open(url, "labels")
    hashes = np.zeros(table.rows, np.uint64)
    for rows in table.batches(["label_id", "text"]):
        hashes[rows.column("label_id").to_numpy()] = hash_texts(rows.column("text"), rule, 0)
    ordered = np.sort(hashes)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    twice = twice[twice != hash_strings(pa.array([""]), 0)[0]]  # except the empty text
    if not len(twice):
        return None
    at = np.minimum(np.searchsorted(twice, hashes), len(twice) - 1)
    ids = np.flatnonzero(twice[at] == hashes).astype(np.uint32)
    groups = at[ids].astype(np.uint32)
    edges = offsets_of(np.bincount(groups, minlength=len(twice))).astype(np.uint32)
    return Aliases(ids, groups, ids[np.argsort(groups, kind="stable")], edges)
