"""A run with a fusion of trees, on texts with titles that name their labels with other endings; some occur twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import extremis
from pipelines.options import ShardOptions
from pipelines.shard import shard

ROWS, LABELS, HELD_OUT = 420, 60, 0.4
ENDINGS = ("", "s", "ante", "umul", "ithok")
RECIPE: dict[str, Any] = {
    "train.epochs": 2,
    "order.batch": 32,
    "order.streams": 2,
    "encoder.dimension": 8,
    "encoder.hidden": 8,
    "encoder.buckets": 64,
    "negatives.random": 8,
    "negatives.hard": 0,
    "data.label_texts": False,
    "data.holdout": HELD_OUT,
    "logging.tensorboard": False,
}
NOISE = [f"{first}{second}" for first in ("ba", "ce", "di", "fo", "gu") for second in ("lo", "me", "ni", "ra", "su")]
Row = dict[str, Any]


def name_of(label: int) -> str:
    """Two words: the first is of several labels, the second of one."""
    return f"zy{'aeiou'[label % 5]}karona xw{'abcdefghij'[label // 10]}{'klmnopqrst'[label % 10]}ebori"


def draw_rows(count: int = ROWS, labels: int = LABELS, seed: int = 0, prefix: str = "k") -> list[Row]:
    """Rows whose texts name their labels, now and then in the title; every seventh has the text of an earlier row."""
    draw, rows = np.random.default_rng(seed), list[Row]()
    for number in range(count):
        own = sorted(draw.choice(labels, draw.integers(1, 4), replace=False).tolist())
        noise = draw.choice(NOISE, 12).tolist()
        title = [*noise[:2], *(name_of(own[0]).split() if draw.random() < 0.5 else [])]
        named = [word + draw.choice(ENDINGS) for label in own for word in name_of(label).split() if draw.random() < 0.9]
        text = " ".join(title) + "\n" + " ".join(draw.permutation([*noise[2:], *named]).tolist())
        if number % 7 == 6:
            text = rows[draw.integers(number)]["text"]
        rows.append({"key": f"{prefix}{number}", "text": text, "labels": [f"l{label}" for label in own]})
    return rows


def label_rows(labels: int) -> list[Row]:
    return [{"key": f"l{label}", "text": name_of(label)} for label in range(labels)]


def write_data(folder: Path, rows: list[Row], labels: int | list[Row] = LABELS, **options: Any) -> str:
    """Shard `rows`, with `labels` that have names, to folder/data."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    named = label_rows(labels) if isinstance(labels, int) else labels
    for name, lines in (("train.jsonl", rows), ("labels.jsonl", named)):
        (raw / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = {"shards": 2, "row_group_rows": 50}
    chosen |= options if "onto" in options else {"tokenizer": "train:300"} | options
    shard(str(raw), str(folder / "data"), ShardOptions(**chosen))
    return str(folder / "data")


def train_and_fuse(folder: Path, data: str, **changes: Any) -> dict[str, Any]:
    extremis.train("random", data, folder / "run", set=RECIPE | changes, progress=False)
    return extremis.fuse(data, folder / "run", shortlist=15, progress=False)
