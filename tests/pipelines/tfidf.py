"""TF-IDF features of texts in the XC form, written as the sparse text files of the XC repository."""

import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tests.pipelines.raw import read_lines

_WORD = re.compile(r"\w\w+")


def write_tfidf(raw: Path, out: Path, *, ngrams: int = 2, least: int = 2) -> Path:
    """`raw` (JSON lines) as feature and label matrices: unit rows of TF-IDF, of n-grams that `least` texts hold."""
    out.mkdir(parents=True, exist_ok=True)
    records = {name: read_lines(raw / f"{name}.json.gz") for name in ("trn", "tst", "lbl")}
    bags = {name: [_bag(record, ngrams) for record in split_bags] for name, split_bags in records.items()}
    learnt = [*bags["trn"], *bags["lbl"]]
    frequency = Counter(gram for bag in learnt for gram in bag)
    grams = sorted(gram for gram, n in frequency.items() if n >= least)
    number = {gram: i for i, gram in enumerate(grams)}
    idf = {gram: math.log((1 + len(learnt)) / (1 + frequency[gram])) + 1 for gram in grams}
    for name, split_bags in bags.items():
        rows = [_row(bag, number, idf) for bag in split_bags]
        (out / f"{name}_X_Xf.txt").write_text(_matrix(rows, len(grams)))
    for name in ("trn", "tst"):
        labels = [dict.fromkeys(record["target_ind"], 1.0) for record in records[name]]
        (out / f"{name}_X_Y.txt").write_text(_matrix(labels, len(records["lbl"])))
    for path in raw.glob("filter_labels_*.txt"):
        shutil.copy(path, out / path.name)
    return out


def _bag(record: dict[str, Any], ngrams: int) -> Counter[str]:
    words = _WORD.findall(f"{record.get('title', '')} {record.get('content', '')}".lower())
    return Counter(
        " ".join(words[first : first + length])
        for length in range(1, ngrams + 1)
        for first in range(len(words) - length + 1)
    )


def _row(bag: Counter[str], number: dict[str, int], idf: dict[str, float]) -> dict[int, float]:
    row = {number[gram]: n * idf[gram] for gram, n in bag.items() if gram in number}
    norm = math.sqrt(sum(value * value for value in row.values())) or 1.0
    return {feature: value / norm for feature, value in row.items()}


def _matrix(rows: list[dict[int, float]], columns: int) -> str:
    lines = [" ".join(f"{i}:{value:.6g}" for i, value in sorted(row.items())) for row in rows]
    return "\n".join([f"{len(rows)} {columns}", *lines]) + "\n"
