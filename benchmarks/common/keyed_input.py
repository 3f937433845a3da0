"""Synthetic inputs with string keys, written as a stream; equal sizes give equal bytes on any machine."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_BATCH = 20_000
# Lengths of made-up words are like those of English words; frequencies follow Zipf's law.
_VOCABULARY = 20_000
_LETTERS = np.frombuffer(b"etaoinshrdlucmfwypvbgkqjxz", np.uint8)


def write_keyed(
    folder: Path,
    points: int,
    labels: int,
    files: int = 4,
    seed: int = 0,
    listed: int | None = None,
    before: tuple[int, int] = (0, 0),
) -> int:
    """Write JSONL with string keys: `labels.jsonl`, and `train` in `files` files; return the bytes written.

    A point has 6 to 18 words and 1 to 9 labels, both Zipfian. listed: number of labels in `labels.jsonl`. before:
    numbers of existing points and labels; new points and labels differ, and new points have labels of both kinds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = _words(seed)
    total = before[1] + labels
    stop = total if listed is None else before[1] + listed
    written = _write(folder / "labels.jsonl", _labels(before[1], stop, words, seed))
    bounds = before[0] + np.linspace(0, points, files + 1).astype(int)
    for number in range(files):
        rows = _points(int(bounds[number]), int(bounds[number + 1]), total, words, seed)
        written += _write(folder / f"train-{number:02d}.jsonl", rows)
    return written


def label_key(number: int) -> str:
    """Return a key like keys in catalogues: ten characters that look random."""
    return f"B{zlib.crc32(str(number).encode()):08x}{number % 10}-{number}"


def label_number(key: str) -> int:
    """Return the number of a key from `label_key`."""
    return int(key.rpartition("-")[2])


def _labels(first: int, stop: int, words: np.ndarray, seed: int) -> Iterator[str]:
    for start in range(first, stop, _BATCH):
        draw = np.random.default_rng([seed, 1, start])
        count = min(_BATCH, stop - start)
        for number, text in zip(range(start, start + count), _texts(draw, count, words, 3, 9), strict=True):
            yield f'{{"key": "{label_key(number)}", "text": "{text}"}}\n'


def _points(first: int, stop: int, labels: int, words: np.ndarray, seed: int) -> Iterator[str]:
    for start in range(first, stop, _BATCH):
        draw = np.random.default_rng([seed, 2, start])
        count = min(_BATCH, stop - start)
        texts = _texts(draw, count, words, 6, 18)
        named = draw.integers(1, 10, count)
        drawn = (draw.random(int(named.sum())) ** 3 * labels).astype(np.int64).tolist()
        ends = np.cumsum(named).tolist()
        for row, (text, end, n) in enumerate(zip(texts, ends, named.tolist(), strict=True), start=start):
            keys = ", ".join(f'"{label_key(label)}"' for label in dict.fromkeys(drawn[end - n : end]))
            yield f'{{"key": "q{row:010d}", "text": "{text}", "labels": [{keys}]}}\n'


def _texts(draw: np.random.Generator, count: int, words: np.ndarray, least: int, most: int) -> list[str]:
    lengths = draw.integers(least, most + 1, count)
    picked = words[(draw.random(int(lengths.sum())) ** 4 * len(words)).astype(np.int64)].tolist()
    ends = np.cumsum(lengths).tolist()
    return [" ".join(picked[end - n : end]) for end, n in zip(ends, lengths.tolist(), strict=True)]


def _words(seed: int) -> np.ndarray:
    draw = np.random.default_rng([seed, 0])
    lengths = np.clip(draw.poisson(5.5, _VOCABULARY), 2, 14)
    letters = _LETTERS[(draw.random(int(lengths.sum())) ** 1.7 * len(_LETTERS)).astype(int)].tobytes().decode()
    ends = np.cumsum(lengths).tolist()
    return np.array([letters[end - n : end] for end, n in zip(ends, lengths.tolist(), strict=True)], object)


def _write(path: Path, lines: Iterator[str]) -> int:
    with path.open("w", encoding="ascii", buffering=1 << 20) as out:
        return sum(map(out.write, lines))
