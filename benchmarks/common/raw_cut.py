"""Cuts of raw folders of the XC repository: some training rows in random order, with or without unseen labels."""

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

TEST_FILTER = "filter_labels_test.txt"


def read(place: Path) -> Iterable[str]:
    with gzip.open(place, "rt", encoding="utf-8") as file:
        yield from file


def cut(raw: Path, out: Path, rows: int, seen: bool = False, named: bool = True) -> None:
    """Write the first `rows` training rows in random order (0: all), all test rows, the labels, and the filter.

    With `seen`, only the labels of these training rows are kept, and the test rows that have one of them; without
    `named`, the labels' texts are empty.
    """
    if out.exists():
        return
    out.mkdir(parents=True)
    train, test, labels = (list(read(raw / f"{name}.json.gz")) for name in ("trn", "tst", "lbl"))
    filters = (raw / TEST_FILTER).read_text().splitlines() if (raw / TEST_FILTER).exists() else []
    if rows and rows < len(train):
        train = random.Random(0).sample(train, rows)
        if seen:
            points, kept = [json.loads(line) for line in train], [json.loads(line) for line in test]
            number = {old: new for new, old in enumerate(sorted({i for point in points for i in point["target_ind"]}))}
            kept_rows = [row for row, point in enumerate(kept) if not number.keys().isdisjoint(point["target_ind"])]
            train = [_renumbered(point, number) for point in points]
            test = [_renumbered(kept[row], number) for row in kept_rows]
            labels = [labels[old] for old in number]
            row_of = {str(old): new for new, old in enumerate(kept_rows)}
            pairs = (line.split() for line in filters)
            filters = [f"{row_of[row]} {number[int(i)]}" for row, i in pairs if row in row_of and int(i) in number]
    if not named:
        labels = [json.dumps({**json.loads(line), "title": "", "content": ""}) + "\n" for line in labels]
    for name, lines in (("trn", train), ("tst", test), ("lbl", labels)):
        with gzip.open(out / f"{name}.json.gz", "wt", encoding="utf-8") as file:
            file.writelines(lines)
    (out / TEST_FILTER).write_text("".join(f"{line}\n" for line in filters))


def _renumbered(point: dict, number: dict[int, int]) -> str:
    pairs = zip(point["target_ind"], point.get("target_rel", [1.0] * len(point["target_ind"])), strict=True)
    found = [(number[i], weight) for i, weight in pairs if i in number]
    ids, weights = (list(column) for column in zip(*found, strict=True))
    return json.dumps({**point, "target_ind": ids, "target_rel": weights}) + "\n"
